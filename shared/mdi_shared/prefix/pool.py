"""A block pool whose blocks may be found again by what they hold.

Read next: `mdi_shared/blocks.py` (the pool without), `cache.py` (the user).
"""

from collections.abc import Callable, Iterable

from mdi_shared.blocks import BlockPool


class SharedBlockPool(BlockPool):
    """A `BlockPool` in which a block that nobody holds keeps its content until it is needed.

    Such a block is *idle*: it counts as free, and is given out once no empty one is left, first the
    one idle for longest. A table is freed last block first, and who holds a block holds those
    before it, so of one prefix the last block goes first. `on_evict` is told the key that is gone.
    """

    __slots__ = ("_block_of", "_idle", "_key_of", "num_evicted", "on_evict")

    def __init__(self, num_total: int, on_evict: Callable[[int], None]) -> None:
        super().__init__(num_total)
        self.on_evict = on_evict
        self.num_evicted = 0
        self._idle: dict[int, None] = {}  # blocks, in the order they fell idle
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self, count: int = 1) -> list[int]:
        assert count <= self.num_free, f"{count} ids wanted, {self.num_free} free"
        while len(self._free) < count:
            self._evict(next(iter(self._idle)))
        return super().allocate(count)

    def free(self, ids: Iterable[int]) -> None:
        for i in ids:
            assert self._refs[i] > 0, f"id {i} is freed twice"
            self._refs[i] -= 1
            if self._refs[i]:
                continue
            if i in self._key_of:
                self._idle[i] = None
            else:
                self._free.append(i)

    # ---- content -------------------------------------------------------------------------------

    def find(self, key: int) -> int:
        """Return the block that holds this content; 0 = none does."""
        return self._block_of.get(key, 0)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that have content, idle or not."""
        for block in blocks:
            assert block in self._key_of, f"block {block} holds nothing that is known"
            self._idle.pop(block, None)
            self._refs[block] += 1

    def enter(self, key: int, block: int) -> None:
        """Make a block in use findable, unless somebody holds another one of this content."""
        assert self._refs[block] > 0, f"block {block} is not in use"
        known = self._block_of.get(key)
        if known == block:
            return
        assert block not in self._key_of, f"block {block} holds something else"
        if known is not None:
            if self._refs[known]:
                return
            del self._idle[known], self._key_of[known]
            self._free.append(known)
        self._block_of[key] = block
        self._key_of[block] = key

    def _evict(self, block: int) -> None:
        del self._idle[block]
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._free.append(block)
        self.num_evicted += 1
        self.on_evict(key)

    def check_integrity(self) -> None:
        """Assert that each id is free, idle or in use, and that content has one place."""
        free = set(self._free)
        assert len(free) == len(self._free), "an id is free twice"
        assert not free & self._idle.keys(), "an id is free and idle"
        for i in range(1, self.num_total):
            is_held = i not in free and i not in self._idle
            assert is_held == (self._refs[i] > 0), f"id {i} has {self._refs[i]} holders"
        assert self._idle.keys() <= self._key_of.keys(), "an idle block holds nothing"
        assert not free & self._key_of.keys(), "an empty block can be found"
        assert {block: key for key, block in self._block_of.items()} == self._key_of
