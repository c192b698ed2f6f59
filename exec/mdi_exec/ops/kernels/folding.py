"""Folding rounded activations into E4M3 with one scale a row: a block a row, read once.

A row's largest magnitude does not depend on the order it is found in. Read next: `ops/folding.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.folding import FAR_OCTAVES
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import (
    CHUNK,
    WARP,
    group_max,
    require_multiple,
    row_chunks,
    row_threads,
)
from mdi_exec.ops.kernels.quantise import load_chunk, power_of_two_scale
from mdi_exec.ops.quantise import ACTIVATION_FLOOR, E4M3_MAX, GROUP, Quantised


@T.macro
def _block_max(largest, threads, thread):
    """Set largest[0] to its maximum over the block."""
    for step in T.unroll(5):
        largest[0] = T.max(largest[0], T.shfl_xor(largest[0], T.shift_right(16, step)))
    warps = T.alloc_shared((threads // WARP,), "float32")
    if thread % WARP == 0:
        warps[thread // WARP] = largest[0]
    T.sync_threads()
    for warp in T.unroll(threads // WARP):
        largest[0] = T.max(largest[0], warps[warp])


def fold_rows_program(width: int):
    """x [rows, width] to codes [rows, width], scales [rows]; far[0] counts rows with far groups."""
    require_multiple(width, GROUP)
    rows, threads, chunks = T.dynamic("rows"), row_threads(width), row_chunks(width)

    @T.prim_func
    def fold_rows_kernel(
        x: T.Tensor((rows, width), "bfloat16"),
        codes: T.Tensor((rows, width), "uint8"),
        scales: T.Tensor((rows,), "uint8"),
        far: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            thread = T.get_thread_binding()
            values = T.alloc_local((chunks, CHUNK), "float32")
            raw, stored = T.alloc_local((CHUNK,), "float32"), T.alloc_local((CHUNK,), "uint8")
            rounded = T.alloc_local((CHUNK,), "float8_e4m3fn")
            groups, amax = T.alloc_local((chunks,), "float32"), T.alloc_local((1,), "float32")
            largest, exponent = T.alloc_local((1,), "float32"), T.alloc_local((1,), "uint32")
            scale, inverse = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
            is_far = T.alloc_shared((1,), "int32")
            if thread == 0:
                is_far[0] = 0
            largest[0] = 0.0
            for c in T.unroll(chunks):
                T.clear(raw)
                if (c * threads + thread) * CHUNK < width:
                    load_chunk(x, row, (c * threads + thread) * CHUNK, raw)
                for i in T.unroll(CHUNK):
                    values[c, i] = raw[i]
                group_max(raw, amax, 4)  # all threads: their lanes exchange maxima
                groups[c] = amax[0]
                largest[0] = T.max(largest[0], amax[0])
            _block_max(largest, threads, thread)
            power_of_two_scale(largest, ACTIVATION_FLOOR, 1.0 / E4M3_MAX, exponent, scale, inverse)
            for c in T.unroll(chunks):
                if groups[c] > 0 and groups[c] * 2.0**FAR_OCTAVES < largest[0]:
                    is_far[0] = 1
                if (c * threads + thread) * CHUNK < width:
                    for i in T.vectorized(CHUNK):
                        rounded[i] = T.cast(values[c, i] * inverse[0], "float8_e4m3fn")
                    for i in T.unroll(CHUNK):
                        stored[i] = T.reinterpret(rounded[i], "uint8")
                    for i in T.vectorized(CHUNK):
                        codes[row, (c * threads + thread) * CHUNK + i] = stored[i]
            T.sync_threads()
            if thread == 0:
                scales[row] = T.cast(exponent[0], "uint8")
                if is_far[0] > 0:
                    T.atomic_add(far[0], 1)

    return fold_rows_kernel


def fold_rows(x: Tensor, far: Tensor | None = None) -> Quantised:
    """Launch `fold_rows_program`; see `ops.folding.fold_rows`."""
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.uint8, device=x.device)
    if rows:
        counted = torch.zeros(1, dtype=torch.int32, device=x.device) if far is None else far
        compiled(fold_rows_program, width)(x.contiguous(), codes, scales.view(-1), counted)
    return Quantised(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))


SAMPLES = tuple(Sample(fold_rows_program, (width,)) for width in (5120, 2304, 128, 64))
