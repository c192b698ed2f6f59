"""A request as the user asked for it, and the sequence the scheduler makes of it.

The life cycle is a table, `TRANSITIONS`; nothing else may change a state. The core counts tokens
and never keeps them: which ids were generated is the driver's business.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

from mdi_shared.clock import DecodeClock
from mdi_shared.errors import ConfigError, require, require_int
from mdi_shared.prefix.contents import Contents


class State(IntEnum):
    """States of a sequence; everything from STOPPED on is terminal (docs/rules.md, R1)."""

    WAITING = 0
    RUNNING = 1
    STOPPED = 2
    LENGTH_CAPPED = 3
    ABORTED = 4
    IGNORED = 5
    PREEMPTED = 6


# Why a request has no finish reason when the run ended before its arrival.
NOT_ARRIVED = "had not arrived"

REASONS = {
    State.STOPPED: "stop",
    State.LENGTH_CAPPED: "length",
    State.ABORTED: "abort",
    State.IGNORED: "prompt_length_exceeded",
    State.PREEMPTED: "insufficient_system_resource",
}

TRANSITIONS: dict[State, frozenset[State]] = {
    # RUNNING is entered when the last prompt chunk is scheduled, not when it completes.
    State.WAITING: frozenset({State.RUNNING, State.ABORTED, State.IGNORED}),
    # Back to WAITING: preempted, to be recomputed.
    State.RUNNING: frozenset(
        {State.WAITING, State.STOPPED, State.LENGTH_CAPPED, State.ABORTED, State.PREEMPTED}
    ),
    **{state: frozenset() for state in REASONS},
}


MOST_TOKENS, LATEST_NS = 2**31 - 1, 2**62  # as traces hold them


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a scheduling policy may know of a request beyond its lengths; None is "not known".

    `predicted_len` is an estimate of its output, tokens; a larger `priority` is more urgent; its
    first token is due `deadline_ns` after it arrived. Requests of one `client` share a budget,
    those of one `program` are steps of the same work. Raises `ConfigError` for values of another
    type, or beyond what a trace holds.
    """

    predicted_len: int | None = None
    client: str | None = None
    deadline_ns: int | None = None
    priority: int = 0
    program: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("predicted_len", MOST_TOKENS), ("deadline_ns", LATEST_NS)):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, most)
        for name in ("client", "program"):
            holds = isinstance(getattr(self, name), str | None)
            require(holds, name, getattr(self, name), "must be a text, or None")
        require_int("priority", self.priority, -128, 127)


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the scheduler needs to know of a request.

    `cached_len` prompt tokens are already in an external prefix cache: the first chunk starts
    behind them, though blocks are reserved for the whole prompt. `chunk_checkpoints` are
    ascending positions of the prompt at which a chunk must end. `arrived_ns`, on the clock of
    `News.now_ns`, and `hints` are for scheduling policies only. `contents` says what its blocks
    hold, for prefix reuse; without, it shares nothing.
    """

    req_id: str
    prompt_len: int
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cached_len: int = 0
    chunk_checkpoints: tuple[int, ...] = ()
    arrived_ns: int = 0
    hints: Hints = NO_HINTS
    contents: Contents | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        require(self.prompt_len >= 1, "prompt_len", self.prompt_len, "must be at least 1 token")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1 token")
        if not 0 <= self.cached_len < self.prompt_len:
            raise ConfigError("cached_len", self.cached_len,
                              f"must be between 0 and prompt_len - 1 = {self.prompt_len - 1}: "
                              "the last prompt token is always computed")  # fmt: skip
        ends = (0, *self.chunk_checkpoints)
        if any(a >= b for a, b in pairwise(ends)) or ends[-1] > self.prompt_len:
            raise ConfigError("chunk_checkpoints", self.chunk_checkpoints, "must be positive, "
                              f"ascending and at most prompt_len = {self.prompt_len}")  # fmt: skip


class Sequence:
    """A request inside one scheduler. Counters are tokens (docs/rules.md, R2 and R3).

    `base` is its length, what is committed of prompt and outputs, less what `clock` has done: while
    it runs it is on the decode clock and grows by that alone. `prefilled` has complete attention
    state, `order` is its place among the running: minus the output it had when the clock began.
    `num_preempted` says how often it was sent back to be recomputed. For prefix reuse: its first
    `num_entered` blocks can be found by others, it went on behind `resumed` tokens (or has left a
    tail there), and is to leave one at `branch`.
    """

    __slots__ = (
        "base",
        "block_table",
        "branch",
        "checkpoints",
        "clock",
        "finish_at",
        "num_entered",
        "num_preempted",
        "order",
        "prefilled",
        "request",
        "resumed",
        "seq_id",
        "slot",
        "state",
        "stop_ids",
    )

    def __init__(
        self, seq_id: int, request: Request, *, eos_token_id: int, max_model_len: int
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.base = request.prompt_len
        self.clock: DecodeClock | None = None
        self.order = 0
        self.num_preempted = 0
        self.prefilled = request.cached_len
        self.checkpoints = list(request.chunk_checkpoints)
        self.block_table: list[int] = []
        self.slot = 0
        self.num_entered = self.resumed = self.branch = 0
        self.state = State.WAITING
        stops = set(request.stop_token_ids)
        if not request.ignore_eos:
            stops.add(eos_token_id)
        self.stop_ids = frozenset(stops)
        # Length at which it ends whatever it says: max_tokens, or one past the model's cap (R4).
        self.finish_at = min(request.prompt_len + request.max_tokens, max_model_len + 1)

    @property
    def num_tokens(self) -> int:
        """What is committed."""
        return self.base if self.clock is None else self.base + self.clock.done

    @property
    def output_len(self) -> int:
        return self.num_tokens - self.request.prompt_len

    @property
    def cached(self) -> int:
        """Tokens with complete attention state: all but the newest of one that runs."""
        return self.prefilled if self.clock is None else self.num_tokens - 1

    @property
    def inflight_total(self) -> int:
        """Bound of what decode steps planned and not yet processed emit."""
        return 0 if self.clock is None else self.clock.in_flight * self.clock.rows

    @property
    def tokens_needed(self) -> int:
        """Tokens its blocks must hold now: committed, in flight and drafted (R2)."""
        drafted = 0 if self.clock is None else self.clock.rows - 1
        return self.num_tokens + self.inflight_total + drafted

    @property
    def is_finished(self) -> bool:
        return self.state >= State.STOPPED

    @property
    def finish_reason(self) -> str:
        return REASONS[self.state]

    def become(self, state: State) -> None:
        """Move along the life cycle; a move the table lacks is a broken invariant."""
        assert state in TRANSITIONS[self.state], (
            f"request {self.request.req_id!r} cannot go from {self.state.name} to {state.name}"
        )
        self.state = state

    def join(self, clock: DecodeClock) -> None:
        """Get on the clock; its prompt is done and no decode step is in flight."""
        assert clock.in_flight == 0, "who joins takes part in every step that is in flight"
        self.base -= clock.done
        self.order = self.request.prompt_len - self.base
        self.clock = clock

    def leave(self) -> None:
        """Get off the clock, as long as it is."""
        if self.clock is not None:
            self.base += self.clock.done
            self.prefilled = self.base - 1
            self.clock = None

    def extend(self, tokens: tuple[int, ...]) -> int:
        """Commit tokens up to the one that finishes it; return how many (R4)."""
        count = len(tokens)
        if self.num_tokens + count >= self.finish_at or not self.stop_ids.isdisjoint(tokens):
            count = self._finish_within(tokens)
        self.base += count
        return count

    def _finish_within(self, tokens: tuple[int, ...]) -> int:
        """Find the token that ends the sequence, and end it; return how many come that far."""
        for count, token in enumerate(tokens, start=1):
            if token in self.stop_ids:
                self.become(State.STOPPED)
                return count
            if self.num_tokens + count >= self.finish_at:
                self.become(State.LENGTH_CAPPED)
                return count
        raise AssertionError("one of the tokens ends the sequence")
