"""Sparse attention: every query gathers its own keys from two pools, which stay quantised.

One block of three warpgroups serves one query with all its heads. The third gathers and decodes the
next 64 keys while the first scores the present ones and runs the online softmax; first and second
each multiply the probabilities with one half of the value dimensions. Keys are values too, so a
decoded block is used twice. Read next: `attention_source.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.attention_source import KEY_SOURCE
from mdi_exec.ops.kernels.jit import Sample, by_hand, compiled
from mdi_exec.ops.row_pool import RowPool

KEY_BLOCK = 64
HEAD_TILE = 64
LINES = KEY_BLOCK // 16  # lines of a key block that a gathering thread helps to fill
THREADS = 384
LOADERS = 256  # threads that load queries, while the others gather the first keys
FIRST_MAX = -1e30
LOG2_E = 1.4426950408889634
KEY_SHIFT = 16  # keys are handled 2^-16 times as large as they are


@by_hand("bounds", "barriers")
def sparse_attention_program(heads, width, window_width, top_k):
    """out [rows, heads, width]; see `sparse_attention` for the inputs."""
    half = width // 2
    window_pairs = -(-window_width // (2 * KEY_BLOCK))
    pairs = window_pairs + -(-top_k // (2 * KEY_BLOCK))
    unit_scale = width**-0.5 * 2.0**KEY_SHIFT
    scale = unit_scale * LOG2_E
    chunks = width // 8  # of 8 values: 16 bytes of bfloat16
    units = -(-HEAD_TILE * chunks // LOADERS)  # of them for each thread that moves queries
    entry_steps = -(-width // 256)
    rows, pool_rows, new_rows = T.dynamic("rows"), T.dynamic("pool_rows"), T.dynamic("new_rows")

    @T.macro
    def store(keys, first, count, line, column, left, right):
        """Put `count` chunks of decoded keys into a key block's line, from `column` on."""
        for part in T.unroll(count):
            if column + part * 8 < half:
                for v in T.vectorized(8):
                    left[line, column + part * 8 + v] = keys[first + part * 8 + v]
            else:
                for v in T.vectorized(8):
                    right[line, column + part * 8 - half + v] = keys[first + part * 8 + v]

    @T.macro
    def find_rows(row_numbers, t, block, limit, line, found):
        """Load the pool rows of this thread's four lines in a key block; -1 = none."""
        for i in T.unroll(LINES):
            found[i] = -1
            if block * KEY_BLOCK + line + i * 16 < limit:
                found[i] = row_numbers[t, block * KEY_BLOCK + line + i * 16]

    @T.macro
    def publish(is_there, is_valid, b, worker, line, ready):
        """Tell which lines hold a key, and hand the key block over."""
        if worker == 0:
            for i in T.unroll(LINES):
                is_valid[b, line + i * 16] = is_there[i]
        T.fence_proxy_async()
        T.barrier_arrive(ready[b])

    @T.macro
    def gather_window(codes, scales, found, worker, line, left, right):
        """Decode a block of window rows; the scale of a missing row is zero."""
        steps = -(-width // 128)
        raw = T.alloc_local((steps * 16,), "uint8")
        factor = T.alloc_local((steps,), "uint8")
        keys = T.alloc_local((16,), "bfloat16")
        for i in T.unroll(LINES):
            for step in T.unroll(steps):
                at = step * 128 + worker * 16
                if at < width:
                    for v in T.vectorized(16):
                        raw[step * 16 + v] = codes[T.max(found[i], 0), at + v]
                    factor[step] = T.if_then_else(
                        found[i] >= 0, scales[T.max(found[i], 0), at // 32], T.cast(0, "uint8")
                    )
            for step in T.unroll(steps):
                if step * 128 + worker * 16 < width:
                    T.call_extern(
                        "handle", f"mdi::window_keys<{KEY_SHIFT}>", T.address_of(raw[step * 16]),
                        T.address_of(factor[step]), T.address_of(keys[0]),
                    )  # fmt: skip
                    store(keys, 0, 2, line + i * 16, step * 128 + worker * 16, left, right)

    @T.macro
    def fetch_entry(codes, scales, found, i, worker, raw, factor):
        """Start loading one line's entry; the scale of a missing one is zero."""
        for step in T.unroll(entry_steps):
            at = step * 256 + worker * 32
            if at < width:
                for v in T.vectorized(16):
                    raw[(i * entry_steps + step) * 16 + v] = codes[T.max(found[i], 0), at // 2 + v]
                for v in T.vectorized(2):
                    factor[(i * entry_steps + step) * 2 + v] = T.if_then_else(
                        found[i] >= 0, scales[T.max(found[i], 0), at // 16 + v], T.cast(0, "uint8")
                    )

    @T.macro
    def decode_entry(raw, factor, i, worker, line, left, right):
        keys = T.alloc_local((32,), "bfloat16")
        for step in T.unroll(entry_steps):
            if step * 256 + worker * 32 < width:
                T.call_extern(
                    "handle", f"mdi::entry_keys<{KEY_SHIFT}>",
                    T.address_of(raw[(i * entry_steps + step) * 16]),
                    T.address_of(factor[(i * entry_steps + step) * 2]), T.address_of(keys[0]),
                )  # fmt: skip
                store(keys, 0, 4, line + i * 16, step * 256 + worker * 32, left, right)

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, width), "bfloat16"),
        window_codes: T.Tensor((new_rows, width), "uint8"),
        window_scales: T.Tensor((new_rows, width // 32), "uint8"),
        window_rows: T.Tensor((rows, window_width), "int32"),
        entry_codes: T.Tensor((pool_rows, width // 2), "uint8"),
        entry_scales: T.Tensor((pool_rows, width // 16), "uint8"),
        entry_rows: T.Tensor((rows, max(top_k, 1)), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((rows, heads, width), "bfloat16"),
    ):
        with T.Kernel(rows, -(-heads // HEAD_TILE), threads=THREADS) as (t, head_tile):
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
            out_left = T.alloc_fragment((HEAD_TILE, half), "float32")
            out_right = T.alloc_fragment((HEAD_TILE, half), "float32")
            scores = T.alloc_fragment((HEAD_TILE, KEY_BLOCK), "float32")
            top = T.alloc_fragment((HEAD_TILE,), "float32")
            old_top = T.alloc_fragment((HEAD_TILE,), "float32")
            fade = T.alloc_fragment((HEAD_TILE,), "float32")
            total = T.alloc_fragment((HEAD_TILE,), "float32")
            block_total = T.alloc_fragment((HEAD_TILE,), "float32")
            pieces = T.alloc_local((units * 8,), "bfloat16")
            turned = T.alloc_local((8,), "bfloat16")
            found = T.alloc_local((LINES,), "int32")
            is_there = T.alloc_local((LINES,), "int32")
            is_next = T.alloc_local((LINES,), "int32")
            raw = T.alloc_local((LINES * entry_steps * 16,), "uint8")
            factor = T.alloc_local((LINES * entry_steps * 2,), "uint8")
            q_ready = T.alloc_barrier(arrive_count=LOADERS)
            ready = T.alloc_barrier(arrive_count=[128, 128])
            free = T.alloc_barrier(arrive_count=[256, 256])
            chances_ready = T.alloc_barrier(arrive_count=128)
            chances_free = T.alloc_barrier(arrive_count=256)
            T.import_source(KEY_SOURCE)
            tx = T.get_thread_binding()
            head_0 = head_tile * HEAD_TILE

            if tx < LOADERS:
                for step in T.unroll(units):
                    unit = step * LOADERS + tx
                    if unit < HEAD_TILE * chunks:
                        if head_0 + unit // chunks < heads:
                            for v in T.vectorized(8):
                                pieces[step * 8 + v] = q[
                                    t, head_0 + unit // chunks, unit % chunks * 8 + v
                                ]
                        else:
                            for v in T.vectorized(8):
                                pieces[step * 8 + v] = T.cast(0, "bfloat16")
                for step in T.unroll(units):
                    unit = step * LOADERS + tx
                    if unit < HEAD_TILE * chunks:
                        for v in T.unroll(8):
                            turned[v] = pieces[step * 8 + v // 2 + v % 2 * 4]
                        if unit % chunks * 8 < half:
                            for v in T.vectorized(8):
                                q_left[unit // chunks, unit % chunks * 8 + v] = turned[v]
                        else:
                            for v in T.vectorized(8):
                                q_right[unit // chunks, unit % chunks * 8 - half + v] = turned[v]
                T.fence_proxy_async()
                T.barrier_arrive(q_ready)

            if tx < 128:
                T.set_max_nreg(240, 1)
                T.fill(total, 0)
                T.fill(top, FIRST_MAX)
                T.fill(out_left, 0)
                T.barrier_wait(q_ready, 0)
                for pair in T.serial(pairs):
                    for b in T.unroll(2):
                        T.barrier_wait(ready[b], pair % 2)
                        for h, i in T.Parallel(HEAD_TILE, KEY_BLOCK):
                            scores[h, i] = T.if_then_else(
                                is_valid[b, i] != 0, 0, -T.infinity("float32")
                            )
                        if b == 0:
                            T.gemm(q_left, left_0, scores, transpose_B=True)
                            T.gemm(q_right, right_0, scores, transpose_B=True)
                        else:
                            T.gemm(q_left, left_1, scores, transpose_B=True)
                            T.gemm(q_right, right_1, scores, transpose_B=True)
                        T.copy(top, old_top)
                        T.reduce_max(scores, top, dim=1, clear=False)
                        for h in T.Parallel(HEAD_TILE):
                            top[h] = T.max(top[h], old_top[h])
                            fade[h] = T.exp2((old_top[h] - top[h]) * scale)
                        for h, i in T.Parallel(HEAD_TILE, KEY_BLOCK):
                            scores[h, i] = T.exp2(scores[h, i] * scale - top[h] * scale)
                        T.reduce_sum(scores, block_total, dim=1)
                        for h in T.Parallel(HEAD_TILE):
                            total[h] = total[h] * fade[h] + block_total[h]
                        T.barrier_wait(chances_free, (pair * 2 + b + 1) % 2)
                        T.copy(fade, fade_shared)
                        T.copy(scores, chances)
                        T.fence_proxy_async()
                        T.barrier_arrive(chances_ready)
                        for h, d in T.Parallel(HEAD_TILE, half):
                            out_left[h, d] *= fade[h]
                        T.barrier_wait(chances_ready, b)
                        if b == 0:
                            T.gemm(chances, left_0, out_left)
                        else:
                            T.gemm(chances, left_1, out_left)
                        T.barrier_arrive(chances_free)
                        T.barrier_arrive(free[b])
                for h in T.Parallel(HEAD_TILE):
                    if head_0 + h < heads:
                        total[h] += T.exp2((sink[head_0 + h] - top[h] * unit_scale) * LOG2_E)
                    total[h] = 2.0**KEY_SHIFT / total[h]
                    total_shared[h] = total[h]
                # Not before the last block is consumed: a phase must not overtake a waiting thread.
                T.barrier_wait(chances_free, 1)
                T.barrier_arrive(chances_ready)
                for h, d in T.Parallel(HEAD_TILE, half):
                    out_left[h, d] *= total[h]
                T.barrier_wait(chances_ready, 0)
                T.copy(out_left, q_left)
            elif tx < 256:
                T.set_max_nreg(168, 1)
                T.fill(out_right, 0)
                for pair in T.serial(pairs):
                    for b in T.unroll(2):
                        T.barrier_wait(chances_ready, b)
                        T.barrier_wait(ready[b], pair % 2)
                        for h, d in T.Parallel(HEAD_TILE, half):
                            out_right[h, d] *= fade_shared[h]
                        if b == 0:
                            T.gemm(chances, right_0, out_right)
                        else:
                            T.gemm(chances, right_1, out_right)
                        T.barrier_arrive(chances_free)
                        T.barrier_arrive(free[b])
                T.barrier_wait(chances_ready, 0)
                for h, d in T.Parallel(HEAD_TILE, half):
                    out_right[h, d] *= total_shared[h]
                T.copy(out_right, q_right)
            else:
                # All three together must not exceed what the block was launched with, 3 x 168.
                T.set_max_nreg(96, 0)
                worker, line = (tx - 256) % 8, (tx - 256) // 8
                # A line's next entry is under way while the other lines are decoded.
                find_rows(entry_rows, t, 0, top_k, line, found)
                for i in T.unroll(LINES):
                    fetch_entry(entry_codes, entry_scales, found, i, worker, raw, factor)
                    is_next[i] = T.if_then_else(found[i] >= 0, 1, 0)
                for pair in T.serial(window_pairs):
                    for b in T.unroll(2):
                        find_rows(window_rows, t, pair * 2 + b, window_width, line, found)
                        T.barrier_wait(free[b], (pair + 1) % 2)
                        if b == 0:
                            gather_window(
                                window_codes, window_scales, found, worker, line, left_0, right_0
                            )
                        else:
                            gather_window(
                                window_codes, window_scales, found, worker, line, left_1, right_1
                            )
                        for i in T.unroll(LINES):
                            is_there[i] = T.if_then_else(found[i] >= 0, 1, 0)
                        publish(is_there, is_valid, b, worker, line, ready)
                find_rows(entry_rows, t, 1, top_k, line, found)
                for pair in T.serial(pairs - window_pairs):
                    for b in T.unroll(2):
                        for i in T.unroll(LINES):
                            is_there[i] = is_next[i]
                            is_next[i] = T.if_then_else(found[i] >= 0, 1, 0)
                        T.barrier_wait(free[b], (window_pairs + pair + 1) % 2)
                        for i in T.unroll(LINES):
                            if b == 0:
                                decode_entry(raw, factor, i, worker, line, left_0, right_0)
                            else:
                                decode_entry(raw, factor, i, worker, line, left_1, right_1)
                            fetch_entry(entry_codes, entry_scales, found, i, worker, raw, factor)
                        find_rows(entry_rows, t, pair * 2 + b + 2, top_k, line, found)
                        publish(is_there, is_valid, b, worker, line, ready)
            T.sync_threads()
            for step in T.unroll(-(-HEAD_TILE * chunks // THREADS)):
                unit = step * THREADS + tx
                if unit < HEAD_TILE * chunks and head_0 + unit // chunks < heads:
                    if unit % chunks * 8 < half:
                        for v in T.vectorized(8):
                            turned[v] = q_left[unit // chunks, unit % chunks * 8 + v]
                    else:
                        for v in T.vectorized(8):
                            turned[v] = q_right[unit // chunks, unit % chunks * 8 - half + v]
                    for v in T.unroll(8):
                        pieces[v // 2 + v % 2 * 4] = turned[v]
                    for v in T.vectorized(8):
                        out[t, head_0 + unit // chunks, unit % chunks * 8 + v] = pieces[v]

    return kernel


def sparse_attention(
    q: Tensor,
    window: RowPool,
    window_rows: Tensor,
    sink: Tensor,
    *,
    entries: RowPool | None,
    entry_rows: Tensor | None,
) -> Tensor:
    out = torch.empty_like(q)
    if not q.shape[0]:
        return out
    top_k = 0 if entry_rows is None else entry_rows.shape[1]
    if entries is None or entry_rows is None:
        # Unread: a window-only layer's program has no entries to gather.
        codes = window.codes.new_empty(1, q.shape[2] // 2)
        scales = window.codes.new_empty(1, q.shape[2] // 16)
        entry_rows = window_rows.new_empty(q.shape[0], 1)
    else:
        codes, scales = entries.codes, entries.scales
    run = compiled(sparse_attention_program, q.shape[1], q.shape[2], window_rows.shape[1], top_k)
    run(q, window.codes, window.scales, window_rows, codes, scales, entry_rows, sink, out)
    return out


SAMPLES = (
    Sample(sparse_attention_program, (64, 512, 128, 512)),
    Sample(sparse_attention_program, (64, 512, 128, 0)),
    Sample(sparse_attention_program, (8, 64, 128, 32)),
    Sample(sparse_attention_program, (8, 64, 128, 0)),
)
