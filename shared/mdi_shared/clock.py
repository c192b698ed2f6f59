"""The decode clock: a running sequence gains one token per decode step, so nobody is visited.

All running sequences take part in every decode step, and none is in flight when one joins. So a
sequence stores its length less the steps done when it joined, and its length follows from the
clock. Two heaps say who ends next and who needs the next block: a step costs what it changes, not
what it holds. With drafts sequences grow unevenly; the clock still counts, and the heaps are empty.

Read next: `request.py` (a sequence on the clock), `decode.py` and `commit.py` (who reads it).
"""

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi_shared.request import Sequence

FAR = 1 << 30  # steps


class DecodeClock:
    """Counts decode steps of one rank: those planned and those done, which were processed.

    `rows` is the most a step emits per sequence: one token and its drafts.
    """

    __slots__ = ("_blocks", "_ends", "done", "planned", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.planned = 0
        self.done = 0
        # By time, with the sequence last. One that left stays until its time, and is skipped then.
        self._ends: list[tuple[int, int, Sequence]] = []
        self._blocks: list[tuple[int, int, int, Sequence]] = []

    @property
    def in_flight(self) -> int:
        return self.planned - self.done

    def ends(self, seq: "Sequence") -> None:
        """Note a sequence that joined: how many steps must be done when its length ends it."""
        heappush(self._ends, (seq.finish_at - seq.base, seq.seq_id, seq))

    def steps_to_end(self) -> int:
        """Count the steps not yet done up to the one that ends the first sequence."""
        ends = self._ends
        while ends:
            time, _, seq = ends[0]
            if seq.clock is not None and seq.finish_at - seq.base == time:
                return time - self.done
            heappop(ends)
        return FAR

    def take_ended(self) -> "list[Sequence]":
        """Return the sequences whose length ends them with the steps done by now."""
        ends, out = self._ends, []
        while ends and ends[0][0] <= self.done:
            time, _, seq = heappop(ends)
            if seq.clock is not None and seq.finish_at - seq.base == time and seq not in out:
                out.append(seq)
        return out

    def holds(self, seq: "Sequence", capacity: int) -> None:
        """Note what a sequence's blocks hold: the step that needs one more is known then."""
        # Steps of equal time serve the shortest output first, of equals the younger (R17).
        heappush(self._blocks, (capacity + 1 - seq.base, -seq.order, -seq.seq_id, seq))

    def steps_to_block(self, block_size: int) -> int:
        """Count the steps that can be planned before the next one that needs a block."""
        blocks = self._blocks
        while blocks:
            time, _, _, seq = blocks[0]
            if seq.clock is not None and _is_due(seq, time, block_size):
                return time - self.planned
            heappop(blocks)
        return FAR

    def take_needy(self, planned: int, block_size: int) -> "list[Sequence]":
        """Return who needs a block for the step after `planned` ones, in serving order."""
        blocks = self._blocks
        out: list[Sequence] = []
        while blocks and blocks[0][0] <= planned:
            time, neg_order, _, seq = heappop(blocks)
            # One that was preempted and is back may stand here twice: its old entry has another
            # order, or the same, if a step gave it the token that it missed of a decode step.
            is_again = neg_order != -seq.order or (bool(out) and out[-1] is seq)
            if seq.clock is not None and not is_again and _is_due(seq, time, block_size):
                out.append(seq)
        return out


def _is_due(seq: "Sequence", time: int, block_size: int) -> bool:
    return len(seq.block_table) * block_size + 1 - seq.base == time
