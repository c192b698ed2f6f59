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
from mdi_exec.ops.kernels.jit import Sample, checks_bounds, compiled
from mdi_exec.ops.row_pool import RowPool

KEY_BLOCK = 64
HEAD_TILE = 64
LINES = KEY_BLOCK // 16  # lines of a key block that a thread of the third warpgroup helps to fill
FIRST_MAX = -1e30
LOG2_E = 1.4426950408889634


@checks_bounds
def sparse_attention_program(heads, width, window_width, top_k):
    """out [rows, heads, width]; see `sparse_attention` for the inputs."""
    half = width // 2
    window_pairs = -(-window_width // (2 * KEY_BLOCK))
    pairs = window_pairs + -(-top_k // (2 * KEY_BLOCK))
    scale = width**-0.5 * LOG2_E
    chunks = width // 8  # of 8 values: 16 bytes of bfloat16
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
    def find_rows(row_numbers, t, first, limit, found):
        """Load the pool rows of this worker's four lines; -1 = none."""
        for i in T.unroll(LINES):
            found[i] = -1
            if first + i * 16 < limit:
                found[i] = row_numbers[t, first + i * 16]

    @T.macro
    def gather_window(codes, scales, found, worker, line, free, b, parity, left, right):
        """Decode a block of window rows; the scale of a missing row is zero."""
        steps = -(-width // 128)
        raw = T.alloc_local((steps * 16,), "uint8")
        factor = T.alloc_local((steps,), "uint8")
        keys = T.alloc_local((16,), "bfloat16")
        T.barrier_wait(free[b], parity)
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
                        "handle", "mdi::window_keys", T.address_of(raw[step * 16]),
                        T.address_of(factor[step]), T.address_of(keys[0]),
                    )  # fmt: skip
                    store(keys, 0, 2, line + i * 16, step * 128 + worker * 16, left, right)

    @T.macro
    def gather_entries(codes, scales, found, worker, line, free, b, parity, left, right):
        """Decode a block of entries; all loads are under way before the block is free."""
        steps = -(-width // 256)
        raw = T.alloc_local((LINES * steps * 16,), "uint8")
        factor = T.alloc_local((LINES * steps * 2,), "uint8")
        keys = T.alloc_local((32,), "bfloat16")
        for i in T.unroll(LINES):
            for step in T.unroll(steps):
                at = step * 256 + worker * 32
                if at < width:
                    for v in T.vectorized(16):
                        raw[(i * steps + step) * 16 + v] = codes[T.max(found[i], 0), at // 2 + v]
                    for v in T.vectorized(2):
                        factor[(i * steps + step) * 2 + v] = T.if_then_else(
                            found[i] >= 0,
                            scales[T.max(found[i], 0), at // 16 + v],
                            T.cast(0, "uint8"),
                        )
        T.barrier_wait(free[b], parity)
        for i in T.unroll(LINES):
            for step in T.unroll(steps):
                if step * 256 + worker * 32 < width:
                    T.call_extern(
                        "handle", "mdi::entry_keys",
                        T.address_of(raw[(i * steps + step) * 16]),
                        T.address_of(factor[(i * steps + step) * 2]), T.address_of(keys[0]),
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
        with T.Kernel(rows, -(-heads // HEAD_TILE), threads=384) as (t, head_tile):
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
            found = T.alloc_local((LINES,), "int32")
            piece = T.alloc_local((8,), "bfloat16")
            turned = T.alloc_local((8,), "bfloat16")
            q_ready = T.alloc_barrier(arrive_count=384)
            ready = T.alloc_barrier(arrive_count=[128, 128])
            free = T.alloc_barrier(arrive_count=[256, 256])
            chances_ready = T.alloc_barrier(arrive_count=128)
            chances_free = T.alloc_barrier(arrive_count=128)
            T.import_source(KEY_SOURCE)
            tx = T.get_thread_binding()
            head_0 = head_tile * HEAD_TILE

            for step in T.serial(-(-HEAD_TILE * chunks // 384)):
                unit = step * 384 + tx
                if unit < HEAD_TILE * chunks:
                    if head_0 + unit // chunks < heads:
                        for v in T.vectorized(8):
                            piece[v] = q[t, head_0 + unit // chunks, unit % chunks * 8 + v]
                    else:
                        for v in T.vectorized(8):
                            piece[v] = T.cast(0, "bfloat16")
                    for v in T.unroll(8):
                        turned[v] = piece[v // 2 + v % 2 * 4]
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
                        if b == 0:
                            T.gemm(chances, left_0, out_left)
                        else:
                            T.gemm(chances, left_1, out_left)
                        T.barrier_arrive(free[b])
                for h in T.Parallel(HEAD_TILE):
                    if head_0 + h < heads:
                        total[h] += T.exp2((sink[head_0 + h] - top[h] * (width**-0.5)) * LOG2_E)
                    total[h] = 1.0 / total[h]
                    total_shared[h] = total[h]
                T.barrier_arrive(chances_ready)
                for h, d in T.Parallel(HEAD_TILE, half):
                    out_left[h, d] *= total[h]
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
                for pair in T.serial(pairs):
                    for b in T.unroll(2):
                        if pair < window_pairs:
                            first = (pair * 2 + b) * KEY_BLOCK + line
                            find_rows(window_rows, t, first, window_width, found)
                            if b == 0:
                                gather_window(
                                    window_codes, window_scales, found, worker, line,
                                    free, 0, (pair + 1) % 2, left_0, right_0,
                                )  # fmt: skip
                            else:
                                gather_window(
                                    window_codes, window_scales, found, worker, line,
                                    free, 1, (pair + 1) % 2, left_1, right_1,
                                )  # fmt: skip
                        else:
                            first = ((pair - window_pairs) * 2 + b) * KEY_BLOCK + line
                            find_rows(entry_rows, t, first, top_k, found)
                            if b == 0:
                                gather_entries(
                                    entry_codes, entry_scales, found, worker, line,
                                    free, 0, (pair + 1) % 2, left_0, right_0,
                                )  # fmt: skip
                            else:
                                gather_entries(
                                    entry_codes, entry_scales, found, worker, line,
                                    free, 1, (pair + 1) % 2, left_1, right_1,
                                )  # fmt: skip
                        if worker == 0:
                            for i in T.unroll(LINES):
                                is_valid[b, line + i * 16] = T.if_then_else(found[i] >= 0, 1, 0)
                        T.fence_proxy_async()
                        T.barrier_arrive(ready[b])
            T.sync_threads()
            for step in T.serial(-(-HEAD_TILE * chunks // 384)):
                unit = step * 384 + tx
                if unit < HEAD_TILE * chunks:
                    if head_0 + unit // chunks < heads:
                        if unit % chunks * 8 < half:
                            for v in T.vectorized(8):
                                turned[v] = q_left[unit // chunks, unit % chunks * 8 + v]
                        else:
                            for v in T.vectorized(8):
                                turned[v] = q_right[unit // chunks, unit % chunks * 8 - half + v]
                        for v in T.unroll(8):
                            piece[v // 2 + v % 2 * 4] = turned[v]
                        for v in T.vectorized(8):
                            out[t, head_0 + unit // chunks, unit % chunks * 8 + v] = piece[v]

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
