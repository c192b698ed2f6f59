"""Cached rows: encode and scatter in one pass, gather and decode in one pass.

Row numbers are int64; -1 stores nothing and gathers zeros.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import CHUNK, FLAT_THREADS, require_multiple
from mdi_exec.ops.kernels.quantise import (
    FORM_OF,
    FP4,
    FP4_E4M3,
    FP8,
    code_bytes,
    e2m1_value,
    encode,
    group_of,
    load_chunk,
)
from mdi_exec.ops.row_pool import RowPool


def store_rows_kernel(form: str, width: int):
    """Store values [rows, width] at pool rows `index` as code and scale bytes."""
    require_multiple(width, group_of(form))
    rows, pool_rows = T.dynamic("rows"), T.dynamic("pool_rows")
    group, size, per_row = group_of(form), code_bytes(form), width // CHUNK
    lanes = group // CHUNK

    @T.prim_func
    def store_kernel(
        index: T.Tensor((rows,), "int64"),
        values: T.Tensor((rows, width), "bfloat16"),
        codes: T.Tensor((pool_rows, per_row * size), "uint8"),
        scales: T.Tensor((pool_rows, width // group), "uint8"),
    ):
        with T.Kernel(T.ceildiv(rows * per_row, FLAT_THREADS), threads=FLAT_THREADS) as block:
            chunk = block * FLAT_THREADS + T.get_thread_binding()
            row, place = chunk // per_row, chunk % per_row
            target = T.alloc_local((1,), "int64")
            loaded = T.alloc_local((CHUNK,), "float32")
            stored = T.alloc_local((size,), "uint8")
            scale_byte = T.alloc_local((1,), "uint8")
            target[0] = T.int64(-1)
            T.clear(loaded)
            if row < rows:
                target[0] = index[row]
                load_chunk(values, row, place * CHUNK, loaded)
            encode(form, loaded, stored, scale_byte)  # all threads: their lanes exchange maxima
            if target[0] >= T.int64(0):
                for i in T.vectorized(size):
                    codes[target[0], place * size + i] = stored[i]
                if place % lanes == 0:
                    scales[target[0], place // lanes] = scale_byte[0]

    return store_kernel


@T.macro
def decode(form, stored, scale_byte, decoded):
    """Float32 values of a thread's 8 codes times their group's scale."""
    scale = T.alloc_local((1,), "float32")
    if form == FP4_E4M3:
        scale[0] = T.cast(T.reinterpret(scale_byte[0], "float8_e4m3fn"), "float32")
    else:
        exponent = T.cast(scale_byte[0], "uint32")
        scale[0] = T.reinterpret(T.shift_left(exponent, T.uint32(23)), "float32")
    for i in T.unroll(CHUNK):
        if form == FP8:
            decoded[i] = T.cast(T.reinterpret(stored[i], "float8_e4m3fn"), "float32") * scale[0]
        else:
            nibble = T.shift_right(T.cast(stored[i // 2], "uint32"), T.cast(i % 2 * 4, "uint32"))
            decoded[i] = e2m1_value(nibble & T.uint32(15)) * scale[0]


def gather_rows_kernel(form: str, width: int):
    """Values [rows, width] of pool rows `index`, bfloat16; zeros where it is -1."""
    require_multiple(width, group_of(form))
    rows, pool_rows = T.dynamic("rows"), T.dynamic("pool_rows")
    group, size, per_row = group_of(form), code_bytes(form), width // CHUNK
    lanes = group // CHUNK

    @T.prim_func
    def gather_kernel(
        index: T.Tensor((rows,), "int64"),
        codes: T.Tensor((pool_rows, per_row * size), "uint8"),
        scales: T.Tensor((pool_rows, width // group), "uint8"),
        out: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(rows * per_row, FLAT_THREADS), threads=FLAT_THREADS) as block:
            chunk = block * FLAT_THREADS + T.get_thread_binding()
            row, place = chunk // per_row, chunk % per_row
            source = T.alloc_local((1,), "int64")
            decoded = T.alloc_local((CHUNK,), "float32")
            stored = T.alloc_local((size,), "uint8")
            scale_byte = T.alloc_local((1,), "uint8")
            if row < rows:
                source[0] = index[row]
                T.clear(decoded)
                if source[0] >= T.int64(0):
                    for i in T.vectorized(size):
                        stored[i] = codes[source[0], place * size + i]
                    scale_byte[0] = scales[source[0], place // lanes]
                    decode(form, stored, scale_byte, decoded)
                for i in T.vectorized(CHUNK):
                    out[row, place * CHUNK + i] = T.cast(decoded[i], "bfloat16")

    return gather_kernel


def form_of(pool: RowPool) -> str:
    """Return the name of a pool's format."""
    return FORM_OF[pool.format.code_dtype, pool.format.scale_dtype]


def store_rows(pool: RowPool, index: Tensor, values: Tensor) -> None:
    if values.shape[0]:
        kernel = compiled(store_rows_kernel, form_of(pool), pool.format.width)
        kernel(index.contiguous(), values.contiguous(), pool.codes, pool.scales)


def gather_rows(pool: RowPool, index: Tensor, out: Tensor | None = None) -> Tensor:
    width = pool.format.width
    if out is None:
        out = torch.empty(*index.shape, width, dtype=torch.bfloat16, device=index.device)
    if out.numel():
        kernel = compiled(gather_rows_kernel, form_of(pool), width)
        kernel(index.reshape(-1).to(torch.int64), pool.codes, pool.scales, out.view(-1, width))
    return out


SAMPLES = tuple(
    Sample(builder, (form, width))
    for builder in (store_rows_kernel, gather_rows_kernel)
    for form, widths in ((FP8, (512, 64)), (FP4_E4M3, (512, 64)), (FP4, (128, 32)))
    for width in widths
)
