"""Dense products of bfloat16 rows and weights, float32 accumulation, any number of rows.

Every result is summed over K in ascending steps of 16 in one accumulator, in every tile size and in
`weight_gemm.py` and `dense_gemm.py` alike, so a row's result does not depend on how many rows there
are. `hc_project` keeps float32 weights exact by splitting each into three bfloat16 numbers.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.hyper_connections import hc_finish, term_rows
from mdi_exec.ops.kernels import dense_gemm, weight_gemm
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.weight_gemm import FEW_ROWS

HC_SPLITS = 16  # parts a hyper-connection's projection is summed in, whatever the number of rows
HC_ROWS = 128


def _step_of(k):
    return next(step for step in (64, 32) if k % step == 0)


def gemm(n, k, groups, dtype, tile_m, tile_n, stages):
    """out[:, g] = x[:, g] w[g]^T; x [rows, groups * k], w [groups * n, k]."""
    rows, step = T.dynamic("rows"), _step_of(k)
    grid = (T.ceildiv(n, tile_n), T.ceildiv(rows, tile_m), groups)
    threads = 256 if tile_m > 64 else 128

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, groups * k), "bfloat16"),
        w: T.Tensor((groups * n, k), "bfloat16"),
        out: T.Tensor((rows, groups * n), dtype),
    ):
        with T.Kernel(*grid, threads=threads) as (bn, bm, g):
            left = T.alloc_shared((tile_m, step), "bfloat16")
            right = T.alloc_shared((tile_n, step), "bfloat16")
            sums = T.alloc_fragment((tile_m, tile_n), "float32")
            T.use_swizzle(8)
            T.clear(sums)
            for i in T.Pipelined(k // step, num_stages=stages):
                T.copy(x[bm * tile_m, g * k + i * step], left)
                T.copy(w[g * n + bn * tile_n, i * step], right)
                T.gemm(left, right, sums, transpose_B=True)
            for i, j in T.Parallel(tile_m, tile_n):
                if bm * tile_m + i < rows and bn * tile_n + j < n:
                    out[bm * tile_m + i, g * n + bn * tile_n + j] = T.cast(sums[i, j], dtype)

    return kernel


def hc_project(width, coefficients):
    """Parts of x w^T and of the rows' sums of squares: x [rows, width], w split in three.

    w bfloat16 [96, width]: `coefficients` high, middle and low parts, then zeros. parts float32
    [HC_SPLITS, rows, coefficients], squares [HC_SPLITS, rows].
    """
    rows = T.dynamic("rows")
    padded = term_rows(coefficients)
    part = width // HC_SPLITS
    step = _step_of(part)

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, width), "bfloat16"),
        w: T.Tensor((padded, width), "bfloat16"),
        parts: T.Tensor((HC_SPLITS, rows, coefficients), "float32"),
        squares: T.Tensor((HC_SPLITS, rows), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, HC_ROWS), HC_SPLITS, threads=256) as (bm, split):
            left = T.alloc_shared((HC_ROWS, step), "bfloat16")
            right = T.alloc_shared((padded, step), "bfloat16")
            sums = T.alloc_fragment((HC_ROWS, padded), "float32")
            terms = T.alloc_shared((HC_ROWS, padded), "float32")
            square = T.alloc_fragment((HC_ROWS, step), "float32")
            total = T.alloc_fragment((HC_ROWS,), "float32")
            T.clear(sums)
            T.clear(square)
            for i in T.Pipelined(part // step, num_stages=3):
                T.copy(x[bm * HC_ROWS, split * part + i * step], left)
                T.copy(w[0, split * part + i * step], right)
                T.gemm(left, right, sums, transpose_B=True)
                for r, c in T.Parallel(HC_ROWS, step):
                    value = T.cast(left[r, c], "float32")
                    square[r, c] = square[r, c] + value * value
            T.reduce_sum(square, total, dim=1)
            T.copy(sums, terms)
            for r, c in T.Parallel(HC_ROWS, coefficients):
                if bm * HC_ROWS + r < rows:
                    parts[split, bm * HC_ROWS + r, c] = (
                        terms[r, 2 * coefficients + c] + terms[r, coefficients + c]
                    ) + terms[r, c]
            for r in T.Parallel(HC_ROWS):
                if bm * HC_ROWS + r < rows:
                    squares[split, bm * HC_ROWS + r] = total[r]

    return kernel


def _tiles(num_rows, n):
    """Tile sizes for a number of rows; results do not depend on the choice."""
    if num_rows <= FEW_ROWS:
        return (64, min(32, n), 4) if n <= 1024 else (64, min(128, n), 4)
    return (128, 256, 3) if n >= 4096 else (128, min(128, n), 4)


def _product(x: Tensor, weight: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    num_rows, n, k = x.shape[0], weight.shape[0] // groups, weight.shape[1]
    out = torch.empty(num_rows, groups * n, dtype=dtype, device=x.device)
    if num_rows:
        name = "float32" if dtype == torch.float32 else "bfloat16"
        compiled(gemm, n, k, groups, name, *_tiles(num_rows, n))(x, weight, out)
    return out


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight, 1, torch.float32)


def quantised_gemm(x: Tensor, weight: QuantisedWeight, groups: int = 1) -> Tensor:
    rows, values = x.shape[0], weight.values
    if values is None or (rows <= FEW_ROWS and groups == 1):
        return weight_gemm.dense_product(x, weight, groups)
    if rows > FEW_ROWS and dense_gemm.can_multiply(values, groups):
        return dense_gemm.dense_product(x, values, groups)
    return _product(x, values, groups, torch.bfloat16)


def hc_coefficients(streams, projection, base, scale, *, norm_eps, iterations, eps):
    num_rows, n, width = streams.shape
    coefficients = (2 + n) * n
    parts = torch.empty(HC_SPLITS, num_rows, coefficients, device=streams.device)
    squares = torch.empty(HC_SPLITS, num_rows, device=streams.device)
    if num_rows:
        run = compiled(hc_project, n * width, coefficients)
        run(streams.reshape(num_rows, n * width), projection.terms, parts, squares)
    return hc_finish(parts, squares, base, scale, width=n * width, norm_eps=norm_eps, n=n,
                     iterations=iterations, eps=eps)  # fmt: skip


SAMPLES = (
    Sample(gemm, (32768, 1280, 1, "bfloat16", 128, 256, 3)),
    Sample(gemm, (1280, 5120, 1, "bfloat16", 128, 128, 4)),
    Sample(gemm, (1024, 4096, 8, "bfloat16", 128, 128, 4)),
    Sample(gemm, (384, 5120, 1, "float32", 64, 32, 4)),
    Sample(gemm, (129280, 5120, 1, "float32", 64, 128, 4)),
    Sample(gemm, (16, 128, 1, "float32", 128, 16, 4)),
    Sample(gemm, (32, 256, 2, "bfloat16", 128, 32, 4)),
    Sample(hc_project, (20480, 24)),
    Sample(hc_project, (512, 24)),
)
