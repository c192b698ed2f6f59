"""What a placement sees of the ranks: numbers of one moment, and what is on its way to each.

Who places a request knows the ranks as of their last poll. In a simulation that is now; the front
of real ranks knows what they said last. What was sent to a rank and is not taken in there yet
counts as waiting in both, so that a burst of requests is not sent to one rank.

Read next: `placement.py` (who looks), `mdi_sim/source.py` and `mdi_exec/engine/workers.py` (who
shows).
"""

from collections import deque
from typing import NamedTuple, Protocol

from mdi_shared.errors import ConfigError
from mdi_shared.scheduler import Scheduler


class RankState(Protocol):
    """A rank between two steps; tokens unless stated otherwise.

    `num_taken` counts the requests it has ever taken in. `queued_tokens` are those to compute of
    its `waiting` sequences, prompts and what preempted ones compute again. `kv_tokens` are held in
    its cache, up to what steps in flight may write; `in_flight_tokens` is their part.
    """

    @property
    def num_taken(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def in_flight_tokens(self) -> int: ...


class SchedulerState:
    """A scheduler's state as it is whenever it is asked: who asks nothing pays nothing."""

    __slots__ = ("_scheduler",)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def num_taken(self) -> int:
        return self._scheduler.num_submitted

    @property
    def num_blocks(self) -> int:
        return self._scheduler.queues.blocks.num_total - 1  # block 0 is nobody's

    @property
    def free_blocks(self) -> int:
        return self._scheduler.queues.blocks.num_free

    @property
    def waiting(self) -> int:
        queues = self._scheduler.queues
        return len(queues.waiting) - queues.num_dead_waiting

    @property
    def queued_tokens(self) -> int:
        waiting = self._scheduler.queues.waiting
        return sum([seq.base - seq.prefilled for seq in waiting if not seq.is_finished])

    @property
    def running(self) -> int:
        queues = self._scheduler.queues
        return len(queues.running) - len(queues.dead)

    @property
    def kv_tokens(self) -> int:
        queues = self._scheduler.queues
        clock, waiting = queues.clock, queues.waiting
        bases = [seq.base for seq in queues.running if seq.clock is not None]
        begun = waiting[0].prefilled if waiting and waiting[0].block_table else 0
        return sum(bases) + len(bases) * clock.done + begun + self.in_flight_tokens

    @property
    def in_flight_tokens(self) -> int:
        clock = self._scheduler.queues.clock
        return self.running * clock.in_flight * clock.rows


class ReportedState(NamedTuple):
    """A rank's state as it was when the rank said so; see `RankState`."""

    num_taken: int
    num_blocks: int
    free_blocks: int
    waiting: int
    queued_tokens: int
    running: int
    kv_tokens: int
    in_flight_tokens: int


def report(scheduler: Scheduler) -> ReportedState:
    """Return the state of a scheduler now, to be told elsewhere."""
    state = SchedulerState(scheduler)
    return ReportedState(*[getattr(state, name) for name in ReportedState._fields])


NOTHING_YET = ReportedState(0, 0, 0, 0, 0, 0, 0, 0)


class RankView:
    """One rank as a placement sees it; see `RankState` for what the numbers say."""

    __slots__ = ("_coming", "_num_sent", "state")

    def __init__(self, state: RankState) -> None:
        self.state = state
        self._num_sent = 0
        self._coming: deque[int] = deque()  # tokens to compute of those sent and not taken in

    def sent(self, tokens: int) -> None:
        """Note that a request with so many tokens to compute was sent to this rank."""
        self._num_sent += 1
        self._coming.append(tokens)

    def _on_the_way(self) -> deque[int]:
        while self._coming and len(self._coming) > self._num_sent - self.state.num_taken:
            self._coming.popleft()
        return self._coming

    @property
    def num_blocks(self) -> int:
        return self.state.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.state.free_blocks

    @property
    def waiting(self) -> int:
        return self.state.waiting + len(self._on_the_way())

    @property
    def queued_tokens(self) -> int:
        return self.state.queued_tokens + sum(self._on_the_way())

    @property
    def running(self) -> int:
        return self.state.running

    @property
    def outstanding(self) -> int:
        """Requests that it has and that have not ended."""
        return self.waiting + self.running

    @property
    def kv_tokens(self) -> int:
        return self.state.kv_tokens

    @property
    def in_flight_tokens(self) -> int:
        return self.state.in_flight_tokens


class UnseenRank(RankView):
    """A rank whose state nobody shows: a placement that said it does not watch asked all the same.

    Every number raises `ConfigError`.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_Unseen())

    def sent(self, tokens: int) -> None:
        pass


class _Unseen:
    def __getattr__(self, name: str) -> int:
        raise ConfigError("placement", name, "the state of a rank was asked for by a placement "
                          "whose `watches` is False")  # fmt: skip
