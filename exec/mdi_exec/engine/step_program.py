"""What the device does in one step: fetch tokens still in flight, run the model, sample.

Nothing here waits for the device or reads from it. The runner calls it step by step, `graphs.py`
records it once and replays it. Read next: `runner.py`, `model/transformer.py`, `sampler.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.engine.drafting import Drafting
from mdi_exec.engine.step_inputs import GIVEN
from mdi_exec.model.batch import Batch, HostBatch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.transformer import Transformer
from mdi_exec.ops.sampler import Sampled, Sampler, SamplingNeeds, SamplingRows

RESULT_COLUMNS = 3  # per row: token id, bits of its logprob, whether its logits are finite


class Forwarded(NamedTuple):
    """A step behind the model: logits float32 [m, vocab_size], and what they were made of.

    `imbalance` float32 [1]: rows of the busiest expert over the mean, averaged over layers; NaN
    when nobody measures it.
    """

    batch: Batch
    logits: Tensor
    imbalance: Tensor


class Results(NamedTuple):
    """What goes to the host. packed int64 [3 m + 1]: token ids, logprobs, flags, imbalance.

    Floats are packed as the bits of a float32. `sampled` holds the alternatives, if wanted. Where
    drafts were verified there follows how many of each of n sequences were accepted.
    """

    packed: Tensor
    sampled: Sampled


class StepProgram:
    """Model, cache and sampler of one device.

    `last_tokens` int64 holds the newest step's samples, at most `max_rows`; the next step's rows
    may take their tokens from there. With `measures_experts` steps also report expert imbalance.
    `drafting` guesses tokens and has the next step verify them; without it there are no drafts.
    """

    def __init__(
        self, model: Transformer, cache: DeviceCache, sampler: Sampler, *, max_rows: int,
        measures_experts: bool = False, drafting: Drafting | None = None,
    ) -> None:  # fmt: skip
        self.drafting = drafting
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=model.device)
        self.measures_experts = measures_experts

    @torch.inference_mode()
    def forward(
        self, host: HostBatch, tensors: Mapping[str, Tensor], *, max_k: int | None = None
    ) -> Forwarded:
        """Run the model on a step whose arrays (`StepInputs.arrays`) stand on the device."""
        batch, drafting = Batch.place(host, tensors, max_k=max_k), self.drafting
        if drafting is not None and "previous" in tensors:
            batch = drafting.moved(batch, tensors, self.last_tokens)
        else:
            sources = tensors["sources"]
            in_flight = self.last_tokens[sources.clamp(min=0)].to(torch.int32)
            ids = torch.where(sources == GIVEN, batch.token_ids, in_flight)
            batch = replace(batch, token_ids=ids)
        counts: list[Tensor] | None = [] if self.measures_experts else None
        head = None if drafting is None else drafting.head
        logits = self.model.forward(batch, self.cache, expert_counts=counts, draft=head)
        return Forwarded(batch, logits, self._imbalance(counts))

    @torch.inference_mode()
    def sample(
        self, forwarded: Forwarded, tensors: Mapping[str, Tensor], needs: SamplingNeeds
    ) -> Results:
        """Draw a token per row of logits and keep the tokens for the next step."""
        columns = {n[5:]: column for n, column in tensors.items() if n.startswith("draw.")}
        logits, rows, drafting = forwarded.logits, SamplingRows.place(columns, needs), self.drafting
        verifies = drafting is not None and "previous" in tensors
        if drafting is not None and verifies:
            rows = drafting.draws(forwarded.batch, tensors, rows)
        drawn = self.sampler(logits, rows)
        is_finite = torch.isfinite(logits).all(dim=1)
        packed = [drawn.token_ids, _bits(drawn.logprobs), is_finite.to(torch.int64),
                  _bits(forwarded.imbalance)]  # fmt: skip
        newest = drawn.token_ids
        if drafting is not None and verifies:
            verified = drafting.verify(forwarded.batch, drawn.token_ids)
            drafting.propose(forwarded.batch, verified, rows)
            packed.append(verified.accepted)
            newest = verified.last
        elif drafting is not None:
            drafting.forget(forwarded.batch.slots)
        self.last_tokens[: len(newest)] = newest
        return Results(torch.cat(packed), drawn)

    def _imbalance(self, counts: list[Tensor] | None) -> Tensor:
        if not counts:
            return torch.full((1,), float("nan"), device=self.model.device)
        rows = torch.stack(counts).to(torch.float32)
        # A rank of a group may hold no expert that a layer's rows want: that layer says nothing.
        return (rows.amax(dim=1) / rows.mean(dim=1)).nanmean().view(1)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64)
