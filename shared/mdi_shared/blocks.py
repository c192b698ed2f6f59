"""A pool of numbered things handed out first-in-first-out: KV blocks, or per-sequence state slots.

Id 0 is never handed out; it means "none" and is where placeholder rows point. Ids carry reference
counts so that a block can be shared (`pin`). See docs/rules.md, R23.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum


class Fit(Enum):
    """Answer to "may I have this many?"."""

    OK = "ok"
    LATER = "later"  # not now, but once others have finished
    NEVER = "never"  # not even from an empty pool


class BlockPool:
    """`num_total` ids of which `num_total - 1` can be used.

    Order is part of the contract: ids leave from the head of the free list and return to its
    tail, so a recorded run and its replay hand out the same ids.
    """

    __slots__ = ("_free", "_refs", "num_total")

    def __init__(self, num_total: int) -> None:
        assert num_total >= 2, f"a pool needs id 0 and one more, got {num_total}"
        self.num_total = num_total
        self._free: deque[int] = deque(range(1, num_total))
        self._refs = [0] * num_total

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share in use, counting id 0 as used: an idle pool reads 1 / num_total (R7)."""
        return self.usage_at(self.num_free)

    def usage_at(self, num_free: int) -> float:
        """Return `usage` as it would be with so many ids free."""
        return (self.num_total - num_free) / self.num_total

    def fits(self, count: int) -> Fit:
        """Say whether `count` ids can be had; changes nothing. `fits(0)` is always OK."""
        if count >= self.num_total:
            return Fit.NEVER
        return Fit.OK if self.num_free >= count else Fit.LATER

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` ids from the head; the caller has asked `fits` before."""
        assert count <= len(self._free), f"{count} ids wanted, {len(self._free)} free"
        ids = [self._free.popleft() for _ in range(count)]
        for i in ids:
            assert self._refs[i] == 0, f"id {i} was free with {self._refs[i]} references"
            self._refs[i] = 1
        return ids

    def pin(self, block_id: int) -> None:
        """Add a reference to an id in use."""
        assert self._refs[block_id] > 0, f"id {block_id} is not in use and cannot be shared"
        self._refs[block_id] += 1

    def free(self, ids: Iterable[int]) -> None:
        """Drop one reference each; an id without references returns to the tail, in this order."""
        for i in ids:
            assert self._refs[i] > 0, f"id {i} is freed twice"
            self._refs[i] -= 1
            if self._refs[i] == 0:
                self._free.append(i)

    def references(self, block_id: int) -> int:
        return self._refs[block_id]
