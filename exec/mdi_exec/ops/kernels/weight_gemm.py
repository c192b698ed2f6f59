"""Products of bfloat16 rows with FP8 or FP4 weights, decoded on the way to the tensor cores.

The weight stands on the left (out^T = W x^T): its rows fill the tensor core's 64-row side whatever
the number of tokens, and its decoded values go from registers straight into the product, so that a
weight crosses shared memory once, as codes. Sums run over K in ascending order in one accumulator,
or of narrow weights in parts (`gemm.py`): a row's result does not depend on its tile.

Experts' rows are grouped by expert and cut into tiles; `tile_expert` says whose weight a tile
needs, and -1 marks an unused tile. On sm_90a they have a program of their own (`expert_gemm.py`).
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import QuantisedWeight, num_parts
from mdi_exec.ops.kernels.decode_source import DECODE_SOURCE
from mdi_exec.ops.kernels.jit import Sample, compiled, has_known_registers
from mdi_exec.ops.packing import FP4_BLOCK, block_of
from mdi_exec.ops.quantise import GROUP
from mdi_exec.ops.routing import RowGroups

STAGES = {16: 8, 32: 8, 64: 6, 128: 4}  # by rows of a tile: what fits beside a second block
FEW_ROWS = 64  # up to here a dense product reads codes; beyond, expanded weights pay


class Columns(NamedTuple):
    """Where results go: a layer, its group's first column, and columns `first` to `width` of it."""

    layer: Any
    group: Any
    first: Any
    width: int


def _decoded(words, scales, i, j, step, block, is_fp8):
    """Element (i, j) of a decoded tile, for targets whose register order is not known here."""
    groups = block // GROUP
    group, column, low = j // GROUP, j % 8 // 2, j % 2
    pair = j % GROUP // 16 * 2 + j % 16 // 8
    if is_fp8:
        word = words[i, (column * groups + group) * 2 + pair // 2]
        code = T.bitwise_and(T.shift_right(word, pair % 2 * 8 + low * 16), 0xFF)
        bits = T.shift_left(T.bitwise_and(code, 0x80), 24) | T.shift_left(code & 0x7F, 20)
        exponent = T.cast(scales[i // GROUP, step * groups + group], "int32") + 120
    else:
        word = T.shift_right(words[i, column * groups + group], low * 16)
        sign = T.if_then_else(pair < 2, 15 - 3 * pair, 16 - pair)  # 15, 12, 14, 13
        lowest = T.if_then_else(pair < 3, 6 - 3 * pair, 9)
        magnitude = T.bitwise_and(T.shift_right(word, lowest), 7)
        bits = T.shift_left(T.bitwise_and(T.shift_right(word, sign), 1), 31)
        bits = bits | T.shift_left(magnitude, 22)
        exponent = T.cast(scales[i, group], "int32") + 126
    scale = T.shift_left(exponent, 23)
    return T.cast(T.reinterpret(bits, "float32") * T.reinterpret(scale, "float32"), "bfloat16")


def weight_gemm(n, k, groups, parts, tile, rows_per_cta, stages, warpgroups, in_registers, dtype):
    """out[:, :, g] = x[:, g] times FP8 weight g [n, k]^T; x [rows, groups * k].

    words int32 [groups, n, k/4], scales E8M0 bytes [groups, n/32, k/32]. out [parts, rows,
    groups * n] is to be added up over the parts.
    """
    assert groups == 1 or parts == 1, "groups of outputs are wide"
    rows, block = T.dynamic("rows"), block_of(k)
    scale_rows, cta_scale_rows = -(-n // GROUP), rows_per_cta // GROUP
    steps, scale_groups, words_of_step = k // block // parts, k // GROUP, block // 4
    decode = f"mdi::decode<{rows_per_cta}, {4 * warpgroups}, {block // GROUP}, {scale_groups}>"
    grid = (T.ceildiv(n, rows_per_cta), T.ceildiv(rows, tile), groups * parts)

    @T.prim_func
    def fp8_gemm(
        x: T.Tensor((rows, groups * k), "bfloat16"),
        words: T.Tensor((groups, n, k // 4), "int32"),
        scales: T.Tensor((groups, scale_rows, scale_groups), "uint8"),
        out: T.Tensor((parts, rows, groups * n), dtype),
    ):
        with T.Kernel(*grid, threads=128 * warpgroups) as (bn, bt, z):
            weight = T.alloc_fragment((rows_per_cta, block), "bfloat16")
            codes = T.alloc_shared((rows_per_cta, words_of_step), "int32")
            tokens = T.alloc_shared((tile, block), "bfloat16")
            factors = T.alloc_shared((cta_scale_rows, scale_groups), "uint8")
            sums = T.alloc_fragment((rows_per_cta, tile), "float32")
            if in_registers:
                T.import_source(DECODE_SOURCE)
            group, first = z // parts, z % parts * steps
            T.copy(scales[group, bn * cta_scale_rows, 0], factors)
            T.clear(sums)
            for i in T.Pipelined(steps, num_stages=stages):
                T.copy(words[group, bn * rows_per_cta, (first + i) * words_of_step], codes)
                T.copy(x[bt * tile, group * k + (first + i) * block], tokens)
                if in_registers:
                    T.call_extern(
                        "handle", decode, T.address_of(codes[0, 0]),
                        T.address_of(factors[0, (first + i) * (block // GROUP)]), weight.data,
                        T.get_thread_binding(),
                    )  # fmt: skip
                else:
                    for r, c in T.Parallel(rows_per_cta, block):
                        weight[r, c] = _decoded(codes, factors, r, c, first + i, block, True)
                T.gemm(weight, tokens, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            columns = Columns(z % parts, group * n, bn * rows_per_cta, n)
            _write(sums, out, columns, bt * tile, rows)

    return fp8_gemm


def portable_expert_program(n, k, experts, tile, rows_per_cta, stages, warpgroups):
    """The same of packed FP4 weights, by a loop that any architecture compiles."""
    rows, tiles, blocks = T.dynamic("rows"), T.dynamic("tiles"), -(-k // FP4_BLOCK)

    @T.prim_func
    def portable_expert_gemm(
        x: T.Tensor((rows, k), "bfloat16"),
        words: T.Tensor((experts, blocks, n, FP4_BLOCK // 8), "int32"),
        scales: T.Tensor((experts, blocks, n, FP4_BLOCK // GROUP), "uint8"),
        tile_expert: T.Tensor((tiles,), "int32"),
        tile_start: T.Tensor((tiles,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
        out: T.Tensor((1, rows, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, rows_per_cta), tiles, threads=128 * warpgroups) as (bn, bt):
            weight = T.alloc_fragment((rows_per_cta, FP4_BLOCK), "bfloat16")
            codes = T.alloc_shared((rows_per_cta, FP4_BLOCK // 8), "int32")
            tokens = T.alloc_shared((tile, FP4_BLOCK), "bfloat16")
            factors = T.alloc_shared((rows_per_cta, FP4_BLOCK // GROUP), "uint8")
            sums = T.alloc_fragment((rows_per_cta, tile), "float32")
            if tile_expert[bt] >= 0:
                T.clear(sums)
                for step in T.Pipelined(blocks, num_stages=stages):
                    T.copy(words[tile_expert[bt], step, bn * rows_per_cta, 0], codes)
                    T.copy(scales[tile_expert[bt], step, bn * rows_per_cta, 0], factors)
                    T.copy(x[tile_start[bt], step * FP4_BLOCK], tokens)
                    for i, j in T.Parallel(rows_per_cta, FP4_BLOCK):
                        weight[i, j] = _decoded(codes, factors, i, j, step, FP4_BLOCK, False)
                    T.gemm(weight, tokens, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                columns = Columns(0, 0, bn * rows_per_cta, n)
                _write(sums, out, columns, tile_start[bt], offsets[tile_expert[bt] + 1])

    return portable_expert_gemm


@T.macro
def _write(sums, out, columns, first, after):
    """Write a tile's sums, turned, for tokens from `first` up to before `after`."""
    rows_per_cta, tile = sums.shape
    turned = T.alloc_shared((tile, rows_per_cta), out.dtype)
    end, start = T.alloc_var("int32", init=after), T.alloc_var("int32", init=first)
    for i, j in T.Parallel(rows_per_cta, tile):
        turned[j, i] = T.cast(sums[i, j], out.dtype)
    for j, i in T.Parallel(tile, rows_per_cta):
        if start + j < end and columns.first + i < columns.width:
            out[columns.layer, start + j, columns.group + columns.first + i] = turned[j, i]


def portable_expert_gemm(
    x: Tensor, weights: QuantisedWeight, groups: RowGroups, tile: int
) -> Tensor:
    """Multiply sorted rows by their experts' packed FP4 weights; see `ops.expert_gemm`."""
    (rows, k), n, experts = x.shape, weights.out_width, weights.codes.shape[0]
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    if rows:
        # 64 rows for each warpgroup: with more, the compiler orders the decoded rows in another way
        # than the product's.
        run = compiled(portable_expert_program, n, k, experts, tile, 128, 4, 2)
        run(x, weights.codes, weights.scales.view(torch.uint8), groups.tile_expert,
            groups.tile_start, groups.offsets, out.unsqueeze(0))  # fmt: skip
    return out


def dense_product(x: Tensor, weight: QuantisedWeight, groups: int, dtype: torch.dtype) -> Tensor:
    """x [T, groups * K] times each group's rows of a packed weight [groups * N, K]^T.

    Returns layers [S, T, groups * N], S the parts in which the product is summed.
    """
    rows, n, k = x.shape[0], weight.out_width // groups, x.shape[1] // groups
    parts = num_parts(weight.out_width, k)
    out = torch.empty(parts, rows, weight.out_width, dtype=dtype, device=x.device)
    if rows:
        tile = next((t for t in (16, 32, 64) if rows <= t), 128)
        shape = (n, k, groups, parts, tile, 64, STAGES[tile], 1, has_known_registers())
        run = compiled(weight_gemm, *shape, "float32" if dtype == torch.float32 else "bfloat16")
        scales = weight.scales.view(torch.uint8).view(groups, -1, k // GROUP)
        run(x, weight.codes.view(groups, n, -1), scales, out)
    return out


SAMPLES = (
    Sample(weight_gemm, (1280, 5120, 1, 8, 16, 64, 8, 1, True, "float32")),
    Sample(weight_gemm, (1280, 5120, 1, 8, 16, 64, 8, 1, False, "float32")),
    Sample(weight_gemm, (1024, 4096, 8, 1, 32, 64, 8, 1, True, "bfloat16")),
    Sample(weight_gemm, (64, 128, 1, 1, 128, 64, 4, 1, True, "bfloat16")),
    Sample(portable_expert_program, (4608, 5120, 384, 80, 128, 4, 2)),
    Sample(portable_expert_program, (128, 64, 16, 16, 128, 4, 2)),
)
