"""The multiplying warpgroups of sparse attention: scores and online softmax, sums of values.

The first warpgroup scores a key block, turns scores into probabilities and shares them; then it
sums the left half of the values while the second sums the right half. Each rescales its sum when a
higher score has appeared. Read next: `sparse_attention.py`.
"""

import tilelang.language as T

from mdi_exec.ops.kernels.attention_block import HEAD_TILE, KEY_BLOCK, KEY_SHIFT, LOG2_E
from mdi_exec.ops.sparse_attention import FIRST_MAX

SAMPLES = ()  # no kernel of its own


@T.macro
def score_and_sum_left(sink, head_0, shape, shared, barriers):
    """Score every key block, and sum the left half of its values; leaves the result in q_left."""
    out_left = T.alloc_fragment((HEAD_TILE, shape.half), "float32")
    scores = T.alloc_fragment((HEAD_TILE, KEY_BLOCK), "float32")
    top = T.alloc_fragment((HEAD_TILE,), "float32")
    old_top = T.alloc_fragment((HEAD_TILE,), "float32")
    fade = T.alloc_fragment((HEAD_TILE,), "float32")
    total = T.alloc_fragment((HEAD_TILE,), "float32")
    block_total = T.alloc_fragment((HEAD_TILE,), "float32")
    T.fill(total, 0)
    T.fill(top, FIRST_MAX)
    T.fill(out_left, 0)
    T.barrier_wait(barriers.q_ready, 0)
    for pair in T.serial(shape.pairs):
        for b in T.unroll(2):
            T.barrier_wait(barriers.ready[b], pair % 2)
            _mask(scores, shared.is_valid, b)
            if b == 0:
                _add_dots(shared, shared.left_0, shared.right_0, scores)
            else:
                _add_dots(shared, shared.left_1, shared.right_1, scores)
            _soften(scores, top, old_top, fade, total, block_total, shape.scale)
            T.barrier_wait(barriers.chances_free, (pair * 2 + b + 1) % 2)
            T.copy(fade, shared.fade)
            T.copy(scores, shared.chances)
            T.fence_proxy_async()
            T.barrier_arrive(barriers.chances_ready)
            for h, d in T.Parallel(HEAD_TILE, shape.half):
                out_left[h, d] *= fade[h]
            T.barrier_wait(barriers.chances_ready, b)
            if b == 0:
                T.gemm(shared.chances, shared.left_0, out_left)
            else:
                T.gemm(shared.chances, shared.left_1, out_left)
            T.barrier_arrive(barriers.chances_free)
            T.barrier_arrive(barriers.free[b])
    for h in T.Parallel(HEAD_TILE):
        if head_0 + h < shape.heads:
            total[h] += power((sink[head_0 + h] - top[h] * shape.unit_scale) * LOG2_E)
        total[h] = 2.0**KEY_SHIFT / total[h]
        shared.total[h] = total[h]
    # Not before the last block is consumed: a phase must not overtake a waiting thread.
    T.barrier_wait(barriers.chances_free, 1)
    T.barrier_arrive(barriers.chances_ready)
    for h, d in T.Parallel(HEAD_TILE, shape.half):
        out_left[h, d] *= total[h]
    T.barrier_wait(barriers.chances_ready, 0)
    T.copy(out_left, shared.q_left)


@T.macro
def sum_right(shape, shared, barriers):
    """Sum the right half of every key block's values; leaves the result in q_right."""
    out_right = T.alloc_fragment((HEAD_TILE, shape.half), "float32")
    T.fill(out_right, 0)
    for pair in T.serial(shape.pairs):
        for b in T.unroll(2):
            T.barrier_wait(barriers.chances_ready, b)
            T.barrier_wait(barriers.ready[b], pair % 2)
            for h, d in T.Parallel(HEAD_TILE, shape.half):
                out_right[h, d] *= shared.fade[h]
            if b == 0:
                T.gemm(shared.chances, shared.right_0, out_right)
            else:
                T.gemm(shared.chances, shared.right_1, out_right)
            T.barrier_arrive(barriers.chances_free)
            T.barrier_arrive(barriers.free[b])
    T.barrier_wait(barriers.chances_ready, 0)
    for h, d in T.Parallel(HEAD_TILE, shape.half):
        out_right[h, d] *= shared.total[h]
    T.copy(out_right, shared.q_right)


def power(x):
    """Two to the power of x, in one instruction."""
    return T.call_extern("float32", "mdi::power", x)


@T.macro
def _mask(scores, is_valid, b):
    """Start a block's scores: 0, or minus infinity where no key is."""
    for h, i in T.Parallel(HEAD_TILE, KEY_BLOCK):
        scores[h, i] = T.if_then_else(is_valid[b, i] != 0, 0, -T.infinity("float32"))


@T.macro
def _add_dots(shared, left, right, scores):
    T.gemm(shared.q_left, left, scores, transpose_B=True)
    T.gemm(shared.q_right, right, scores, transpose_B=True)


@T.macro
def _soften(scores, top, old_top, fade, total, block_total, scale):
    """Turn scores into probabilities relative to the highest so far; update maximum and total."""
    T.copy(top, old_top)
    T.reduce_max(scores, top, dim=1, clear=False)
    for h in T.Parallel(HEAD_TILE):
        top[h] = T.max(top[h], old_top[h])
        fade[h] = power((old_top[h] - top[h]) * scale)
    for h, i in T.Parallel(HEAD_TILE, KEY_BLOCK):
        scores[h, i] = power(scores[h, i] * scale - top[h] * scale)
    T.reduce_sum(scores, block_total, dim=1)
    for h in T.Parallel(HEAD_TILE):
        total[h] = total[h] * fade[h] + block_total[h]
