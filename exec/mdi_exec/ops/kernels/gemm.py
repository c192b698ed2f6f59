"""Dense products of bfloat16 rows and weights, float32 accumulation, any number of rows.

Every result is summed over K in ascending steps of 16 in one accumulator, or in `num_parts`
accumulators that are added in order, in every tile size and in `weight_gemm.py` and `dense_gemm.py`
alike (the latter has wide products only): a row's result does not depend on how many rows there
are. With few rows every part is a block's of its own, and whoever reads the product adds them up
(`ops.gemm.Partial`). `hc_project` keeps float32 weights exact by splitting each into three bfloat16
numbers.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import WIDE, Partial, QuantisedWeight, num_parts
from mdi_exec.ops.hyper_connections import hc_finish, term_rows
from mdi_exec.ops.kernels import dense_gemm, weight_gemm
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import FLAT_THREADS
from mdi_exec.ops.kernels.weight_gemm import FEW_ROWS

HC_SPLITS = 16  # parts a hyper-connection's projection is summed in, whatever the number of rows
HC_ROWS = 128


def _step_of(k):
    return next(step for step in (64, 32) if k % step == 0)


def gemm(n, k, groups, dtype, tile_m, tile_n, stages, parts, is_split):
    """out[:, :, g] = x[:, g] w[g]^T; x [rows, groups * k], w [groups * n, k].

    out has a layer for each of `parts` if `is_split`, else one, which is their sum.
    """
    rows, step = T.dynamic("rows"), _step_of(k // parts)
    layers, steps = (parts, k // parts // step) if is_split else (1, k // step)
    assert groups == 1 or parts == 1, "groups of outputs are wide"
    grid = (T.ceildiv(n, tile_n), T.ceildiv(rows, tile_m), groups * layers)
    threads = 256 if tile_m > 64 else 128

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, groups * k), "bfloat16"),
        w: T.Tensor((groups * n, k), "bfloat16"),
        out: T.Tensor((layers, rows, groups * n), dtype),
    ):
        with T.Kernel(*grid, threads=threads) as (bn, bm, z):
            left = T.alloc_shared((tile_m, step), "bfloat16")
            right = T.alloc_shared((tile_n, step), "bfloat16")
            sums = T.alloc_fragment((tile_m, tile_n), "float32")
            T.use_swizzle(8)
            T.clear(sums)
            if parts > layers:
                total = T.alloc_fragment((tile_m, tile_n), "float32")
                T.clear(total)
            for i in T.Pipelined(steps, num_stages=stages):
                if is_split:
                    T.copy(x[bm * tile_m, (z * steps + i) * step], left)
                    T.copy(w[bn * tile_n, (z * steps + i) * step], right)
                else:
                    T.copy(x[bm * tile_m, z * k + i * step], left)
                    T.copy(w[z * n + bn * tile_n, i * step], right)
                T.gemm(left, right, sums, transpose_B=True)
                if parts > layers:  # noqa: SIM102 (the first is known here, the second there)
                    if (i + 1) % (steps // parts) == 0:
                        for r, c in T.Parallel(tile_m, tile_n):
                            total[r, c] = total[r, c] + sums[r, c]
                        T.clear(sums)
            if parts > layers:
                _write(total, out, bm, bn, 0, 0)
            else:
                _write(sums, out, bm, bn, z if is_split else 0, 0 if is_split else z * n)

    return kernel


@T.macro
def _write(sums, out, bm, bn, layer, column):
    """Write a tile's sums to a layer, into a group's columns from `column` on."""
    tile_m, tile_n = sums.shape
    for i, j in T.Parallel(tile_m, tile_n):
        if bm * tile_m + i < out.shape[1] and bn * tile_n + j < out.shape[2] - column:
            out[layer, bm * tile_m + i, column + bn * tile_n + j] = T.cast(sums[i, j], out.dtype)


def add_parts_program(parts, factor):
    """out = the sum of `parts`, rounded, times `factor`, rounded again."""
    size = T.dynamic("size")

    @T.prim_func
    def add_parts_kernel(
        product: T.Tensor((parts, size), "float32"), out: T.Tensor((size,), "bfloat16")
    ):
        with T.Kernel(T.ceildiv(size, FLAT_THREADS), threads=FLAT_THREADS) as block:
            at = block * FLAT_THREADS + T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            if at < size:
                total[0] = product[0, at]
                for part in T.unroll(1, parts):
                    total[0] = total[0] + product[part, at]
                total[0] = T.cast(T.cast(total[0], "bfloat16"), "float32") * T.float32(factor)
                out[at] = T.cast(total[0], "bfloat16")

    return add_parts_kernel


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
        return (64, min(32, n), 8) if n < WIDE else (64, min(128, n), 4)
    return (128, 256, 3) if n >= WIDE else (128, min(128, n), 4)


def _product(x: Tensor, weight: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return layers [S, T, groups * N]: one, or for few rows as many as there are parts."""
    num_rows, n, k = x.shape[0], weight.shape[0] // groups, weight.shape[1]
    parts = num_parts(weight.shape[0], k)
    is_split = parts > 1 and num_rows <= FEW_ROWS
    out = torch.empty(parts if is_split else 1, num_rows, groups * n, dtype=dtype, device=x.device)
    if num_rows:
        name = "float32" if dtype == torch.float32 else "bfloat16"
        compiled(gemm, n, k, groups, name, *_tiles(num_rows, n), parts, is_split)(x, weight, out)
    return out


def _from_codes(x: Tensor, weight: QuantisedWeight) -> bool:
    """Say whether to multiply by codes rather than by their values, where both are at hand."""
    return weight.values is None or x.shape[0] <= FEW_ROWS


def partial_matmul(x: Tensor, weight: Tensor) -> Partial:
    return Partial(_product(x, weight, 1, torch.float32), torch.bfloat16)


def partial_gemm(x: Tensor, weight: QuantisedWeight) -> Partial:
    if _from_codes(x, weight):
        return Partial(weight_gemm.dense_product(x, weight, 1, torch.float32), torch.bfloat16)
    assert weight.values is not None
    return Partial(_product(x, weight.values, 1, torch.float32), torch.bfloat16)


def add_parts(product: Partial, factor: float = 1.0) -> Tensor:
    parts, *shape = product.parts.shape
    out = torch.empty(*shape, dtype=torch.bfloat16, device=product.parts.device)
    if out.numel():
        compiled(add_parts_program, parts, factor)(product.parts.view(parts, -1), out.view(-1))
    return out


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return partial_matmul(x, weight).total()


def quantised_gemm(x: Tensor, weight: QuantisedWeight, groups: int = 1) -> Tensor:
    if num_parts(weight.out_width, x.shape[1] // groups) > 1:
        return add_parts(partial_gemm(x, weight))
    if _from_codes(x, weight):
        return weight_gemm.dense_product(x, weight, groups, torch.bfloat16)[0]
    assert weight.values is not None
    if dense_gemm.can_multiply(weight.values, groups):
        return dense_gemm.dense_product(x, weight.values, groups)
    return _product(x, weight.values, groups, torch.bfloat16)[0]


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
    Sample(gemm, (32768, 1280, 1, "bfloat16", 128, 256, 3, 1, False)),
    Sample(gemm, (1280, 5120, 1, "float32", 128, 128, 4, 8, False)),
    Sample(gemm, (1024, 4096, 8, "bfloat16", 128, 128, 4, 1, False)),
    Sample(gemm, (384, 5120, 1, "float32", 64, 32, 8, 8, True)),
    Sample(gemm, (129280, 5120, 1, "float32", 64, 128, 4, 1, False)),
    Sample(gemm, (16, 128, 1, "float32", 128, 16, 4, 1, False)),
    Sample(gemm, (32, 256, 2, "bfloat16", 128, 32, 4, 1, False)),
    Sample(add_parts_program, (8, 0.5)),
    Sample(hc_project, (20480, 24)),
    Sample(hc_project, (512, 24)),
)
