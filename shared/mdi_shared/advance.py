"""Books many decode steps at once: blocks taken, sequences ended by length, memory returned.

The same as planning and processing them one by one, in the same order, but only turns in which
something happens are visited. Turn 0 is that of the step that was planned last; each later turn
plans a repetition of it and processes the oldest step in flight.

Read next: `repeat.py` (how many are certain), `scheduler.py` (which asks for it).
"""

from collections.abc import Callable, Sequence

from mdi_shared import request
from mdi_shared.plan import Departure
from mdi_shared.queues import Queues
from mdi_shared.repeat import Change
from mdi_shared.request import State


class Turns:
    """The turns of a stretch of `count` repetitions, as they are booked.

    `free` lists blocks and slots left after planning, `wants` whether a prefill is wanted at the
    ballot, each from the repetition on that it begins with. Who is in `to_release` ended too late
    to be released.
    """

    def __init__(
        self, queues: Queues, keep: int, count: int, want_prefill: Callable[[], bool]
    ) -> None:
        self._queues = queues
        self._keep = keep
        self._count = count
        self._want_prefill = want_prefill
        self._planned = queues.clock.planned - 1  # before turn 0
        self.free: list[tuple[int, int, int]] = []
        self.wants: list[tuple[int, bool]] = []
        self.departures: list[Departure] = []
        self.to_release: list[request.Sequence] = []
        self._note(1, 1)

    def book(self, changes: Sequence[Change]) -> None:
        """Book all turns, in which the batch changes like that."""
        queues = self._queues
        for change in changes:
            self._plan_up_to(change.turn - 1)
            queues.clock.done = self._planned + change.turn - self._keep
            for seq in change.gone:
                seq.become(State.LENGTH_CAPPED)
            ended = tuple([queues.end_running(seq) for seq in change.gone])
            finished = queues.take_dead_running()
            self.departures.append(
                Departure(change.turn, len(change.members),
                          tuple([seq.seq_id for seq in finished]), ended)
            )  # fmt: skip
            self._plan_up_to(change.turn)
            if change.turn == self._count:
                self.to_release = finished
                continue
            for seq in finished:
                queues.release(seq)
            self._note(change.turn + 1, change.turn + 1)
        self._plan_up_to(self._count)

    def _plan_up_to(self, turn: int) -> None:
        """Give out the blocks that plans up to this turn take, in the order of single steps."""
        queues, clock, size = self._queues, self._queues.clock, self._queues.config.block_size
        last = self._planned + turn
        while (due := clock.next_need(size)) <= last:
            queues.add_block_each(clock.take_needy(due, size), due + size)
            turn = due - self._planned
            self._note(turn, turn + 1)

    def _note(self, turn: int, ballot: int) -> None:
        """Note the pools when this turn has been planned, and the wish at that turn's ballot."""
        queues = self._queues
        self.free.append((turn, queues.blocks.num_free, queues.slots.num_free))
        if ballot <= self._count:
            self.wants.append((ballot, bool(queues.waiting) and self._want_prefill()))
