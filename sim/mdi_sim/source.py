"""Where one rank's requests come from: recorded arrivals, and turns that follow earlier turns.

Open loop: a request arrives at its recorded time. Closed loop: a turn of a session arrives a
think time after the turn before it ended, whenever that was. No clock of its own: the driver says
what time it is.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mdi_sim.stretch import NEVER


@dataclass(slots=True)
class Arrivals:
    """The rows of a request trace that one rank serves, in trace order.

    `times_ns` are the arrivals of `recorded` rows. A row of `awaited` arrives a think time after
    the turn before it ended, which `follows` maps to it, on whatever rank that turn was.
    `elsewhere` names the rank of a next turn that another rank serves.
    """

    recorded: list[tuple[int, int]] = field(default_factory=list)  # (arrival in ns, trace row)
    awaited: list[int] = field(default_factory=list)
    follows: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> (next, think ns)
    elsewhere: dict[int, int] = field(default_factory=dict)  # row of the next turn -> its rank


class Source:
    """Hands out trace rows as they fall due. Equal times come in trace order.

    `peers` are the sources of all ranks, in order; needed where a turn follows one on another rank.
    """

    __slots__ = ("_arrivals", "_due", "_heap", "_peers", "arrived_ns")

    def __init__(self, arrivals: Arrivals, peers: "Sequence[Source]" = ()) -> None:
        self._arrivals = arrivals
        self._heap = list(arrivals.recorded)
        heapq.heapify(self._heap)
        self._peers = peers
        self._due: deque[int] = deque()
        self.arrived_ns: dict[int, int] = {}  # when closed-loop turns arrived, by trace row

    def count_due(self, now_ns: int) -> int:
        """Count rows due and not yet taken; an arrival at this very instant is due."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            self._due.append(heapq.heappop(heap)[1])
        return len(self._due)

    def take(self, now_ns: int) -> tuple[int, ...]:
        """Hand out the rows that are due."""
        self.count_due(now_ns)
        rows = tuple(self._due)
        self._due.clear()
        return rows

    def next_ns(self) -> int:
        """When the next row falls due that is not due yet; NEVER when nothing is known to come."""
        return self._heap[0][0] if self._heap else NEVER

    def not_arrived(self, now_ns: int) -> list[int]:
        """Return the rows that arrive later than now, turns whose predecessor goes on included."""
        later = [row for time, row in self._heap if time > now_ns]
        return later + [row for row in self._arrivals.awaited if row not in self.arrived_ns]

    def ended(self, row: int, now_ns: int) -> None:
        """Note that a request ended: its session's next turn, if any, has a time now."""
        if row in self._arrivals.follows:
            next_row, think_ns = self._arrivals.follows[row]
            rank = self._arrivals.elsewhere.get(next_row)
            home = self if rank is None else self._peers[rank]
            home.arrives(next_row, now_ns + think_ns)

    def arrives(self, row: int, time_ns: int) -> None:
        """Note when a closed-loop turn of this rank arrives."""
        self.arrived_ns[row] = time_ns
        heapq.heappush(self._heap, (time_ns, row))


def make_sources(arrivals: Sequence[Arrivals]) -> list[Source]:
    """Return the sources of a group of ranks, which know each other."""
    sources: list[Source] = []
    sources += [Source(of_rank, sources) for of_rank in arrivals]
    return sources


class Front(Source):
    """Takes in all ranks' rows and gives each to a rank when it arrives, by what `place` says.

    For placements that watch the ranks: `place` is asked with (row, arrival in ns) at the first
    look of any rank at or after the arrival, when all ranks have processed the step before. So
    which rank looks first makes no difference. `ranks` are what the drivers take their rows from.
    """

    __slots__ = ("_place", "ranks")

    def __init__(
        self, arrivals: Arrivals, num_ranks: int, place: Callable[[int, int], int]
    ) -> None:  # fmt: skip
        super().__init__(arrivals)
        self._place = place
        self.ranks = [PlacedSource(self) for _ in range(num_ranks)]

    def hand_out(self, now_ns: int) -> None:
        """Place what has arrived by now, in order of arrival."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            time_ns, row = heapq.heappop(heap)
            self.ranks[self._place(row, time_ns)].arrives(row, time_ns)


class PlacedSource(Source):
    """The rows that a `Front` has given to one rank."""

    __slots__ = ("_front",)

    def __init__(self, front: Front) -> None:
        super().__init__(Arrivals())
        self._front = front

    def count_due(self, now_ns: int) -> int:
        self._front.hand_out(now_ns)
        return super().count_due(now_ns)

    def next_ns(self) -> int:
        """When this rank may get the next row: any rank's arrival may be placed here."""
        return min(super().next_ns(), self._front.next_ns())

    def ended(self, row: int, now_ns: int) -> None:
        self._front.ended(row, now_ns)
