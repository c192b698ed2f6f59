"""Drafts on the device: what was guessed for each sequence, how far it held, and the next guess.

The accept rule is a coupling, not a rejection. A draft is drawn with the random numbers that the
model itself will draw the same position with, and it stands exactly if it is the token that the
model then draws. So every token shown is the model's own: whatever is drafted, and however many
drafts are verified, tokens and log-probabilities are those of plain decoding, bit for bit. No draft
distribution is kept and nothing is drawn anew (arXiv 2408.07978; docs/design.md).

A step's rows are a sequence's newest token and then its drafts. Which positions they have depends
on how many drafts of the step before were accepted, which the host does not know yet: it lays the
step out as if all had been, and the device moves it back. Read next: `draft_inputs.py` (the host's
half), `step_program.py` (who calls this), `model/dspark.py` (the guessing).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.engine.draft_inputs import DRAFTED
from mdi_exec.engine.step_inputs import GIVEN
from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.dspark import Blocks, DraftHead, Drafts
from mdi_exec.ops.sampler import NO_GOLDEN, Sampler, SamplingRows


class Verified(NamedTuple):
    """Int64 [n]: how many drafts of each sequence were accepted, and the token behind them."""

    accepted: Tensor
    last: Tensor


class Drafting:
    """Drafts of one engine, `size` for each sequence.

    `ids` int64 [slots, size] are the drafts that the next step of the sequence in a slot verifies;
    after a prompt they are placeholders, of the last vocabulary id. `accepted` int64 has the newest
    step's counts, by its sequences.
    """

    def __init__(self, head: DraftHead, cache: DeviceCache, sampler: Sampler, size: int) -> None:
        on, num_slots = head.model.device, cache.num_slots
        self.head, self.cache, self.sampler, self.size = head, cache, sampler, size
        self.placeholder = head.model.config.vocab_size - 1
        self.ids = torch.full((num_slots, size), self.placeholder, device=on)
        self.accepted = torch.zeros(num_slots, dtype=torch.int64, device=on)

    def moved(self, batch: Batch, tensors: Mapping[str, Tensor], newest: Tensor) -> Batch:
        """Put a decode step's rows where they belong, and their tokens into them.

        `newest` int64 are the last step's newest tokens, by its sequences.
        """
        back, sources = self._back(tensors), tensors["sources"]
        seq = batch.seq_of_row
        place = torch.arange(batch.num_rows, device=batch.device) - batch.cu_q[seq]
        drafts = self.ids[batch.slots[seq], (place - 1).clamp(min=0)]
        ids = torch.where(sources == GIVEN, batch.token_ids, newest[sources.clamp(min=0)])
        ids = torch.where(sources == DRAFTED, drafts, ids).to(torch.int32)
        return replace(
            batch, token_ids=ids, positions=batch.positions - back[seq],
            starts=batch.starts - back, k_len=batch.k_len - back,
        )  # fmt: skip

    def _back(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return how many rows back each sequence has to go, int64 [n]."""
        previous = tensors["previous"]
        rejected = self.size - self.accepted[previous.clamp(min=0)]
        return torch.where(previous == GIVEN, 0, rejected)

    def draws(
        self, batch: Batch, tensors: Mapping[str, Tensor], rows: SamplingRows
    ) -> SamplingRows:
        """Return what a moved step's rows are asked for: the positions that they have now."""
        golden = rows.golden_ids
        if "golden" in tensors:
            column = self.size - self._back(tensors)[batch.seq_of_row]
            golden = tensors["golden"].gather(1, column.unsqueeze(1)).squeeze(1)
        return replace(rows, positions=batch.positions + 1, golden_ids=golden)

    def verify(self, batch: Batch, tokens: Tensor) -> Verified:
        """Accept each sequence's drafts up to the first that differs from the token drawn there.

        tokens int64 [T] are the step's samples, one for each row.
        """
        rows = batch.cu_q[:-1].unsqueeze(1) + torch.arange(self.size + 1, device=batch.device)
        is_row = rows < batch.cu_q[1:].unsqueeze(1)
        drawn = tokens[rows.clamp(max=len(tokens) - 1)]
        holds = (self.ids[batch.slots] == drawn[:, :-1]) & is_row[:, 1:]
        accepted = holds.to(torch.int64).cumprod(dim=1).sum(dim=1)
        self.accepted[: len(accepted)] = accepted
        return Verified(accepted, drawn.gather(1, accepted.unsqueeze(1)).squeeze(1))

    def propose(self, batch: Batch, verified: Verified, rows: SamplingRows) -> Drafts:
        """Draft what comes after each sequence's newest token and keep it for its next step.

        `rows` are those that the step's tokens were drawn by.
        """
        blocks = Blocks(verified.last, batch.starts + verified.accepted, batch.slots)
        firsts = rows.part(batch.cu_q[:-1])
        nothing = torch.full_like(firsts.golden_ids, NO_GOLDEN)
        asked = replace(firsts, num_top=0, golden_ids=nothing)

        def pick(i: int, logits: Tensor) -> Tensor:
            # The token at base + 1 is known; the i-th draft is the one behind it and i others.
            return self.sampler(logits, replace(asked, positions=blocks.base + 2 + i)).token_ids

        drafts = self.head.propose(blocks, self.size, self.cache, pick)
        self.ids[batch.slots] = drafts.ids
        return drafts

    def forget(self, slots: Tensor) -> None:
        """Put placeholders where a prompt is computed: nothing is drafted before it is decoded."""
        self.ids[slots] = self.placeholder
