"""Golden prompts through the whole engine, in every way a scheduler may cut and mix them.

Stored tokens are forced, so every run has the same inputs. Each row of logits is held against the
golden one and, bit for bit, against the same row of a run of all prompts in one batch.
"""

import random

import pytest
import torch

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.numerics import Numerics
from tests.exec.engines import GOLDEN_MODES, SMALL, Watch, is_empty, report
from tests.exec.weights import GOLDEN_TINY

LENGTHS = (1, 37, 127, 128, 129, 300, 520)
EXACT_MAX_ABS = 1e-4
# Rounding magnifies last bits: bounds measured with the golden data (tests/golden).
ROUNDED_MEAN_ABS, ROUNDED_MAX_ABS = 0.2, 2.0
ROUNDED_SAME_ARGMAX = 0.85
CLEAR_GAP = 1.0
CLOSE_MEAN_ABS, CLOSE_SHARE, CLOSE_SHARE_ELSEWHERE = 0.05, 0.5, 0.1
ALL_STEPS, FEW_STEPS = 24, 4


class Run:
    """One run of golden prompts: what came out, and what its scheduler and model did."""

    def __init__(self, numerics, files, *, steps, scramble=False, **options):
        with LLM(GOLDEN_TINY, numerics=numerics.value, **{**SMALL, **options}) as llm:
            watch, queues = Watch(llm), llm.engine.scheduler.queues
            if scramble:
                random.Random(7).shuffle(queues.blocks._free)
            self.outputs = llm.generate(
                [file["prompt_ids"].tolist() for file in files.values()],
                [forced(file, steps) for file in files.values()],
            )
            self.num_preempted = llm.engine.scheduler.num_preempted
            assert is_empty(llm.engine)
        self.numerics, self.files, self.steps = numerics, files, steps
        self.plans, self.rows = watch.plans, watch.rows

    def prefills(self):
        return [plan for plan in self.plans if plan.prompts]

    def rows_beside_golden(self):
        """Every row computed, the golden rows, and by how much their best token leads."""
        found, wanted, gaps = [], [], []
        for output, (length, file) in zip(self.outputs, self.files.items(), strict=True):
            assert list(output.token_ids) == file["decode_ids"][: self.steps + 1].tolist()
            expected = torch.cat((file["prefill_last"].unsqueeze(0), file["decode_logits"]))
            for index in range(self.steps + 1):
                for row in self.rows[length, length + index]:
                    found.append(row.cpu())
                    wanted.append(expected[index])
                    gaps.append(expected[index].topk(2).values.diff().abs())
        return torch.stack(found), torch.stack(wanted), torch.cat(gaps)

    def check_against_golden(self):
        """Hold every row computed against the golden one; return rows and golden rows."""
        found, wanted, gaps = self.rows_beside_golden()
        if self.numerics is Numerics.FLOAT32:
            torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT_MAX_ABS)
        else:
            check_rounded(found, wanted, gaps)
        return found, wanted

    def check_same_bits(self, other):
        """Every row is the other run's row of the same context, in every bit."""
        for length in self.files:
            for k in range(length, length + self.steps + 1):
                for row in self.rows[length, k]:
                    assert torch.equal(row, other.rows[length, k][0]), f"prompt {length}, at {k}"


def check_rounded(found, wanted, gaps):
    error = (found - wanted).abs()
    assert error.max() <= ROUNDED_MAX_ABS
    assert error.mean() <= ROUNDED_MEAN_ABS
    same = found.argmax(dim=1) == wanted.argmax(dim=1)
    assert same[gaps > CLEAR_GAP].all()
    # Of rows without a clear best token, chance decides some: two standard errors of so few.
    chance = (ROUNDED_SAME_ARGMAX * (1 - ROUNDED_SAME_ARGMAX) / len(same)) ** 0.5
    assert same.float().mean() >= ROUNDED_SAME_ARGMAX - 2 * chance


def forced(file, steps):
    tokens = tuple(file["decode_ids"][: steps + 1].tolist())
    return SamplingParams(max_tokens=steps + 1, ignore_eos=True, golden_token_ids=tokens)


@pytest.fixture(scope="module")
def files(golden):
    """Golden logits by mode and prompt length."""
    folders = {
        Numerics.QUANTISED: "logits", Numerics.FLOAT32: "logits_f32",
        Numerics.FOLDED: "logits",  # the released arithmetic: as near to it as other roundings
    }  # fmt: skip
    return {
        numerics: {length: golden(f"{folder}/p{length}") for length in LENGTHS}
        for numerics, folder in folders.items()
    }


@pytest.fixture(scope="module")
def one_batch(files):
    """All prompts in one batch, by mode; with ZOS, which is the default."""
    return {n: Run(n, files[n], steps=ALL_STEPS) for n in GOLDEN_MODES}


modes = pytest.mark.parametrize("numerics", GOLDEN_MODES, ids=lambda mode: mode.value)


@modes
def test_all_prompts_in_one_batch(one_batch, numerics):
    run = one_batch[numerics]
    found, _ = run.check_against_golden()
    assert len(found) == len(LENGTHS) * (ALL_STEPS + 1)
    assert [len(plan.seq_ids) for plan in run.prefills()] == [len(LENGTHS)]
    decodes = [len(plan.seq_ids) for plan in run.plans if plan.kind == "decode"]
    assert decodes[:ALL_STEPS] == [len(LENGTHS)] * ALL_STEPS


WAYS = {
    "one at a time": {"max_num_seqs": 1},
    "chunks of 128": {"max_num_batched_tokens": 128},
    "chunks of 61": {"max_num_batched_tokens": 61},
    "chunks of 61 without ZOS": {"max_num_batched_tokens": 61, "enable_zos": False},
    "chunks beside decode rows": {"max_num_batched_tokens": 61, "policy": "mixed"},
    "the same without ZOS": {"max_num_batched_tokens": 61, "policy": "mixed", "enable_zos": False},
    "scrambled blocks": {"max_num_batched_tokens": 333, "scramble": True},
}


@modes
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_scheduling(one_batch, files, numerics, way):
    options = WAYS[way]
    run = Run(numerics, files[numerics], steps=FEW_STEPS, **options)
    run.check_against_golden()
    run.check_same_bits(one_batch[numerics])
    budget = options.get("max_num_batched_tokens")
    assert any(plan.is_partial for plan in run.prefills()) == (budget is not None)
    if "policy" in options:
        assert any(plan.num_decoding and plan.prompts for plan in run.plans)
        assert not any(plan.kind == "prefill" for plan in run.plans)
    most = max(LENGTHS) if way == "one at a time" else sum(LENGTHS)
    assert max(sum(plan.qs) for plan in run.prefills()) == (budget or most)


@modes
def test_prompts_in_chunks_of_one_token(one_batch, files, numerics):
    """Not the longest prompts: a step takes as long for one token as for a hundred."""
    few = {length: files[numerics][length] for length in (1, 37, 129)}
    run = Run(numerics, few, steps=2, max_num_seqs=1, max_num_batched_tokens=1)
    assert [plan.qs for plan in run.prefills()] == [(1,)] * sum(few)
    run.check_against_golden()
    run.check_same_bits(one_batch[numerics])


@modes
@pytest.mark.parametrize("way", [{}, {"enable_zos": False}, {"policy": "mixed"}], ids=str)
def test_preempted_and_recomputed(one_batch, files, numerics, way):
    """Five blocks for prompts that need eight: some are thrown out and begin again."""
    few = {length: files[numerics][length] for length in (37, 127, 128, 129, 300)}
    run = Run(numerics, few, steps=8, num_blocks=6, max_model_len=400,
              max_num_batched_tokens=200, **way)  # fmt: skip
    assert run.num_preempted >= 2
    again = {n for plan in run.prefills() for n in plan.full_lens} - set(few)
    assert again, "a recomputed prompt includes the tokens put out before"
    run.check_against_golden()
    run.check_same_bits(one_batch[numerics])


@modes
def test_bounded_replay(golden, numerics):
    name = {Numerics.QUANTISED: "replay/p", Numerics.FLOAT32: "replay/f32_p"}[numerics]
    files = {length: golden(f"{name}{length}") for length in (129, 300, 520)}
    whole = Run(numerics, files, steps=12, replay_keep_tokens=140)
    chunked = Run(numerics, files, steps=12, replay_keep_tokens=140, enable_zos=False,
                  max_num_batched_tokens=61)  # fmt: skip
    mixed = Run(numerics, files, steps=12, replay_keep_tokens=140, policy="mixed",
                max_num_batched_tokens=61)  # fmt: skip
    assert any(plan.num_decoding and plan.prompts for plan in mixed.plans)
    for run in (whole, chunked, mixed):
        run.check_against_golden()
        run.check_same_bits(whole)


# ---- how near rounded logits come to the golden data --------------------------------------------


def test_share_of_rounded_rows_close_to_the_golden_ones(one_batch, sums_like_golden):
    """A row is computed in the same tiles whatever stands beside it, unlike the golden decode rows.

    What that costs is the difference to `test_logits.py`, which multiplies them as they were.
    """
    found, wanted = one_batch[Numerics.QUANTISED].check_against_golden()
    errors = (found - wanted).abs().mean(dim=1).view(len(LENGTHS), -1)
    for length, row_errors in zip(LENGTHS, errors, strict=True):
        off = [f"{i}:{e:.3f}" for i, e in enumerate(row_errors.tolist()) if e > CLOSE_MEAN_ABS]
        report(f"prompt of {length}: {len(off)} of {len(row_errors)} rows differ by more than "
               f"{CLOSE_MEAN_ABS} on average (row:difference): {' '.join(off)}")  # fmt: skip
    share = (errors <= CLOSE_MEAN_ABS).float().mean().item()
    report(f"{share:.1%} of all rows differ by at most {CLOSE_MEAN_ABS}")
    assert share >= (CLOSE_SHARE if sums_like_golden else CLOSE_SHARE_ELSEWHERE)


def test_rounded_streams_are_golden_in_nearly_every_element(rounded, golden, sums_like_golden):
    """All of a prompt's, as far as they are stored, where sums are like the golden data's."""
    stored = golden("layers/quantised")
    rows, ids = stored["rows"].long(), stored["token_ids"]
    after = {"the embedding": "L00.h_in", "layer 0": "L01.engram.h_in", "layer 1": "L02.h_in",
             "layer 2": "L03.h_in", "layer 3": "L04.engram.h_in", "layer 5": "L06.h_in",
             "layer 7": "L08.h_in"}  # fmt: skip
    off = {}

    def watch(part, x):
        if part in after:
            off[part] = (x[rows] != stored[f"p.{after[part]}"]).float().mean().item()

    batch = Batch.build([BatchItem(len(ids), len(ids), 1, [3, 1], 1)], ids)
    rounded.model.forward(batch, rounded.cache(), watch)
    report(
        f"stream elements that differ: { {part: f'{share:.2%}' for part, share in off.items()} }"
    )
    assert off["the embedding"] == 0
    assert off["layer 0"] < 1e-3
    assert max(off.values()) < 1e-2 or not sums_like_golden
