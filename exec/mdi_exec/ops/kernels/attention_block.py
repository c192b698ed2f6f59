"""One block of sparse attention: its sizes, its shared memory, and how its warpgroups meet.

Three warpgroups serve one query. The first scores and sums the left half of the values, the second
sums the right half (both in `attention_softmax.py`), the third gathers keys
(`attention_gather.py`). Two key blocks are in use in turn. Read next: `sparse_attention.py`.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from mdi_exec.ops.sparse_attention import KEY_BLOCK

HEAD_TILE = 64
WARPGROUP = 128
THREADS = 3 * WARPGROUP
LOADERS = 2 * WARPGROUP  # threads that load queries, while the others gather the first keys
LOG2_E = 1.4426950408889634
KEY_SHIFT = 16  # keys are handled 2^-16 times as large as they are
SAMPLES = ()  # no kernel of its own


@dataclass(frozen=True, slots=True)
class Shape:
    """A program's static sizes. Key blocks come in pairs, one for each of the two buffers."""

    heads: int
    width: int
    window_width: int
    top_k: int

    @property
    def half(self) -> int:
        return self.width // 2

    @property
    def chunks(self) -> int:
        """Pieces of 8 values, 16 bytes of bfloat16, in a vector."""
        return self.width // 8

    @property
    def window_pairs(self) -> int:
        return -(-self.window_width // (2 * KEY_BLOCK))

    @property
    def entry_pairs(self) -> int:
        return -(-self.top_k // (2 * KEY_BLOCK))

    @property
    def pairs(self) -> int:
        return self.window_pairs + self.entry_pairs

    @property
    def unit_scale(self) -> float:
        """What a dot product with a shifted key is multiplied by."""
        return self.width**-0.5 * 2.0**KEY_SHIFT

    @property
    def scale(self) -> float:
        """The same for exponents of two."""
        return self.unit_scale * LOG2_E


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory. Vectors lie in two halves; key block b is left_b and right_b.

    q holds the queries and at the end the output. chances are a key block's probabilities, not yet
    normalised; fade is what older sums shrink by, total the final factor of the output.
    """

    q_left: Any
    q_right: Any
    left_0: Any
    right_0: Any
    left_1: Any
    right_1: Any
    is_valid: Any
    chances: Any
    fade: Any
    total: Any


@dataclass(frozen=True, slots=True)
class Barriers:
    """ready and free: key block b is filled, was read by both. chances likewise: scores' results.

    `chances_ready` has only the first warpgroup's arrivals, `chances_free` both readers'.
    """

    q_ready: Any
    ready: Any
    free: Any
    chances_ready: Any
    chances_free: Any


@T.macro
def shared_memory(half):
    q_left = T.alloc_shared((HEAD_TILE, half), "bfloat16")
    q_right = T.alloc_shared((HEAD_TILE, half), "bfloat16")
    left_0 = T.alloc_shared((KEY_BLOCK, half), "bfloat16")
    right_0 = T.alloc_shared((KEY_BLOCK, half), "bfloat16")
    left_1 = T.alloc_shared((KEY_BLOCK, half), "bfloat16")
    right_1 = T.alloc_shared((KEY_BLOCK, half), "bfloat16")
    is_valid = T.alloc_shared((2, KEY_BLOCK), "int32", scope="shared")
    chances = T.alloc_shared((HEAD_TILE, KEY_BLOCK), "bfloat16")
    fade_shared = T.alloc_shared((HEAD_TILE,), "float32", scope="shared")
    total_shared = T.alloc_shared((HEAD_TILE,), "float32", scope="shared")
    return Shared(
        q_left, q_right, left_0, right_0, left_1, right_1, is_valid, chances, fade_shared,
        total_shared,
    )  # fmt: skip


@T.macro
def block_barriers():
    q_ready = T.alloc_barrier(arrive_count=LOADERS)
    ready = T.alloc_barrier(arrive_count=[WARPGROUP, WARPGROUP])
    free = T.alloc_barrier(arrive_count=[2 * WARPGROUP, 2 * WARPGROUP])
    chances_ready = T.alloc_barrier(arrive_count=WARPGROUP)
    chances_free = T.alloc_barrier(arrive_count=2 * WARPGROUP)
    return Barriers(q_ready, ready, free, chances_ready, chances_free)
