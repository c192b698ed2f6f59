"""The scoring warpgroup of staged attention: scores of key blocks, and their probabilities.

It holds a query's heads in registers, all but the last columns. Read next: `staged_attention.py`.
"""

import tilelang.language as T

from mdi_exec.ops.kernels.attention_block import HEAD_TILE, KEY_BLOCK, LOG2_E, WARPGROUP
from mdi_exec.ops.kernels.attention_softmax import power
from mdi_exec.ops.kernels.staged_block import RING, find_rows
from mdi_exec.ops.sparse_attention import FIRST_MAX

SAMPLES = ()  # no kernel of its own


@T.macro
def score_blocks(key_rows, tx, plan, shared, barriers):
    """Score every key block of every item and leave its probabilities in `shared`."""
    q_left = T.alloc_fragment((HEAD_TILE, plan.half), "bfloat16")
    q_right = T.alloc_fragment((HEAD_TILE, plan.half - plan.parked), "bfloat16")
    scores = T.alloc_fragment((HEAD_TILE, KEY_BLOCK), "float32")
    top = T.alloc_local((2,), "float32")
    fade = T.alloc_local((2,), "float32")
    total = T.alloc_local((2,), "float32")
    found = T.alloc_local((2,), "int32")
    lines = T.alloc_local((2,), "uint32")
    sums = T.alloc_local((2,), "float32")
    chances = T.alloc_local((32,), "bfloat16")
    line = tx // 32 * 16 + tx % 32 // 4  # and the one eight further on
    find_rows(key_rows, plan, 0, 0, tx % 32, 32, found)
    for item in T.serial(plan.items):
        _take_queries(item, plan, q_left, q_right, shared, barriers)
        for i in T.unroll(2):
            top[i] = FIRST_MAX
            total[i] = 0
        for block in T.serial(plan.blocks):
            n = item * plan.blocks + block
            _start_dots(item * (plan.blocks + 1) + block + 1, plan, q_left, q_right, scores, shared,
                        barriers)  # fmt: skip
            # What else there is to do is done while the products are made.
            if block > 0:
                T.call_extern("handle", "mdi::add_sums", sums.data, fade.data, total.data)
            for i in T.unroll(2):
                lines[i] = T.call_extern("uint32", "__ballot_sync", T.uint32(0xFFFFFFFF),
                                         found[i] >= 0)  # fmt: skip
            if block + 1 < plan.blocks:
                find_rows(key_rows, plan, item, block + 1, tx % 32, 32, found)
            elif item + 1 < plan.items:
                find_rows(key_rows, plan, item + 1, 0, tx % 32, 32, found)
            T.wait_wgmma(0)
            T.barrier_arrive(barriers.scored[n % 2])
            _hide_missing(scores, lines)
            T.call_extern("handle", "mdi::soften", scores.data, T.float32(plan.unit_scale * LOG2_E),
                          top.data, fade.data, sums.data, chances.data)  # fmt: skip
            T.barrier_wait(barriers.chances_free[n % 2], (n // 2 + 1) % 2)
            if block == plan.blocks - 1:
                T.call_extern("handle", "mdi::add_sums", sums.data, fade.data, total.data)
            if tx % 4 == 0:
                for i in T.unroll(2):
                    shared.fade[n % 2, line + i * 8] = fade[i]
                    if block == plan.blocks - 1:
                        shared.total[n % 2, line + i * 8] = 1.0 / (
                            total[i] + _sink_share(shared, plan, item, line + i * 8, top[i])
                        )
            T.call_extern("handle", "mdi::store_operand", chances.data,
                          T.access_ptr(shared.chances[n % 2, 0, 0], "w", 8))  # fmt: skip
            T.fence_proxy_async()
            T.barrier_arrive(barriers.chances_ready[n % 2])
    T.barrier_arrive(barriers.scored[plan.items * plan.blocks % 2])


@T.macro
def _take_queries(item, plan, q_left, q_right, shared, barriers):
    """Load an item's queries from the ring."""
    half, kept = plan.half, plan.width - plan.parked
    step, panel = item * (plan.blocks + 1), min(plan.half, 64)
    for side in T.unroll(2):
        T.barrier_wait(barriers.ready[step % RING * 2 + side], step // RING % 2)
    left = T.access_ptr(shared.ring[step % RING, 0, 0], "r", 8)
    right = T.access_ptr(shared.ring[step % RING, 0, half], "r", 8)
    T.call_extern("handle", f"mdi::load_operand<{half // 16}, {panel}>", left, q_left.data)
    T.call_extern("handle", f"mdi::load_operand<{(kept - half) // 16}, {panel}>", right,
                  q_right.data)  # fmt: skip
    if plan.parked:
        T.copy(shared.ring[step % RING, :, kept : plan.width], shared.parked)
        T.fence_proxy_async()
        T.sync_threads(1, WARPGROUP)


@T.macro
def _start_dots(step, plan, q_left, q_right, scores, shared, barriers):
    half, kept, b = plan.half, plan.width - plan.parked, step % RING
    T.barrier_wait(barriers.ready[b * 2], step // RING % 2)
    T.fence_proxy_async()
    T.wgmma_gemm(q_left, shared.ring[b, :, 0:half], scores, transpose_B=True, clear_accum=True)
    T.barrier_wait(barriers.ready[b * 2 + 1], step // RING % 2)
    T.fence_proxy_async()
    T.wgmma_gemm(q_right, shared.ring[b, :, half:kept], scores, transpose_B=True)
    if plan.parked:
        T.wgmma_gemm(shared.parked, shared.ring[b, :, kept : plan.width], scores,
                     transpose_B=True)  # fmt: skip


@T.macro
def _hide_missing(scores, lines):
    """Set scores to minus infinity where no key is; a bit of `lines` says that one is."""
    if T.bitwise_and(lines[0], lines[1]) != T.uint32(0xFFFFFFFF):
        for h, i in T.Parallel(HEAD_TILE, KEY_BLOCK):
            scores[h, i] = T.if_then_else(_has_bit(lines, i), scores[h, i], -T.infinity("float32"))


def _sink_share(shared, plan, item, line, top):
    """What a head's sink adds to the total, relative to its highest score."""
    return power((shared.sink[plan.head(item) + line] - top * plan.unit_scale) * LOG2_E)


def _has_bit(words, i):
    word = T.if_then_else(i < 32, words[0], words[1])
    return T.bitwise_and(T.shift_right(word, T.cast(i % 32, "uint32")), T.uint32(1)) != 0
