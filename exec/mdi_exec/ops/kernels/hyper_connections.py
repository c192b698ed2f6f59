"""Hyper-connection kernels: the two passes over the residual streams, both memory-bound.

Each stream value is read once, and products and sums are rounded one by one, in the reference's
order, so the results are the reference's bits. The sublayer's norm and its rounding (QA) ride along
with the read. Read next: `hc_coefficients.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.hyper_connections import HcCoefficients
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import (
    CHUNK,
    require_multiple,
    row_chunks,
    row_threads,
)
from mdi_exec.ops.kernels.norm import DTYPE_NAMES, reciprocal_rms, store_normed
from mdi_exec.ops.quantise import GROUP


@T.macro
def read_chunk(streams, read, row, column, n, mixed, start):
    """Set mixed[start ..] to 8 bfloat16 values of sum_j read[row, j] * streams[row, j]."""
    raw = T.alloc_local((n, CHUNK), "bfloat16")
    for j in T.unroll(n):
        for i in T.vectorized(CHUNK):
            raw[j, i] = streams[row, j, column + i]
    mix_chunk(raw, read, n, mixed, start)


@T.macro
def read_row(streams, read, row, thread, width, n, mixed):
    """Mix a thread's chunks of a row into `mixed`, bfloat16; zeros beyond the row."""
    weights = T.alloc_local((n,), "float32")
    for j in T.vectorized(n):
        weights[j] = read[row, j]
    T.clear(mixed)
    for c in T.unroll(row_chunks(width)):
        column = (c * row_threads(width) + thread) * CHUNK
        if column < width:
            read_chunk(streams, weights, row, column, n, mixed, c * CHUNK)


def hc_read_rows(width: int, n: int):
    """streams [rows, n, width], read float32 [rows, n] to mixed [rows, width]."""
    rows, threads = T.dynamic("rows"), row_threads(width)

    @T.prim_func
    def hc_read_kernel(
        streams: T.Tensor((rows, n, width), "bfloat16"),
        read: T.Tensor((rows, n), "float32"),
        out: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            thread = T.get_thread_binding()
            mixed = T.alloc_local((row_chunks(width) * CHUNK,), "bfloat16")
            read_row(streams, read, row, thread, width, n, mixed)
            for c in T.unroll(row_chunks(width)):
                if (c * threads + thread) * CHUNK < width:
                    for i in T.vectorized(CHUNK):
                        out[row, (c * threads + thread) * CHUNK + i] = mixed[c * CHUNK + i]

    return hc_read_kernel


def hc_read_norm_rows(width: int, n: int, eps: float, weight_dtype: str = "bfloat16"):
    """As `hc_read_rows`, then RMS norm by weight [width], then QA: normed and rounded rows."""
    require_multiple(width, GROUP)
    rows, threads = T.dynamic("rows"), row_threads(width)

    @T.prim_func
    def hc_read_norm_kernel(
        streams: T.Tensor((rows, n, width), "bfloat16"),
        read: T.Tensor((rows, n), "float32"),
        weight: T.Tensor((width,), weight_dtype),
        normed: T.Tensor((rows, width), "bfloat16"),
        rounded: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            thread = T.get_thread_binding()
            mixed = T.alloc_local((row_chunks(width) * CHUNK,), "bfloat16")
            rstd = T.alloc_local((1,), "float32")
            read_row(streams, read, row, thread, width, n, mixed)
            reciprocal_rms(mixed, width, eps, rstd)
            store_normed(mixed, weight, rstd[0], row, thread, normed, rounded, width)

    return hc_read_norm_kernel


@T.macro
def mix_chunk(streams, read, n, mixed, start):
    """Set mixed[start ..] to the sum of 8 columns of n streams in registers, weighted by `read`."""
    total = T.alloc_local((CHUNK,), "float32")
    for i in T.unroll(CHUNK):
        total[i] = read[0] * T.cast(streams[0, i], "float32")
        for j in T.unroll(1, n):
            total[i] = T.ieee_add(total[i], T.ieee_mul(read[j], T.cast(streams[j, i], "float32")))
    for i in T.vectorized(CHUNK):
        mixed[start + i] = T.cast(total[i], "bfloat16")


@T.macro
def write_chunk(streams, output, weights, mix, out, row, column, n, written):
    """Write 8 columns of a row's n streams; weights [n] and mix [n * n] are in registers.

    They are left in `written` [n, 8].
    """
    raw = T.alloc_local((n, CHUNK), "bfloat16")
    added = T.alloc_local((CHUNK,), "bfloat16")
    total = T.alloc_local((CHUNK,), "float32")
    for i in T.vectorized(CHUNK):
        added[i] = output[row, column + i]
    for j in T.unroll(n):
        for i in T.vectorized(CHUNK):
            raw[j, i] = streams[row, j, column + i]
    for k in T.unroll(n):
        for i in T.unroll(CHUNK):
            total[i] = mix[k] * T.cast(raw[0, i], "float32")
            for j in T.unroll(1, n):
                term = T.ieee_mul(mix[j * n + k], T.cast(raw[j, i], "float32"))
                total[i] = T.ieee_add(total[i], term)
            term = T.ieee_mul(weights[k], T.cast(added[i], "float32"))
            total[i] = T.ieee_add(term, total[i])
        for i in T.vectorized(CHUNK):
            written[k, i] = T.cast(total[i], "bfloat16")
        for i in T.vectorized(CHUNK):
            out[row, k, column + i] = written[k, i]


def hc_write_rows(width: int, n: int):
    """New streams [rows, n, width] of old ones, output [rows, width] and float32 coefficients."""
    rows, threads = T.dynamic("rows"), row_threads(width)

    @T.prim_func
    def hc_write_kernel(
        streams: T.Tensor((rows, n, width), "bfloat16"),
        output: T.Tensor((rows, width), "bfloat16"),
        write: T.Tensor((rows, n), "float32"),
        mix: T.Tensor((rows, n * n), "float32"),
        out: T.Tensor((rows, n, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            thread = T.get_thread_binding()
            weights = T.alloc_local((n,), "float32")
            mixing = T.alloc_local((n * n,), "float32")
            written = T.alloc_local((n, CHUNK), "bfloat16")
            for k in T.vectorized(n):
                weights[k] = write[row, k]
            for k in T.vectorized(n * n):
                mixing[k] = mix[row, k]
            for c in T.unroll(row_chunks(width)):
                column = (c * threads + thread) * CHUNK
                if column < width:
                    write_chunk(streams, output, weights, mixing, out, row, column, n, written)

    return hc_write_kernel


def hc_write_read_rows(width: int, n: int, eps: float, weight_dtype: str = "bfloat16"):
    """`hc_write_rows`, then of the new streams `hc_read_norm_rows`, by read [rows, n]."""
    require_multiple(width, GROUP)
    rows, threads = T.dynamic("rows"), row_threads(width)

    @T.prim_func
    def hc_write_read_kernel(
        streams: T.Tensor((rows, n, width), "bfloat16"),
        output: T.Tensor((rows, width), "bfloat16"),
        read: T.Tensor((rows, n), "float32"),
        write: T.Tensor((rows, n), "float32"),
        mix: T.Tensor((rows, n * n), "float32"),
        weight: T.Tensor((width,), weight_dtype),
        out: T.Tensor((rows, n, width), "bfloat16"),
        normed: T.Tensor((rows, width), "bfloat16"),
        rounded: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            thread = T.get_thread_binding()
            reads = T.alloc_local((n,), "float32")
            weights = T.alloc_local((n,), "float32")
            mixing = T.alloc_local((n * n,), "float32")
            written = T.alloc_local((n, CHUNK), "bfloat16")
            mixed = T.alloc_local((row_chunks(width) * CHUNK,), "bfloat16")
            rstd = T.alloc_local((1,), "float32")
            for k in T.vectorized(n):
                reads[k] = read[row, k]
            for k in T.vectorized(n):
                weights[k] = write[row, k]
            for k in T.vectorized(n * n):
                mixing[k] = mix[row, k]
            T.clear(mixed)
            for c in T.unroll(row_chunks(width)):
                column = (c * threads + thread) * CHUNK
                if column < width:
                    write_chunk(streams, output, weights, mixing, out, row, column, n, written)
                    mix_chunk(written, reads, n, mixed, c * CHUNK)
            reciprocal_rms(mixed, width, eps, rstd)
            store_normed(mixed, weight, rstd[0], row, thread, normed, rounded, width)

    return hc_write_read_kernel


def hc_read(streams: Tensor, read: Tensor) -> Tensor:
    rows, n, width = streams.shape
    out = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    if rows:
        compiled(hc_read_rows, width, n)(streams.contiguous(), read.contiguous(), out)
    return out


def hc_read_norm(
    streams: Tensor, read: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, n, width = streams.shape
    normed = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    rounded = torch.empty_like(normed)
    if rows:
        kernel = compiled(hc_read_norm_rows, width, n, eps, DTYPE_NAMES[weight.dtype])
        kernel(streams.contiguous(), read.contiguous(), weight, normed, rounded)
    return normed, rounded


def hc_write(streams: Tensor, output: Tensor, coefficients: HcCoefficients) -> Tensor:
    rows, n, width = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if rows:
        kernel = compiled(hc_write_rows, width, n)
        kernel(streams.contiguous(), output.contiguous(), coefficients.write.contiguous(),
               coefficients.mix.contiguous().view(rows, n * n), out)  # fmt: skip
    return out


def hc_write_read(
    streams: Tensor, output: Tensor, coefficients: HcCoefficients, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, width = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    normed = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    rounded = torch.empty_like(normed)
    if rows:
        kernel = compiled(hc_write_read_rows, width, n, eps, DTYPE_NAMES[weight.dtype])
        kernel(streams.contiguous(), output.contiguous(), coefficients.read.contiguous(),
               coefficients.write.contiguous(), coefficients.mix.contiguous().view(rows, n * n),
               weight, out, normed, rounded)  # fmt: skip
    return out, normed, rounded


_WIDTHS, _N, _EPS = (5120, 128), 4, 1e-20
SAMPLES = (
    *(Sample(hc_read_norm_rows, (width, _N, _EPS)) for width in _WIDTHS),
    *(Sample(hc_read_rows, (width, _N)) for width in _WIDTHS),
    *(Sample(hc_write_rows, (width, _N)) for width in _WIDTHS),
    *(Sample(hc_write_read_rows, (width, _N, _EPS)) for width in _WIDTHS),
)
