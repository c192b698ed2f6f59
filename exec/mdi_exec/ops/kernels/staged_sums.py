"""The summing warpgroups of staged attention: values times probabilities, and copies of keys.

One has the left half of all columns, the other the right half. Each fills its half of the ring's
blocks as they fall free. Read next: `staged_attention.py`.
"""

import tilelang.language as T

from mdi_exec.ops.kernels.attention_block import HEAD_TILE, KEY_BLOCK, WARPGROUP
from mdi_exec.ops.kernels.staged_block import RING, find_rows

COPIERS = 8  # threads that copy a line
LINES = KEY_BLOCK * COPIERS // WARPGROUP  # lines of a block that a thread helps to copy
STEP = KEY_BLOCK // LINES  # between these lines
SAMPLES = ()  # no kernel of its own


@T.macro
def sum_values(q, keys, key_rows, out, tx, side, plan, shared, barriers):
    """Sum one half of the values of every item, fill that half of the ring, write the output."""
    half = plan.half
    sums = T.alloc_fragment((HEAD_TILE, half), "float32")
    factor = T.alloc_local((2,), "float32")
    found = T.alloc_local((LINES,), "int32")
    line = tx // 32 * 16 + tx % 32 // 4  # and the one eight further on
    T.fill(sums, 0)
    for step in T.unroll(RING):
        _copy_step(q, keys, key_rows, step, side, tx, plan, found, shared, barriers)
    for item in T.serial(plan.items):
        for block in T.serial(plan.blocks):
            n = item * plan.blocks + block
            step = item * (plan.blocks + 1) + block + 1
            T.barrier_wait(barriers.chances_ready[n % 2], n // 2 % 2)
            for i in T.unroll(2):
                factor[i] = shared.fade[n % 2, line + i * 8]
            if T.And(
                block > 0,
                T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF),
                              T.Or(factor[0] != 1.0, factor[1] != 1.0)) != 0,
            ):  # fmt: skip
                for h, d in T.Parallel(HEAD_TILE, half):
                    sums[h, d] *= shared.fade[n % 2, h]
            if side == 1:
                _copy_step(q, keys, key_rows, step + 2, side, tx, plan, found, shared, barriers)
                T.barrier_wait(barriers.scored[(n + 1) % 2], (n + 1) // 2 % 2)
            T.wgmma_gemm(
                shared.chances[n % 2, :, :],
                shared.ring[step % RING, :, side * half : (side + 1) * half], sums,
                clear_accum=block == 0,
            )  # fmt: skip
            if side == 0:
                _copy_step(q, keys, key_rows, step + 2, side, tx, plan, found, shared, barriers)
            T.wait_wgmma(0)
            if block == plan.blocks - 1:
                for i in T.unroll(2):
                    factor[i] = shared.total[n % 2, line + i * 8]
            T.barrier_arrive(barriers.chances_free[n % 2])
        # This item's last block is free too, and the next one's queries must not wait for it.
        _copy_step(q, keys, key_rows, (item + 1) * (plan.blocks + 1) + 2, side, tx, plan, found,
                   shared, barriers)  # fmt: skip
        T.call_extern(
            "handle", f"mdi::store_rows<{half // 8}>", sums.data, factor.data,
            T.address_of(out[plan.row(item), T.min(plan.head(item) + line, plan.heads - 1),
                             side * half]),
            plan.width, plan.heads - plan.head(item) - line,
        )  # fmt: skip


@T.macro
def _copy_step(q, keys, key_rows, step, side, tx, plan, found, shared, barriers):
    """Start to fill one half of the ring's block for a step; find the rows of the next step."""
    item, place = step // (plan.blocks + 1), step % (plan.blocks + 1)
    if step < plan.steps:
        if place == 0:
            _copy_queries(q, item, step % RING, side, tx, plan, shared)
        else:
            _copy_keys(keys, step % RING, side, tx, plan, found, shared)
        T.cp_async_barrier_noinc(barriers.ready[step % RING * 2 + side])
        if place < plan.blocks:
            find_rows(key_rows, plan, item, place, tx // COPIERS, STEP, found)


@T.macro
def _copy_queries(q, item, b, side, tx, plan, shared):
    """Heads that are not there become zero."""
    for i in T.unroll(LINES):
        line = tx // COPIERS + i * STEP
        head = plan.head(item) + line
        _copy_line(q[plan.row(item), T.min(head, plan.heads - 1), side * plan.half],
                   head < plan.heads, b, line, side, plan, shared)  # fmt: skip


@T.macro
def _copy_keys(keys, b, side, tx, plan, found, shared):
    """Lines without a key become zero."""
    for i in T.unroll(LINES):
        _copy_line(keys[T.max(found[i], 0), side * plan.half], found[i] >= 0, b,
                   tx // COPIERS + i * STEP, side, plan, shared)  # fmt: skip


def _copy_line(source, is_there, b, line, side, plan, shared):
    panel = min(plan.half, 64)
    return T.call_extern(
        "handle", f"mdi::copy_line<{plan.half // panel}, {panel}>", T.access_ptr(source, "r", 8),
        T.access_ptr(shared.ring[b, 0, side * plan.half], "w", 8), line, is_there,
    )  # fmt: skip
