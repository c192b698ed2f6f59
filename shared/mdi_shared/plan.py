"""What crosses the seam between the core and a driver: immutable, JSON-able data, nothing else.

A driver gets a `StepPlan`, runs it, and answers with a `StepResult`. Ids and lengths are ints,
times are `*_ns` ints, reasons are strings. No tensors, no callbacks, no borrowed buffers. What
there is per sequence stands in columns, one tuple each: that is what becomes device tensors and
table columns, and a step costs no object per sequence. `StepPlan.items` shows the rows.

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
    """One sequence's share of a step, as a row: see the columns of `StepPlan`."""

    seq_id: int
    q: int
    k: int
    slot: int
    num_blocks: int
    new_blocks: tuple[int, ...]
    is_last_chunk: bool  # the step samples a token for this sequence; True for decode rows


class Ending(NamedTuple):
    """A request's end: why, and how many output tokens it has."""

    seq_id: int
    reason: str
    output_len: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step of one rank.

    Columns, one entry per sequence: `qs` query rows end at context length `ks`, of which k - q
    tokens were cached before; with drafts in flight k is an upper bound that the device corrects.
    `slots` are state slots, `full_lens` (prefill only) the whole prompt a chunk belongs to, which
    after a preemption includes what was put out before. The driver keeps its own copy of each
    block table: cut it to `num_blocks - len(new_blocks)` entries, then append `new_blocks`.
    `is_partial` says that the last sequence's prompt goes on after this step; all others yield a
    token.

    `finished` lists sequences whose memory returns once this step's predecessor is processed;
    `ignored` those that left the queue; `preempted` victims (their memory is already free).
    `decode_step`, `vote` and `want` are the inputs of the prefill-or-decode decision, before it.
    Pool counters are after planning.
    """

    step: int
    kind: str
    seq_ids: tuple[int, ...] = ()
    qs: tuple[int, ...] = ()
    ks: tuple[int, ...] = ()
    full_lens: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    num_blocks: tuple[int, ...] = ()
    new_blocks: tuple[tuple[int, ...], ...] = ()
    is_partial: bool = False
    finished: tuple[int, ...] = ()
    ignored: tuple[Ending, ...] = ()
    preempted: tuple[int, ...] = ()
    decode_step: int = 0
    vote: str = "none"  # none | all | any
    want: bool = False
    free_blocks: int = 0
    free_slots: int = 0
    num_batched_tokens: int = 0  # prefill: padded for context parallelism; decode: sum of q
    target_ns: int = 0  # step time the chunk policy aimed at; 0 = none

    @property
    def items(self) -> tuple[StepItem, ...]:
        """The columns as rows."""
        last = len(self.seq_ids) - 1
        return tuple(
            StepItem(
                seq_id, self.qs[i], self.ks[i], self.slots[i], self.num_blocks[i],
                self.new_blocks[i], is_last_chunk=not (self.is_partial and i == last),
            )
            for i, seq_id in enumerate(self.seq_ids)
        )  # fmt: skip

    @property
    def is_prefill(self) -> bool:
        return self.kind in (PREFILL, IDLE_PREFILL)

    @property
    def prompt_tokens(self) -> int:
        """Rows of a prefill step, 0 for any other."""
        return sum(self.qs) if self.kind == PREFILL else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, ints and strings; `from_json` inverts it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPlan":
        fields = {name: _tuples(value) for name, value in data.items()}
        fields["ignored"] = tuple(Ending(*ending) for ending in fields["ignored"])
        return cls(**fields)


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever JSON gives
    """JSON knows lists only; plans hold tuples only."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device produced: one tuple of token ids per plan item, in plan order.

    A decode row yields its accepted drafts followed by the sampled token; a prompt's last chunk
    yields one token; an earlier chunk yields an empty tuple.
    """

    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What processing a step made visible. Queue lengths are after processing.

    `tokens` has one entry per sequence of the step, its new tokens in order; empty for a chunk that
    was not the last, and for a dropped row. `dropped` holds the indices of rows thrown away
    because the sequence had finished or was preempted while the step was in flight; `ended` the
    requests whose last token this was.
    """

    step: int
    is_prefill: bool
    seq_ids: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    dropped: tuple[int, ...]
    ended: tuple[Ending, ...]
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
