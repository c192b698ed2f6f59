"""Sparse attention: every query gathers its own keys from two pools, which stay quantised.

One block of three warpgroups serves one query with all its heads. The third gathers and decodes the
next 64 keys while the first scores the present ones and runs the online softmax; first and second
each multiply the probabilities with one half of the value dimensions. Keys are values too, so a
decoded block is used twice. Read next: `attention_block.py`, `attention_gather.py`,
`attention_softmax.py`.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.attention_block import (
    HEAD_TILE,
    LOADERS,
    THREADS,
    WARPGROUP,
    Shape,
    block_barriers,
    shared_memory,
)
from mdi_exec.ops.kernels.attention_gather import Pool, gather
from mdi_exec.ops.kernels.attention_softmax import score_and_sum_left, sum_right
from mdi_exec.ops.kernels.attention_source import KEY_SOURCE, POWER_SOURCE
from mdi_exec.ops.kernels.jit import Sample, by_hand, compiled
from mdi_exec.ops.kernels.rope import PAIRS, turn
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.row_pool import RowPool


@by_hand("bounds", "barriers")
def sparse_attention_program(heads, width, window_width, top_k, rotated):
    """out [rows, heads, width]; see `sparse_attention` for the inputs.

    The last `rotated` values of queries are rotated, and those of the output back.
    """
    shape = Shape(heads, width, window_width, top_k)
    units = _units(shape, LOADERS)
    rows, pool_rows, new_rows = T.dynamic("rows"), T.dynamic("pool_rows"), T.dynamic("new_rows")

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
        cos: T.Tensor((rows, max(rotated // 2, 1)), "float32"),
        sin: T.Tensor((rows, max(rotated // 2, 1)), "float32"),
        out: T.Tensor((rows, heads, width), "bfloat16"),
    ):
        with T.Kernel(rows, -(-heads // HEAD_TILE), threads=THREADS) as (t, head_tile):
            shared = shared_memory(shape.half)
            pieces = T.alloc_local((units * 8,), "bfloat16")
            turned = T.alloc_local((8,), "bfloat16")
            barriers = block_barriers()
            T.import_source(POWER_SOURCE + KEY_SOURCE)
            tx = T.get_thread_binding()
            head_0 = head_tile * HEAD_TILE
            turns = Turns(cos, sin, t, width - rotated)
            if tx < LOADERS:
                _load_queries(q, t, head_0, tx, shape, turns, pieces, turned, shared)
                T.fence_proxy_async()
                T.barrier_arrive(barriers.q_ready)
            # All three together must not exceed what the block was launched with, 3 x 168.
            if tx < WARPGROUP:
                T.set_max_nreg(240, 1)
                score_and_sum_left(sink, head_0, shape, shared, barriers)
            elif tx < 2 * WARPGROUP:
                T.set_max_nreg(168, 1)
                sum_right(shape, shared, barriers)
            else:
                T.set_max_nreg(96, 0)
                window = Pool(window_codes, window_scales, window_rows)
                entries = Pool(entry_codes, entry_scales, entry_rows)
                gather(t, tx, shape, window, entries, shared, barriers)
            T.sync_threads()
            _write_output(out, t, head_0, tx, shape, turns, pieces, turned, shared)

    return kernel


class Turns(NamedTuple):
    """Cosines and sines of row `row`, for values from column `first` on."""

    cos: Any
    sin: Any
    row: Any
    first: int


@T.macro
def _rotate(turns, column, inverse, pieces, start):
    """Rotate 8 values of pieces from `start` on, which stand at `column`, where that is rotated."""
    raw = T.alloc_local((8,), "bfloat16")
    cosines, sines = T.alloc_local((PAIRS,), "float32"), T.alloc_local((PAIRS,), "float32")
    if column >= turns.first:
        for v in T.unroll(8):
            raw[v] = pieces[start + v]
        for i in T.vectorized(PAIRS):
            cosines[i] = turns.cos[turns.row, (column - turns.first) // 2 + i]
        for i in T.vectorized(PAIRS):
            sines[i] = turns.sin[turns.row, (column - turns.first) // 2 + i]
        turn(raw, cosines, sines, inverse)
        for v in T.unroll(8):
            pieces[start + v] = raw[v]


def _units(shape, threads):
    """Chunks of all the block's heads, for each of the threads that move them."""
    return -(-HEAD_TILE * shape.chunks // threads)


@T.macro
def _load_queries(q, t, head_0, tx, shape, turns, pieces, turned, shared):
    """Put the queries into shared memory in the keys' order; heads that are not there are zero."""
    units = _units(shape, LOADERS)
    chunks, half = shape.chunks, shape.half
    for step in T.unroll(units):
        unit = step * LOADERS + tx
        if unit < HEAD_TILE * chunks:
            if head_0 + unit // chunks < shape.heads:
                for v in T.vectorized(8):
                    pieces[step * 8 + v] = q[t, head_0 + unit // chunks, unit % chunks * 8 + v]
            else:
                for v in T.vectorized(8):
                    pieces[step * 8 + v] = T.cast(0, "bfloat16")
    for step in T.unroll(units):
        unit = step * LOADERS + tx
        if unit < HEAD_TILE * chunks:
            if turns.first < q.shape[2]:
                _rotate(turns, unit % chunks * 8, False, pieces, step * 8)
            for v in T.unroll(8):
                turned[v] = pieces[step * 8 + v // 2 + v % 2 * 4]
            if unit % chunks * 8 < half:
                for v in T.vectorized(8):
                    shared.q_left[unit // chunks, unit % chunks * 8 + v] = turned[v]
            else:
                for v in T.vectorized(8):
                    shared.q_right[unit // chunks, unit % chunks * 8 - half + v] = turned[v]


@T.macro
def _write_output(out, t, head_0, tx, shape, turns, pieces, turned, shared):
    """Write the output, which lies where the queries were, in the usual order."""
    chunks, half = shape.chunks, shape.half
    for step in T.unroll(_units(shape, THREADS)):
        unit = step * THREADS + tx
        if unit < HEAD_TILE * chunks and head_0 + unit // chunks < shape.heads:
            if unit % chunks * 8 < half:
                for v in T.vectorized(8):
                    turned[v] = shared.q_left[unit // chunks, unit % chunks * 8 + v]
            else:
                for v in T.vectorized(8):
                    turned[v] = shared.q_right[unit // chunks, unit % chunks * 8 - half + v]
            for v in T.unroll(8):
                pieces[v // 2 + v % 2 * 4] = turned[v]
            if turns.first < out.shape[2]:
                _rotate(turns, unit % chunks * 8, True, pieces, 0)
            for v in T.vectorized(8):
                out[t, head_0 + unit // chunks, unit % chunks * 8 + v] = pieces[v]


def sparse_attention(
    q: Tensor,
    window: RowPool,
    window_rows: Tensor,
    sink: Tensor,
    *,
    entries: RowPool | None,
    entry_rows: Tensor | None,
    rotation: Rotation | None,
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
    if rotation is None:
        rotation, rotated = Rotation(*[sink.new_empty(q.shape[0], 1)] * 2), 0
    else:
        rotated = 2 * rotation.cos.shape[1]
    run = compiled(sparse_attention_program, q.shape[1], q.shape[2], window_rows.shape[1], top_k,
                   rotated)  # fmt: skip
    run(q, window.codes, window.scales, window_rows, codes, scales, entry_rows, sink, *rotation,
        out)  # fmt: skip
    return out


SAMPLES = (
    Sample(sparse_attention_program, (64, 512, 128, 512, 64)),
    Sample(sparse_attention_program, (64, 512, 128, 0, 0)),
    Sample(sparse_attention_program, (8, 64, 128, 32, 16)),
    Sample(sparse_attention_program, (8, 64, 128, 0, 16)),
)
