"""The draft head against golden drafts: six draft calls behind a prompt, both modes.

Call i follows decode token i and drafts from the stored token after it, so errors do not add up.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.dspark import Blocks, DraftHead
from mdi_exec.model.weights import Weights
from mdi_exec.numerics import Numerics
from tests.exec.conftest import blocks_for
from tests.exec.engines import report
from tests.exec.test_logits import (
    CLEAR_GAP,
    EXACT_MAX_ABS,
    ROUNDED_MAX_ABS,
    ROUNDED_MEAN_ABS,
    ROUNDED_SAME_ARGMAX,
)

SIZE = 5
LENGTHS = (37, 129)


class Session:
    """One sequence of the tiny model in a cache with draft rings; `features` are the newest row's.

    `slot` and chunks of the prompt must not be seen in anything.
    """

    def __init__(self, runner, tensors, slot=1):
        self.model, self.slot = runner.model, slot
        self.head = DraftHead(self.model, Weights(tensors).sub("mtp"))
        layout = CacheLayout(config=self.model.config, numerics=self.model.numerics,
                             max_backtrack=SIZE + 1, with_draft=True)  # fmt: skip
        self.cache = DeviceCache(layout, num_blocks=12, num_slots=4, device="cpu")
        self.store, self.head.store = self.head.store, self.watch
        self.features, self.logits = None, []

    def watch(self, features, ctx):
        self.features = torch.cat(list(features), dim=1)
        self.store(features, ctx)

    def feed(self, ids, k):
        item = BatchItem(len(ids), k, self.slot, blocks_for(k), 1)
        return self.model.forward(Batch.build([item], ids), self.cache, draft=self.head)

    def draft(self, last, base, size=SIZE, forced=None):
        """Greedy drafts; `forced` ids are taken in their place once their logits are noted."""
        self.logits = []

        def pick(i, logits):
            self.logits.append(logits)
            return logits.argmax(dim=1) if forced is None else forced[i : i + 1].long()

        at = torch.tensor
        blocks = Blocks(at([last]), at([base]), at([self.slot]))
        return self.head.propose(blocks, size, self.cache, pick)


class Call(NamedTuple):
    """What one draft call gave."""

    features: Tensor
    logits: Tensor
    confidence: Tensor
    ids: Tensor


def golden_calls(runner, tensors, golden, length, *, chunk=None, slot=1, force=False):
    """Yield each call's result beside the golden one."""
    prefix = "f32_" if runner.model.numerics is Numerics.FLOAT32 else ""
    stored = golden(f"dspark/{prefix}p{length}")
    session, prompt, step = Session(runner, tensors, slot), stored["prompt_ids"], chunk or length
    for start in range(0, length, step):
        session.feed(prompt[start : start + step], min(start + step, length))
    for i in range(6):
        session.feed(stored["decode_ids"][i : i + 1], length + i + 1)
        last, *wanted = stored["draft_ids"][i].unbind()
        forced = torch.stack(wanted) if force else None
        drafts = session.draft(int(last), length + i, forced=forced)
        found = Call(session.features[-1], torch.cat(session.logits), drafts.confidence[0],
                     drafts.ids[0])  # fmt: skip
        names = ("main_hidden", "draft_logits", "confidence")
        yield found, Call(*(stored[name][i] for name in names), torch.stack(wanted).long())


@pytest.mark.parametrize("length", LENGTHS)
def test_without_rounding_drafts_are_golden(exact, tiny_tensors, golden, length):
    for found, stored in golden_calls(exact, tiny_tensors, golden, length):
        for value, wanted in zip(found[:3], stored[:3], strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=EXACT_MAX_ABS)
        assert torch.equal(found.ids, stored.ids)


@pytest.mark.parametrize("length", LENGTHS)
def test_rounded_drafts_are_as_near_as_rounding_allows(rounded, tiny_tensors, golden, length):
    """Every pick is conditioned on the golden draft before it."""
    calls = list(golden_calls(rounded, tiny_tensors, golden, length, force=True))
    found, stored = (torch.cat([call[side].logits for call in calls]) for side in (0, 1))
    errors = (found - stored).abs()
    features = torch.stack([c.features.float() - s.features.float() for c, s in calls]).abs()
    confidence = torch.stack([c.confidence - s.confidence for c, s in calls]).abs()
    report(f"prompt of {length}: logits differ by {errors.mean():.3f} on average, by at most "
           f"{errors.max():.2f}; features by {features.mean():.4f}, confidences by at most "
           f"{confidence.max():.3f}")  # fmt: skip
    assert errors.mean() <= ROUNDED_MEAN_ABS
    assert errors.max() <= ROUNDED_MAX_ABS
    assert max(features.mean(), confidence.mean()) <= ROUNDED_MEAN_ABS
    is_same = found.argmax(dim=1) == stored.argmax(dim=1)
    assert is_same.float().mean() >= ROUNDED_SAME_ARGMAX
    best = stored.topk(2, dim=1).values
    assert is_same[best[:, 0] - best[:, 1] > CLEAR_GAP].all()


def test_chunks_and_slots_do_not_show(rounded, tiny_tensors, golden):
    whole = golden_calls(rounded, tiny_tensors, golden, 129)
    chunked = golden_calls(rounded, tiny_tensors, golden, 129, chunk=50, slot=3)
    for (one, _), (other, _) in zip(whole, chunked, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_rejected_rows_leave_no_trace(rounded, tiny_tensors, size):
    """Drafts after three rows, two of them rejected, are those after the one that stands."""
    ids = torch.arange(2, 132, dtype=torch.int32)
    plain, drafted = (Session(rounded, tiny_tensors) for _ in range(2))
    for session, wrong in ((plain, []), (drafted, [7, 8][:size])):
        session.feed(ids, 130)
        session.draft(9, 129, size)
        session.feed(torch.tensor([9, *wrong], dtype=torch.int32), 131 + len(wrong))
    found = [session.draft(11, 130, size) for session in (plain, drafted)]
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, plain.logits, drafted.logits))


def test_sequences_do_not_feel_each_other(rounded, tiny_tensors):
    ids = torch.arange(2, 132, dtype=torch.int32)
    alone, beside = (Session(rounded, tiny_tensors) for _ in range(2))
    for session in (alone, beside):
        session.feed(ids, 130)
    own = alone.draft(9, 129)
    beside.slot = 2
    beside.feed(ids[:40], 40)

    def greedy(_, logits):
        return logits.argmax(dim=1)

    blocks = Blocks(torch.tensor([5, 9]), torch.tensor([39, 129]), torch.tensor([2, 1]))
    both = beside.head.propose(blocks, SIZE, beside.cache, greedy)
    assert torch.equal(both.ids[1], own.ids[0])
    assert torch.equal(both.confidence[1], own.confidence[0])
