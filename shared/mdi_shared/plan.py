"""What crosses the seam between the core and a driver: immutable, JSON-able data, nothing else.

A driver gets a `StepPlan`, runs it, and answers with a `StepResult`. Ids and lengths are ints,
times are `*_ns` ints, reasons are strings. No tensors, no callbacks, no borrowed buffers.
`StepItem` and `Emission` are named tuples rather than frozen dataclasses because a step makes one
per sequence: a named tuple is equally immutable and four times cheaper to build.

Read next: `request.py` (life cycle), `scheduler.py` (who makes plans), `loop.py` (who runs them).
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

PREFILL = "prefill"
DECODE = "decode"
IDLE_PREFILL = "idle_prefill"  # nothing of this rank's own; it runs a placeholder row for its group
IDLE_DECODE = "idle_decode"

STEP_KINDS = (PREFILL, DECODE, IDLE_PREFILL, IDLE_DECODE)


class StepItem(NamedTuple):
    """One sequence's share of a step.

    `q` query rows end at context length `k`, of which `k - q` tokens were cached before. With
    drafts in flight `k` is an upper bound; the device corrects it. The driver keeps its own copy
    of each block table: cut it to `num_blocks - len(new_blocks)`, then append `new_blocks`.
    """

    seq_id: int
    q: int
    k: int
    slot: int
    num_blocks: int
    new_blocks: tuple[int, ...]
    is_last_chunk: bool  # True for decode rows: the step samples a token for this sequence


class Rejection(NamedTuple):
    """A sequence that left without (further) output, with what it had put out before."""

    seq_id: int
    reason: str
    output_len: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step of one rank.

    `finished` lists sequences whose memory returns once this step's predecessor is processed;
    `preempted` lists victims (their memory is already free). `decode_step`, `vote` and `want` are
    the inputs of the prefill-or-decode decision, before it. Pool counters are after planning.
    """

    step: int
    kind: str
    items: tuple[StepItem, ...]
    finished: tuple[int, ...] = ()
    ignored: tuple[Rejection, ...] = ()
    preempted: tuple[int, ...] = ()
    decode_step: int = 0
    vote: str = "none"  # none | all | any
    want: bool = False
    free_blocks: int = 0
    free_slots: int = 0
    num_batched_tokens: int = 0  # prefill: padded for context parallelism; decode: sum of q
    target_ns: int = 0  # step time the chunk policy aimed at; 0 = none

    @property
    def is_prefill(self) -> bool:
        return self.kind in (PREFILL, IDLE_PREFILL)

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, ints and strings; `from_json` inverts it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPlan":
        fields = dict(data)
        fields["items"] = tuple(
            StepItem(*[tuple(v) if isinstance(v, list) else v for v in item])
            for item in data["items"]
        )
        fields["ignored"] = tuple(Rejection(*r) for r in data["ignored"])
        fields["finished"] = tuple(data["finished"])
        fields["preempted"] = tuple(data["preempted"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device produced: one tuple of token ids per plan item, in plan order.

    A decode row yields its accepted drafts followed by the sampled token; a prompt's last chunk
    yields one token; an earlier chunk yields an empty tuple.
    """

    tokens: tuple[tuple[int, ...], ...]


class Emission(NamedTuple):
    """New tokens of one request, in order; `finish_reason` is set exactly once, on the last.

    `output_len` counts all its output tokens so far, these included.
    """

    seq_id: int
    tokens: tuple[int, ...]
    output_len: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What processing a step changed. Counters are after processing.

    `dropped` holds the indices of plan items whose rows were thrown away because the sequence had
    finished or was preempted while the step was in flight.
    """

    step: int
    emissions: tuple[Emission, ...]
    dropped: tuple[int, ...]
    n_waiting: int
    n_running: int


@dataclass(frozen=True, slots=True)
class Advance:
    """What `count` repetitions of a decode step changed (see `Scheduler.advance`).

    The pool counters have one entry per repetition, each after its planning. `dropped` belongs
    to the step that was in flight before the first of the repeated ones; it is empty when there
    was none.
    """

    count: int
    dropped: tuple[int, ...]
    free_blocks: tuple[int, ...]
    free_slots: int
    n_waiting: int
    n_running: int
