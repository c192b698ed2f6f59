"""What a step sampled, read on the host from the numbers that the device packed.

Read next: `step_program.py` (who packs them), `runner.py` (who waits for them).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from mdi_exec.engine.request_state import Logprobs, RequestState
from mdi_exec.engine.sampling import Draw
from mdi_exec.engine.step_inputs import StepInputs
from mdi_shared.plan import StepPlan

NOT_MEASURED = float("nan")


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step sampled, on the host: a row per sequence that yields a token, in plan order.

    `start_ns` and `end_ns` bound the device's work on the clock of `time.monotonic_ns`;
    `sample_ns` of it went into sampling. `graph_size` is the size of the captured graph that ran,
    0 = none. `moe_imbalance` is the busiest expert's rows over the mean, averaged over layers.

    Where drafts were verified there is a row per token instead, and `counts` says how many tokens
    each sequence has: its accepted drafts and one.
    """

    token_ids: list[int]
    logprobs: list[Logprobs]
    start_ns: int
    end_ns: int
    sample_ns: int = 0
    graph_size: int = 0
    moe_imbalance: float = NOT_MEASURED
    counts: list[int] | None = None

    @property
    def firsts(self) -> Sequence[int]:
        """Where each sequence's rows begin."""
        if self.counts is None:
            return range(len(self.token_ids))
        return list(accumulate(self.counts, initial=0))

    def by_sequence(self) -> list[tuple[int, ...]]:
        """Return each sequence's tokens."""
        ids = self.token_ids
        if self.counts is None:
            return [(token,) for token in ids]
        return [tuple(ids[first:end]) for first, end in pairwise(self.firsts)]


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepTokens:
        """Wait for the step's tokens; raises `NumericsError` when logits are not finite."""


@dataclass(slots=True)
class InFlight:
    """A launched step; `tokens` and `awaited_ns` are filled in when it has ended."""

    plan: StepPlan
    requests: list[RequestState]
    pending: Pending
    tokens: StepTokens | None = None
    awaited_ns: int = 0


def floats_of(bits: Tensor) -> Tensor:
    """Return float32 numbers that were packed as int64."""
    return bits.to(torch.int32).view(torch.float32)


def only_accepted(step: StepTokens, inputs: StepInputs, accepted: Tensor) -> StepTokens:
    """Leave out the rows behind each sequence's first rejected draft; accepted int64 [n].

    Of a placeholder nothing is left.
    """
    counts = [1 + count for count in accepted[: len(inputs.requests)].tolist()]
    firsts = inputs.host.arrays["cu_q"].tolist()
    rows = [row for first, count in zip(firsts, counts, strict=False)
            for row in range(first, first + count)]  # fmt: skip
    return replace(
        step, token_ids=[step.token_ids[row] for row in rows],
        logprobs=[step.logprobs[row] for row in rows], counts=counts,
    )  # fmt: skip


def logprobs_of(
    tokens: list[int], logprobs: list[float], tops: tuple[Tensor, Tensor], draws: Sequence[Draw]
) -> list[Logprobs]:
    """Per row: the drawn token's log-probability and those of as many alternatives as it wants."""
    chosen = zip(tokens, logprobs, strict=True)
    if not len(tops[0]):
        return [{token: logprob} for token, logprob in chosen]
    out: list[Logprobs] = []
    top_rows = zip(tops[0].tolist(), tops[1].tolist(), strict=True)
    for draw, (token, logprob), (ids, values) in zip(draws, chosen, top_rows, strict=False):
        wanted = draw.params.top_logprobs
        out.append({**dict(zip(ids[:wanted], values[:wanted], strict=True)), token: logprob})
    return out
