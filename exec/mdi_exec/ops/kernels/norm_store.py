"""Normalise, rotate, round and store a product's rows in one pass: a block a row.

Every step is that of the kernels that do it alone, with their roundings. Read next: `norm.py`,
`rope.py`, `row_pool.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import CHUNK, require_multiple, row_chunks, row_threads
from mdi_exec.ops.kernels.norm import DTYPE_NAMES, norm_of_sum, scale_chunk
from mdi_exec.ops.kernels.quantise import FP4, FP4_E4M3, FP8, code_bytes, encode, group_of
from mdi_exec.ops.kernels.rope import rotate_chunk
from mdi_exec.ops.kernels.row_pool import form_of
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.row_pool import RowPool


def norm_store_rows(form, width, rotated, parts, eps, weight_dtype):
    """product [parts, rows, width] to code and scale bytes of pool rows `index`, and normed rows.

    The last `rotated` of a row's values are rotated; cos and sin float32 [rows, rotated/2].
    """
    require_multiple(width, group_of(form))
    require_multiple(rotated, CHUNK)
    rows, pool_rows = T.dynamic("rows"), T.dynamic("pool_rows")
    group, size, per_row = group_of(form), code_bytes(form), width // CHUNK
    lanes, threads, chunks = group // CHUNK, row_threads(width), row_chunks(width)

    @T.prim_func
    def norm_store_kernel(
        product: T.Tensor((parts, rows, width), "float32"),
        weight: T.Tensor((width,), weight_dtype),
        cos: T.Tensor((rows, rotated // 2), "float32"),
        sin: T.Tensor((rows, rotated // 2), "float32"),
        index: T.Tensor((rows,), "int64"),
        codes: T.Tensor((pool_rows, per_row * size), "uint8"),
        scales: T.Tensor((pool_rows, width // group), "uint8"),
        out: T.Tensor((rows, width), "bfloat16"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            thread = T.get_thread_binding()
            raw = T.alloc_local((chunks * CHUNK,), "bfloat16")
            normed = T.alloc_local((CHUNK,), "bfloat16")
            values = T.alloc_local((CHUNK,), "float32")
            stored, scale_byte = T.alloc_local((size,), "uint8"), T.alloc_local((1,), "uint8")
            rstd, target = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int64")
            target[0] = index[row]
            norm_of_sum(product, row, eps, raw, rstd)
            for c in T.unroll(chunks):
                column = (c * threads + thread) * CHUNK
                T.clear(normed)
                if column < width:
                    scale_chunk(raw, c * CHUNK, weight, column, rstd[0], normed)
                    for i in T.vectorized(CHUNK):
                        out[row, column + i] = normed[i]
                    if column >= width - rotated:
                        rotate_chunk(cos, sin, row, (column - width + rotated) // 2, normed)
                for i in T.vectorized(CHUNK):
                    values[i] = T.cast(normed[i], "float32")
                encode(form, values, stored, scale_byte)  # all threads: lanes exchange maxima
                if column < width and target[0] >= T.int64(0):
                    for i in T.vectorized(size):
                        codes[target[0], column // CHUNK * size + i] = stored[i]
                    if column // CHUNK % lanes == 0:
                        scales[target[0], column // CHUNK // lanes] = scale_byte[0]

    return norm_store_kernel


def norm_store(
    product: Partial, weight: Tensor, eps: float, rotation: Rotation, pool: RowPool, index: Tensor
) -> Tensor:
    """Launch `norm_store_rows`; see `ops.norm_store`."""
    parts, rows, width = product.parts.shape
    normed = torch.empty(rows, width, dtype=product.dtype, device=product.parts.device)
    if rows:
        kernel = compiled(norm_store_rows, form_of(pool), width, 2 * rotation.cos.shape[-1], parts,
                          eps, DTYPE_NAMES[weight.dtype])  # fmt: skip
        kernel(product.parts, weight, rotation.cos, rotation.sin, index, pool.codes, pool.scales,
               normed)  # fmt: skip
    return normed


_EPS = 1e-20
SAMPLES = tuple(
    Sample(norm_store_rows, (form, width, rotated, parts, _EPS, "bfloat16"))
    for form, width, rotated, parts in (
        (FP8, 512, 64, 8), (FP4_E4M3, 512, 64, 8), (FP4, 128, 64, 1), (FP8, 64, 16, 1),
        (FP4_E4M3, 64, 16, 1), (FP4, 32, 16, 1),
    )
)  # fmt: skip
