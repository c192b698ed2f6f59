"""The pool of tails: copies of the state that a sequence has beside its blocks, at one cut.

Blocks hold compressed entries; to go on at a cut, a sequence also needs the window of every layer
there, which its slot overwrites as it runs. So a prefix can be used at its tails only, and they run
out long before blocks do: one of the released model takes as much memory as 24 blocks.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mdi_shared.config import EVICTIONS

LRU, _ = EVICTIONS


class _Kept(NamedTuple):
    tail: int
    saved: int  # tokens that a hit here need not compute, against the next shorter one
    rank: tuple[int, int]


class TailPool:
    """`num_total` tails, of which number 0 is none, by the key of the last block before the cut.

    When all are taken, one gives way: the one unused for longest (`lru`), or the least of what a
    hit saves plus what the last one to give way had (`flops`, GreedyDual: all take equal memory,
    so FLOPs saved per byte are tokens saved, and unused ones age). Sources: Marconi (MLSys 2025)
    for FLOPs per byte; Young, "The k-server dual and loose competitiveness for paging" (1994).
    """

    __slots__ = ("_age", "_by_rank", "_eviction", "_free", "_kept", "_tick", "num_evicted",
                 "num_total")  # fmt: skip

    def __init__(self, num_total: int, eviction: str) -> None:
        assert eviction in EVICTIONS, eviction
        self.num_total = num_total
        self.num_evicted = 0
        self._eviction = eviction
        self._free = deque(range(1, num_total))
        self._kept: dict[int, _Kept] = {}
        self._by_rank: list[tuple[tuple[int, int], int]] = []  # with entries out of date
        self._tick = self._age = 0

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    def use(self, key: int) -> int:
        """Return the tail at a key, which counts as used now."""
        kept = self._kept[key]
        self._keep(key, kept.tail, kept.saved)
        return kept.tail

    def take(self, key: int, saved: int) -> int:
        """Return a tail for the state at `key`, which has none; 0 when there is none at all."""
        assert key not in self._kept, "this state is kept already"
        if not self._free:
            self._evict()
        if not self._free:
            return 0
        tail = self._free.popleft()
        self._keep(key, tail, saved)
        return tail

    def drop(self, key: int) -> None:
        """Give up the tail at a key, if there is one: its blocks are gone."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._free.append(kept.tail)

    def _keep(self, key: int, tail: int, saved: int) -> None:
        self._tick += 1
        value = 0 if self._eviction == LRU else self._age + saved
        kept = self._kept[key] = _Kept(tail, saved, (value, self._tick))
        heappush(self._by_rank, (kept.rank, key))
        if len(self._by_rank) > 64 + 4 * len(self._kept):
            self._by_rank = [(each.rank, key) for key, each in self._kept.items()]
            heapify(self._by_rank)

    def _evict(self) -> None:
        while self._by_rank:
            rank, key = heappop(self._by_rank)
            kept = self._kept.get(key)
            if kept is not None and kept.rank == rank:
                self._age = rank[0]
                self.num_evicted += 1
                self.drop(key)
                return

    def kept_keys(self) -> list[int]:
        return list(self._kept)

    def check_integrity(self) -> None:
        tails = [*self._free, *(kept.tail for kept in self._kept.values())]
        assert sorted(tails) == list(range(1, self.num_total)), "a tail is lost, or there twice"
