"""One block of staged attention: its sizes, its work, its shared memory, how warpgroups meet.

Read next: `staged_attention.py`.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from mdi_exec.ops.kernels.attention_block import HEAD_TILE, KEY_BLOCK, WARPGROUP

RING = 3  # blocks of 64 keys, or of one query's heads, in shared memory
SAMPLES = ()  # no kernel of its own


@dataclass(frozen=True, slots=True)
class Plan:
    """A program's static sizes, and a block's work: `items` tiles of heads, `stride` apart.

    The ring sees an item's queries first and then its key blocks: `steps`, all in all.
    """

    heads: int
    width: int
    num_keys: int
    first: Any
    stride: Any
    items: Any

    @property
    def half(self):
        return self.width // 2

    @property
    def parked(self):
        """Columns of the queries for which there are no registers: they stay in shared memory."""
        return self.width // 4 if self.width > 256 else 0

    @property
    def tiles(self):
        return -(-self.heads // HEAD_TILE)

    @property
    def blocks(self):
        return -(-self.num_keys // KEY_BLOCK)

    @property
    def steps(self):
        return self.items * (self.blocks + 1)

    @property
    def unit_scale(self):
        return self.width**-0.5

    def row(self, item):
        return (self.first + item * self.stride) // self.tiles

    def head(self, item):
        """The first head of an item."""
        return (self.first + item * self.stride) % self.tiles * HEAD_TILE


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory. Of two slots in turn: chances, a key block's probabilities, not normalised;
    fade, what older sums shrink by; total, an item's final factors."""

    ring: Any
    parked: Any
    chances: Any
    fade: Any
    total: Any
    sink: Any


@dataclass(frozen=True, slots=True)
class Barriers:
    """ready: half a block of the ring is filled. scored: a key block was. chances likewise: a slot
    is filled, was read by both."""

    ready: Any
    scored: Any
    chances_ready: Any
    chances_free: Any


@T.macro
def shared_memory(plan):
    ring = T.alloc_shared((RING, KEY_BLOCK, plan.width), "bfloat16")
    parked = T.alloc_shared((HEAD_TILE, max(plan.parked, 64)), "bfloat16")
    chances = T.alloc_shared((2, HEAD_TILE, KEY_BLOCK), "bfloat16")
    fade = T.alloc_shared((2, HEAD_TILE), "float32", scope="shared")
    total = T.alloc_shared((2, HEAD_TILE), "float32", scope="shared")
    sink = T.alloc_shared((plan.tiles * HEAD_TILE,), "float32", scope="shared")
    return Shared(ring, parked, chances, fade, total, sink)


@T.macro
def block_barriers():
    ready = T.alloc_barrier(arrive_count=[WARPGROUP] * (2 * RING))
    scored = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
    chances_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
    chances_free = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * 2)
    return Barriers(ready, scored, chances_ready, chances_free)


@T.macro
def find_rows(key_rows, plan, item, block, line, step, found):
    """Load the rows of lines of a key block, `step` lines apart; -1 = none."""
    for i in T.unroll(found.shape[0]):
        found[i] = -1
        if block * KEY_BLOCK + line + i * step < plan.num_keys:
            found[i] = key_rows[plan.row(item), block * KEY_BLOCK + line + i * step]
