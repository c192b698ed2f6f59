"""What crosses the seam between the core and a driver: immutable, JSON-able data, nothing else.

A driver gets a `StepPlan`, runs it, and answers with a `StepResult`. Ids and lengths are ints,
times are `*_ns` ints, reasons are strings. No tensors, no callbacks, no borrowed buffers. Who takes
part is a `Batch`, which all decode steps share until somebody joins or leaves; what there is per
sequence stands in columns, one tuple each, made when asked for: a step costs no object per
sequence. `StepPlan.items` shows the rows.

Read next: `request.py` (life cycle), `scheduler.py` (who makes plans), `loop.py` (who runs them).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

PREFILL = "prefill"
DECODE = "decode"
IDLE_PREFILL = "idle_prefill"  # nothing of this rank's own; it runs a placeholder row for its group
IDLE_DECODE = "idle_decode"
MIXED = "mixed"  # a decode step that carries prompts, on this rank or another of its group
IDLE_MIXED = "idle_mixed"

STEP_KINDS = (PREFILL, DECODE, IDLE_PREFILL, IDLE_DECODE, MIXED, IDLE_MIXED)


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


class Member(NamedTuple):
    """A sequence of a batch. Members of a decode batch stand in the order of these tuples (R17)."""

    neg_base: int  # minus its length where the decode clock stood at 0; of a prefill step: minus k
    tie: int  # of equal lengths: its prompt, for the longer output comes first; or its place
    seq_id: int
    slot: int  # of its state


@dataclass(frozen=True)
class Batch:
    """The sequences of a step, in order; its columns have one entry per member."""

    members: tuple[Member, ...] = ()

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def seq_ids(self) -> tuple[int, ...]:
        return tuple([seq_id for _, _, seq_id, _ in self.members])

    @cached_property
    def slots(self) -> tuple[int, ...]:
        return tuple([member.slot for member in self.members])

    @cached_property
    def base_sum(self) -> int:
        """Sum of the members' lengths where the decode clock stood at 0."""
        return -sum([neg_base for neg_base, _, _, _ in self.members])


class TailCopy(NamedTuple):
    """A copy between a slot's state at `cut` tokens and a tail (`prefix/tails.py`)."""

    tail: int
    slot: int
    cut: int  # a multiple of the block size
    to_slot: bool


class Hit(NamedTuple):
    """What an admitted sequence found of its prefix: `tokens` used, and `known` by their blocks."""

    seq_id: int
    tokens: int
    known: int  # at least `tokens`: beyond them no tail was at hand


NOBODY = Batch()
PromptRow = tuple[int, int, int]  # q, k, full prompt length


class StepPlan(NamedTuple):
    """One engine step of one rank.

    Columns, one entry per sequence: `qs` query rows end at context length `ks`, of which k - q
    tokens were cached before; with drafts in flight k is an upper bound that the device corrects.
    `slots` are state slots, `full_lens` the whole prompt a chunk belongs to, which after a
    preemption includes what was put out before; where a sequence decodes it is k. The driver keeps
    its own copy of each block table: cut it to `num_blocks - len(new_blocks)` entries, then append
    `new_blocks`. `is_partial` says that the last sequence's prompt goes on after this step; all
    others yield a token.

    The first `num_decoding` members decode: `rows_each` rows each, and k is the member's base and
    `shift`. Against the step before in which any did, `joined` are members it did not have and
    `left` sequences it had. The others have their `prompts`. A decode step has none of these, a
    prefill step has these alone, a mixed step may have both. `taken` are the blocks that sequences
    got, by id.

    `finished` lists sequences whose memory returns once this step's predecessor is processed;
    `ignored` those that left the queue; `preempted` victims (their memory is already free).
    `decode_step`, `vote` and `want` are the inputs of the prefill-or-decode decision, before it.
    Pool counters are after planning.

    With prefix reuse, `copies` are made before the step runs, in order, and behind the step before;
    `hits` are those of sequences admitted now, whose shared blocks are among `taken`.
    """

    step: int
    kind: str
    is_prefill: bool  # prefill or mixed, idle or not: laid out by rows, awaited in its own turn
    batch: Batch = NOBODY
    shift: int = 0
    rows_each: int = 1
    prompts: tuple[PromptRow, ...] = ()
    block_size: int = 1
    taken: tuple[tuple[int, tuple[int, ...]], ...] = ()
    is_partial: bool = False
    joined: tuple[Member, ...] = ()
    left: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    ignored: tuple[Ending, ...] = ()
    preempted: tuple[int, ...] = ()
    decode_step: int = 0
    vote: str = "none"  # none | all | any
    want: bool = False
    free_blocks: int = 0
    free_slots: int = 0
    num_batched_tokens: int = 0  # prefill: padded for context parallelism; others: sum of q
    target_ns: int = 0  # step time the chunk policy aimed at; 0 = none
    copies: tuple[TailCopy, ...] = ()
    hits: tuple[Hit, ...] = ()

    @property
    def seq_ids(self) -> tuple[int, ...]:
        return self.batch.seq_ids

    @property
    def slots(self) -> tuple[int, ...]:
        return self.batch.slots

    @property
    def decodes(self) -> bool:
        """Whether the sequences that run take part, if there are any: the decode clock goes on."""
        return not self.is_prefill or self.kind in (MIXED, IDLE_MIXED)

    @property
    def num_decoding(self) -> int:
        return len(self.batch.members) - len(self.prompts)

    @property
    def rows(self) -> tuple[PromptRow, ...]:
        """All columns of lengths at once: to the model, who decodes is a chunk that ends at k."""
        each, shift = self.rows_each, self.shift
        decoding = self.batch.members[: self.num_decoding]
        return (*[(each, shift - m[0], shift - m[0]) for m in decoding], *self.prompts)

    @property
    def qs(self) -> tuple[int, ...]:
        return (self.rows_each,) * self.num_decoding + tuple([q for q, _, _ in self.prompts])

    @property
    def ks(self) -> tuple[int, ...]:
        shift, members = self.shift, self.batch.members
        if self.prompts:
            members = members[: self.num_decoding]
        decoding = tuple([shift - neg_base for neg_base, _, _, _ in members])
        return decoding + tuple([k for _, k, _ in self.prompts]) if self.prompts else decoding

    @property
    def full_lens(self) -> tuple[int, ...]:
        return tuple([full_len for _, _, full_len in self.rows]) if self.prompts else self.ks

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each table after this plan: a prompt's are reserved whole (R2)."""
        size = self.block_size
        return tuple([-(-length // size) for length in self.full_lens])

    @property
    def new_blocks(self) -> tuple[tuple[int, ...], ...]:
        if not self.taken:
            return ((),) * len(self.batch)
        taken = dict(self.taken)
        return tuple([taken.get(seq_id, ()) for seq_id in self.seq_ids])

    @property
    def items(self) -> tuple[StepItem, ...]:
        """The columns as rows."""
        last = len(self.batch) - 1
        is_last = [not (self.is_partial and i == last) for i in range(last + 1)]
        columns = (self.seq_ids, self.qs, self.ks, self.slots, self.num_blocks, self.new_blocks)
        return tuple(map(StepItem._make, zip(*columns, is_last, strict=True)))

    @property
    def prompt_tokens(self) -> int:
        """Rows of a prefill or mixed step, 0 for any other."""
        return self.num_decoding + sum([q for q, _, _ in self.prompts]) if self.is_prefill else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, ints and strings; `from_json` inverts it."""
        return {**self._asdict(), "batch": self.batch.members}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPlan":
        fields = {name: _tuples(value) for name, value in data.items()}
        fields["batch"] = Batch(tuple(Member(*member) for member in fields["batch"]))
        fields["joined"] = tuple(Member(*member) for member in fields["joined"])
        fields["ignored"] = tuple(Ending(*ending) for ending in fields["ignored"])
        fields["copies"] = tuple(TailCopy(*copy) for copy in fields.get("copies", ()))
        fields["hits"] = tuple(Hit(*hit) for hit in fields.get("hits", ()))
        return cls(**fields)


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever JSON gives
    """JSON knows lists only; plans hold tuples only."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device produced: one tuple of token ids per plan item, in plan order.

    A decode row yields its accepted drafts followed by the sampled token; a prompt's last chunk
    yields one token; an earlier chunk yields an empty tuple. Who simulates a decode step without
    drafts may leave `tokens` out: each row yields one token, and none of them ends anybody.
    """

    tokens: tuple[tuple[int, ...], ...] | None = None


class StepOutcome(NamedTuple):
    """What processing a step made visible. Queue lengths are after processing.

    `tokens` has one entry per sequence of the step, its new tokens in order; empty for a chunk that
    was not the last, and for a dropped row. It has no entries where the result had no tokens.
    `dropped` holds the indices of rows thrown away because the sequence had finished or was
    preempted while the step was in flight; `ended` the requests whose last token this was.
    """

    step: int
    is_prefill: bool
    batch: Batch
    tokens: tuple[tuple[int, ...], ...]
    dropped: tuple[int, ...]
    ended: tuple[Ending, ...]
    n_waiting: int
    n_running: int

    @property
    def seq_ids(self) -> tuple[int, ...]:
        return self.batch.seq_ids


class Advance(NamedTuple):
    """What so many `repetitions` of a decode step changed (see `Scheduler.advance`).

    `processed` older steps were processed meanwhile; the first of them had rows of the sequences
    `dropped`, which had left.
    `free_blocks` lists what was left of the pool after planning repetition 1, and whenever that
    changed: (repetition, blocks). In the first `num_wanting` repetitions this rank wanted a prefill
    where there was a vote.
    """

    repetitions: int
    processed: int
    dropped: tuple[int, ...]
    free_blocks: tuple[tuple[int, int], ...]
    free_slots: int
    n_waiting: int
    n_running: int
    num_wanting: int
