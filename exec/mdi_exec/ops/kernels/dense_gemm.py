"""Dense bfloat16 products of many rows on sm_90a: memory, barriers and roles of `dense_source.py`.

Elsewhere, and for few rows, `gemm.py`'s program multiplies, to the same bits.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.dense_source import DENSE_SOURCE
from mdi_exec.ops.kernels.jit import (
    Sample,
    by_hand,
    compiled,
    has_known_registers,
    multiprocessors,
)

STAGES = 4
ROWS, STEP_BYTES = 128, 128  # of a tile; of 64 inputs
WARPGROUP = 128
WIDTHS = (64, 128, 192, 256)  # columns of a tile
STORE = 32  # columns that could be multiplied while a tile is stored, about
MULTIPROCESSORS = 132  # of an H100 or H200
# Numbers of the driver's interface for tensor copies: element types, and how copies are arranged.
BFLOAT16 = 9
NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_256_BYTES, FILL_WITH_ZEROS = 0, 3, 3, 0


@T.macro
def _copies(tensor, box_rows):
    """Descriptor of copies of 64 columns and `box_rows` rows."""
    rows, columns = tensor.shape
    return T.create_tma_descriptor(
        BFLOAT16, 2, tensor.data, columns, rows, 2, 2 * columns, 64, box_rows, 1, 1,
        NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_256_BYTES, FILL_WITH_ZEROS,
    )  # fmt: skip


@by_hand("bounds", "barriers")
def dense_gemm(n, k, groups, columns):
    """out[:, g] = x[:, g] w[g]^T; x [rows, groups * k], w [groups * n, k], out [rows, groups * n].

    n and k are multiples of 64; tiles have 128 rows and `columns` columns.
    """
    rows = T.dynamic("rows")
    made = f"mdi::Dense<{n}, {k}, {groups}, {columns}, {STAGES}>"

    @T.prim_func
    def program(
        x: T.Tensor((rows, groups * k), "bfloat16"),
        w: T.Tensor((groups * n, k), "bfloat16"),
        out: T.Tensor((rows, groups * n), "bfloat16"),
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=3 * WARPGROUP):
            T.import_source(DENSE_SOURCE)
            # All of them are copied swizzled, which asks for an alignment of 1,024 bytes.
            left = T.alloc_shared((STAGES * ROWS * STEP_BYTES,), "uint8")
            right = T.alloc_shared((STAGES * columns * STEP_BYTES,), "uint8")
            patches = T.alloc_shared((4 * 64 * STEP_BYTES,), "uint8")
            ready = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([8] * STAGES)
            thread = T.get_thread_binding()
            if thread < 2 * WARPGROUP:
                T.set_max_nreg(240, 1)
                T.call_extern(
                    "handle", made + "::work", _copies(out, 64), T.address_of(ready[0]),
                    T.address_of(free[0]), T.address_of(left[0]), T.address_of(right[0]),
                    T.address_of(patches[0]), rows,
                )  # fmt: skip
            else:
                T.set_max_nreg(24, 0)
                if thread == 2 * WARPGROUP:
                    T.call_extern(
                        "handle", made + "::load", _copies(x, ROWS), _copies(w, columns),
                        T.address_of(ready[0]), T.address_of(free[0]), T.address_of(left[0]),
                        T.address_of(right[0]), rows,
                    )  # fmt: skip

    return program


def can_multiply(weight: Tensor, groups: int) -> bool:
    """Say whether this program multiplies by `weight` [groups * N, K], on the current GPU."""
    n, k = weight.shape[0] // groups, weight.shape[1]
    return has_known_registers() and n % 64 == 0 and k % 64 == 0


def dense_product(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Multiply x [T, groups * K] by each group's rows of weight [groups * N, K]^T; bfloat16."""
    rows, n, k = x.shape[0], weight.shape[0] // groups, weight.shape[1]
    out = torch.empty(rows, groups * n, dtype=torch.bfloat16, device=x.device)
    if rows:
        columns = tile_columns(rows, n, groups)
        run = compiled(dense_gemm, n, k, groups, columns)
        run(x.contiguous(), weight, out,
            min(_tiles(rows, n, groups, columns), multiprocessors(x.device)))  # fmt: skip
    return out


def _tiles(rows: int, n: int, groups: int, columns: int) -> int:
    return -(-rows // ROWS) * -(-n // columns) * groups


def tile_columns(rows: int, n: int, groups: int) -> int:
    """Return the tile's width that keeps all multiprocessors busy for the shortest time.

    It is the same between numbers of rows 2^n and 3 * 2^n: there is no kernel for each number.
    Results do not depend on it.
    """
    power = 1 << (rows - 1).bit_length()
    rows = power * 3 // 4 if 4 * rows <= 3 * power else power

    def time(columns: int) -> int:
        turns = -(-_tiles(rows, n, groups, columns) // MULTIPROCESSORS)
        return turns * (columns + STORE)

    return min(reversed(WIDTHS), key=time)


SAMPLES = tuple(
    Sample(dense_gemm, sizes, ("sm_90a",))
    for sizes in (
        (32768, 1280, 1, 256),
        (1280, 5120, 1, 192),
        (1024, 4096, 8, 128),
        (64, 64, 2, 64),
    )
)
