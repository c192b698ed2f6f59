"""How long steps take: what a driver may ask of a cost model, the host's share, graph sizes.

Times are int nanoseconds and equal inputs give equal times. Nothing here measures or fits.

Read next: `roofline.py` (from peak rates), `linear.py` (from measured steps), `chunking.py`
(a user).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, repeat
from typing import Any, Protocol

from mdi_shared.cost.work import DecodeWork, StepWork
from mdi_shared.errors import require_int

MOST_NS = 10**12  # a step, or a part of one per row, token, pair; a quarter of an hour


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """CPU time around a step, ns (docs/rules.md, R26): planning, launch, processing.

    Prompts cost by the token: taking in those that arrive (`ingress_ns_per_token`), laying out and
    processing those of a prefill step. `prefill_launch_ns` is the time until the device can begin a
    prefill step, None: as long as a decode step's launch; from then on the host needs
    `prefill_queue_ns` to queue the step's work, and the device cannot end before. `idle_ns` is all
    of it for a step without rows on a rank that has no group to keep company: nothing is laid out,
    launched or read then. The defaults are assumptions of a plausible size, not measurements;
    `launch_ns_per_seq`, `prefill_queue_ns` and times per token are 0 until measured. Raises
    `ConfigError` for a time that is not an int from 0 to MOST_NS.
    """

    schedule_ns: int = 150_000
    schedule_ns_per_seq: int = 2_000
    ingress_ns_per_token: int = 0
    launch_ns: int = 200_000
    launch_ns_per_seq: int = 0
    prefill_launch_ns: int | None = None
    prefill_launch_ns_per_token: int = 0
    prefill_queue_ns: int = 0
    process_ns: int = 50_000
    process_ns_per_seq: int = 1_000
    process_ns_per_prompt_token: int = 0
    idle_ns: int = 100_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "prefill_launch_ns" and value is None:
                continue
            require_int(name, value, 0, MOST_NS)

    def of_step(
        self, n_seqs: int, prompt_tokens: int = 0, *, is_alone: bool
    ) -> tuple[int, int, int]:
        """Return schedule, launch and process of a step.

        `prompt_tokens` are those of a prefill step, 0 otherwise; `is_alone` means a group of one.
        """
        if n_seqs == 0 and is_alone:
            return self.idle_ns, 0, 0
        launch, process = self.launch(n_seqs, prompt_tokens), self.process(n_seqs, prompt_tokens)
        return self.schedule(n_seqs), launch, process

    def schedule(self, n_seqs: int) -> int:
        """Return the time to plan a step, ns."""
        return self.schedule_ns + self.schedule_ns_per_seq * n_seqs

    def ingress(self, prompt_tokens: int) -> int:
        """Return the time to take in requests with so many prompt tokens, ns."""
        return self.ingress_ns_per_token * prompt_tokens

    def launch(self, n_seqs: int, prompt_tokens: int = 0) -> int:
        """Return the time to prepare a step and hand it to the device, ns."""
        if not prompt_tokens:
            return self.launch_ns + self.launch_ns_per_seq * n_seqs
        base = self.launch_ns if self.prefill_launch_ns is None else self.prefill_launch_ns
        return base + self.prefill_launch_ns_per_token * prompt_tokens

    def queue(self, prompt_tokens: int) -> int:
        """Return how long work is still queued after the device could begin, ns.

        A prefill step is thousands of launches: one of few tokens ends when the last is made.
        """
        return self.prefill_queue_ns if prompt_tokens else 0

    def process(self, n_seqs: int, prompt_tokens: int = 0) -> int:
        """Return the time to process a step's results, ns."""
        per_token = self.process_ns_per_prompt_token * prompt_tokens
        return self.process_ns + self.process_ns_per_seq * n_seqs + per_token


NO_HOST_COST = HostCost(
    schedule_ns=0, schedule_ns_per_seq=0, launch_ns=0, process_ns=0, process_ns_per_seq=0,
    idle_ns=0,
)  # fmt: skip


class StepCost(Protocol):
    """A step-time model of one rank."""

    @property
    def host(self) -> HostCost: ...

    def device_ns(self, work: StepWork) -> int:
        """Return the device time of a step: at least 1, not decreasing in any field of `work`."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what the model is, JSON-able, for the metadata of a run; `kind` names it."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """Every step of a kind takes the same time; for tests and queueing formulas."""

    prefill_ns: int
    decode_ns: int
    host: HostCost = NO_HOST_COST

    def __post_init__(self) -> None:
        for name in ("prefill_ns", "decode_ns"):
            require_int(name, getattr(self, name), 1, MOST_NS)

    def device_ns(self, work: StepWork) -> int:
        return self.prefill_ns if work.is_prefill else self.decode_ns

    def decode_times(self, work: DecodeWork) -> Iterator[int]:
        return repeat(self.decode_ns)

    def describe(self) -> dict[str, Any]:
        return {"kind": "constant", **asdict(self)}


def decode_times(cost: StepCost, work: DecodeWork) -> Iterator[int]:
    """Yield `cost.device_ns` of a decode batch's steps, one after another, as they are asked for.

    A model that knows a shorter way has a method `decode_times(work)`, with equal times.
    """
    own = getattr(cost, "decode_times", None)
    return own(work) if own is not None else (cost.device_ns(work.at(j)) for j in count())
