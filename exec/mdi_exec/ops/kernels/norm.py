"""RMS normalisation, optionally with the rounding (QA) of its result for the GEMM behind it.

One block per row: the row stays in registers between the sum of squares and the scaling, so it is
read once. Rounding points are the reference's; only the order of the sum differs.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import (
    CHUNK,
    block_sum,
    require_multiple,
    row_chunks,
    row_threads,
)
from mdi_exec.ops.kernels.quantise import round_fp8
from mdi_exec.ops.quantise import GROUP

# Names of the weights' dtypes: bfloat16 in checkpoints, float32 if someone promoted them.
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@T.macro
def add_squares(raw, start, total):
    """Add the squares of 8 bfloat16 values, from `start` on, to total[0]."""
    for i in T.unroll(CHUNK):
        total[0] = total[0] + T.cast(raw[start + i], "float32") * T.cast(raw[start + i], "float32")


@T.macro
def scale_chunk(raw, start, weight, column, rstd, normed):
    """Normalise 8 bfloat16 values of `raw` from `start` on; weight[column] belongs to the first."""
    gains = T.alloc_local((CHUNK,), weight.dtype)
    for i in T.vectorized(CHUNK):
        gains[i] = weight[column + i]
    for i in T.vectorized(CHUNK):
        normed[i] = T.cast(
            T.cast(gains[i], "float32") * (T.cast(raw[start + i], "float32") * rstd), "bfloat16"
        )


@T.macro
def store_normed(raw, weight, rstd, row, thread, normed_out, rounded_out, width):
    """Scale a thread's chunks of a row; store them, and them rounded, where there is an output."""
    threads, normed = row_threads(width), T.alloc_local((CHUNK,), "bfloat16")
    values = T.alloc_local((CHUNK,), "float32")
    rounded = T.alloc_local((CHUNK,), "bfloat16")
    for c in T.unroll(row_chunks(width)):
        column = (c * threads + thread) * CHUNK
        T.clear(normed)
        if column < width:
            scale_chunk(raw, c * CHUNK, weight, column, rstd, normed)
            if normed_out is not None:
                for i in T.vectorized(CHUNK):
                    normed_out[row, column + i] = normed[i]
        if rounded_out is not None:
            for i in T.vectorized(CHUNK):
                values[i] = T.cast(normed[i], "float32")
            round_fp8(values, rounded)
            if column < width:
                for i in T.vectorized(CHUNK):
                    rounded_out[row, column + i] = rounded[i]


@T.macro
def load_sum(product, row, column, raw, start):
    """Set raw[start ..] to 8 values of a product [parts, rows, width], added up and rounded."""
    parts = product.shape[0]
    loaded = T.alloc_local((parts, CHUNK), "float32")
    for part in T.unroll(parts):
        for half in T.unroll(2):
            for i in T.vectorized(CHUNK // 2):
                loaded[part, half * 4 + i] = product[part, row, column + half * 4 + i]
    for part in T.unroll(1, parts):
        for i in T.unroll(CHUNK):
            loaded[0, i] = loaded[0, i] + loaded[part, i]
    for i in T.vectorized(CHUNK):
        raw[start + i] = T.cast(loaded[0, i], "bfloat16")


@T.macro
def reciprocal_rms(raw, width, eps, rstd):
    """Set rstd[0] to one over the root mean square of a row, whose chunks the block holds."""
    rstd[0] = T.float32(0)
    for c in T.unroll(row_chunks(width)):
        add_squares(raw, c * CHUNK, rstd)
    block_sum(rstd, row_threads(width), T.get_thread_binding())
    rstd[0] = T.rsqrt(rstd[0] * T.float32(1.0 / width) + T.float32(eps))


@T.macro
def norm_of_sum(product, row, eps, raw, rstd):
    """Load a row of a product's parts [parts, rows, width] and find what normalises it."""
    width = product.shape[2]
    T.clear(raw)
    for c in T.unroll(row_chunks(width)):
        column = (c * row_threads(width) + T.get_thread_binding()) * CHUNK
        if column < width:
            load_sum(product, row, column, raw, c * CHUNK)
    reciprocal_rms(raw, width, eps, rstd)


@T.macro
def norm_row(x, weight, normed_out, rounded_out, row, width, eps):
    threads, thread = row_threads(width), T.get_thread_binding()
    raw = T.alloc_local((row_chunks(width) * CHUNK,), "bfloat16")
    rstd = T.alloc_local((1,), "float32")
    T.clear(raw)
    for c in T.unroll(row_chunks(width)):
        if (c * threads + thread) * CHUNK < width:
            for i in T.vectorized(CHUNK):
                raw[c * CHUNK + i] = x[row, (c * threads + thread) * CHUNK + i]
    reciprocal_rms(raw, width, eps, rstd)
    store_normed(raw, weight, rstd[0], row, thread, normed_out, rounded_out, width)


def rms_norm_rows(width: int, eps: float, weight_dtype: str = "bfloat16"):
    """x [rows, width] bfloat16 to its normed rows; weight [width]."""
    rows = T.dynamic("rows")

    @T.prim_func
    def rms_norm_kernel(
        x: T.Tensor((rows, width), "bfloat16"),
        weight: T.Tensor((width,), weight_dtype),
        normed: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=row_threads(width)) as row:
            norm_row(x, weight, normed, None, row, width, eps)

    return rms_norm_kernel


def rms_norm_round_rows(width: int, eps: float, weight_dtype: str = "bfloat16"):
    """As `rms_norm_rows`, and the normed rows once more, rounded by QA; width a multiple of 32."""
    require_multiple(width, GROUP)
    rows = T.dynamic("rows")

    @T.prim_func
    def rms_norm_round_kernel(
        x: T.Tensor((rows, width), "bfloat16"),
        weight: T.Tensor((width,), weight_dtype),
        normed: T.Tensor((rows, width), "bfloat16"),
        rounded: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=row_threads(width)) as row:
            norm_row(x, weight, normed, rounded, row, width, eps)

    return rms_norm_round_kernel


def rms_norm_round_sum_rows(width: int, parts: int, eps: float, weight_dtype: str = "bfloat16"):
    """product float32 [parts, rows, width], added up, to its normed rows rounded by QA."""
    require_multiple(width, GROUP)
    rows = T.dynamic("rows")

    @T.prim_func
    def rms_norm_round_sum_kernel(
        product: T.Tensor((parts, rows, width), "float32"),
        weight: T.Tensor((width,), weight_dtype),
        rounded: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=row_threads(width)) as row:
            raw = T.alloc_local((row_chunks(width) * CHUNK,), "bfloat16")
            rstd = T.alloc_local((1,), "float32")
            norm_of_sum(product, row, eps, raw, rstd)
            store_normed(raw, weight, rstd[0], row, T.get_thread_binding(), None, rounded, width)

    return rms_norm_round_sum_kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        kernel = compiled(rms_norm_rows, width, eps, DTYPE_NAMES[weight.dtype])
        kernel(x.contiguous().view(-1, width), weight, normed.view(-1, width))
    return normed


def rms_norm_round(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rounded = torch.empty_like(normed)
    if x.numel():
        kernel = compiled(rms_norm_round_rows, width, eps, DTYPE_NAMES[weight.dtype])
        kernel(x.contiguous().view(-1, width), weight, normed.view(-1, width),
               rounded.view(-1, width))  # fmt: skip
    return normed, rounded


def rms_norm_round_sum(product: Partial, weight: Tensor, eps: float) -> Tensor:
    parts, rows, width = product.parts.shape
    rounded = torch.empty(rows, width, dtype=product.dtype, device=product.parts.device)
    if rows:
        kernel = compiled(rms_norm_round_sum_rows, width, parts, eps, DTYPE_NAMES[weight.dtype])
        kernel(product.parts, weight, rounded)
    return rounded


_EPS = 1e-20
SAMPLES = (
    *(Sample(rms_norm_rows, (width, _EPS)) for width in (5120, 1280, 512, 128, 64, 32)),
    *(Sample(rms_norm_round_rows, (width, _EPS)) for width in (5120, 1280, 128, 64)),
    Sample(rms_norm_round_sum_rows, (1280, 8, _EPS)),
    Sample(rms_norm_round_sum_rows, (64, 1, _EPS)),
)
