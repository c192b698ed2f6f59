"""The decode clock: a running sequence gains one token per decode step, so nobody is visited.

All running sequences take part in every decode step, and none is in flight when one joins. So a
sequence stores its length less the steps done when it joined, and its length follows from the
clock. A sorted list says who ends next, and sequences that need their next block in the same step
stand together: a step costs what it changes, not what it holds. With drafts sequences grow
unevenly; the clock still counts, and both are empty.

Read next: `request.py` (a sequence on the clock), `decode.py` and `commit.py` (who reads it).
"""

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi_shared.request import Sequence

FAR = 1 << 30  # steps


class DecodeClock:
    """Counts decode steps of one rank: those planned and those done, which were processed.

    `rows` is the most a step emits per sequence: one token and its drafts.
    """

    __slots__ = ("_due", "_ends", "_times", "done", "planned", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.planned = 0
        self.done = 0
        # By time, with the sequence last. One that left stays until its time, and is skipped then.
        self._ends: list[tuple[int, int, Sequence]] = []
        self._due: dict[int, list[tuple[int, int, Sequence]]] = {}  # who needs a block, by time
        self._times: list[int] = []  # of `_due`, a heap

    @property
    def in_flight(self) -> int:
        return self.planned - self.done

    def ends(self, seq: "Sequence") -> None:
        """Note a sequence that joined: how many steps must be done when its length ends it."""
        insort(self._ends, (seq.finish_at - seq.base, seq.seq_id, seq))

    def coming_ends(self) -> "Iterator[tuple[int, list[Sequence]]]":
        """Yield how many steps must be done when lengths end sequences, and which."""
        time = -1
        seqs: list[Sequence] = []
        for end, _, seq in self._ends:
            if not _is_current(seq, end):
                continue
            if end != time and seqs:
                yield time, seqs
                seqs = []
            time = end
            if seq not in seqs:
                seqs.append(seq)
        if seqs:
            yield time, seqs

    def last_end(self) -> int:
        """Return how many steps must be done when the last sequence ends by length."""
        ends = self._ends
        while ends:
            time, _, seq = ends[-1]
            if _is_current(seq, time):
                return time
            ends.pop()
        return FAR

    def take_ended(self) -> "list[Sequence]":
        """Return the sequences whose length ends them with the steps done by now."""
        ends, out, count = self._ends, [], 0
        for time, _, seq in ends:
            if time > self.done:
                break
            count += 1
            if _is_current(seq, time) and seq not in out:
                out.append(seq)
        del ends[:count]
        return out

    def holds(self, seq: "Sequence", capacity: int) -> None:
        """Note what a sequence's blocks hold: the step that needs one more is known then."""
        # Steps of equal time serve the shortest output first, of equals the younger (R17).
        self._add_due(capacity + 1 - seq.base, [(-seq.order, -seq.seq_id, seq)])

    def hold_more(self, seqs: "list[Sequence]", time: int) -> None:
        """Note that sequences, as `take_needy` gave them, need their next block at `time`."""
        self._add_due(time, [(-seq.order, -seq.seq_id, seq) for seq in seqs])

    def _add_due(self, time: int, entries: "list[tuple[int, int, Sequence]]") -> None:
        known = self._due.get(time)
        if known is None:
            self._due[time] = entries
            heappush(self._times, time)
        else:
            known += entries
            known.sort()

    def next_need(self, block_size: int) -> int:
        """Return how many steps are planned before the next one that needs a block."""
        times = self._times
        while times:
            time = times[0]
            entries = self._due[time]
            while entries:
                if _is_due(entries[-1][2], time, block_size):
                    return time
                entries.pop()
            del self._due[heappop(times)]
        return FAR

    def take_needy(self, planned: int, block_size: int) -> "list[Sequence]":
        """Return who needs a block for the step after `planned` ones, in serving order."""
        times = self._times
        if not times or times[0] > planned:
            return []
        assert times[0] == planned, "who needs a block gets it in time"
        # One that was preempted and is back may stand here twice: its old entry has another order,
        # or the same, if a step gave it the token that it missed of a decode step.
        due = [seq for neg_order, _, seq in self._due.pop(heappop(times))
               if neg_order == -seq.order and _is_due(seq, planned, block_size)]  # fmt: skip
        return list(dict.fromkeys(due))


def _is_current(seq: "Sequence", end: int) -> bool:
    """Say whether an entry still stands: its sequence runs, and has not left and come back."""
    return seq.clock is not None and seq.finish_at - seq.base == end


def _is_due(seq: "Sequence", time: int, block_size: int) -> bool:
    return seq.clock is not None and len(seq.block_table) * block_size + 1 - seq.base == time
