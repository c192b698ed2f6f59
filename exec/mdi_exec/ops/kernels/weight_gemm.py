"""Products of bfloat16 rows with FP8 or FP4 weights, decoded on the way to the tensor cores.

The weight stands on the left (out^T = W x^T): its rows fill the tensor core's 64-row side whatever
the number of tokens, and its decoded values go from registers straight into the product, so that a
weight crosses shared memory once, as codes. Rows of x are grouped by expert and cut into tiles;
`tile_expert` says whose weight a tile needs, and -1 marks an unused tile. A dense weight is the
case of one expert. Sums run over K in ascending order in one accumulator: a row's result does not
depend on its tile. On sm_90a experts have a program of their own (`expert_gemm.py`).
"""

from functools import cache

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.kernels.decode_source import DECODE_SOURCE
from mdi_exec.ops.kernels.jit import Sample, compiled, has_known_registers
from mdi_exec.ops.packing import FP4_BLOCK, block_of
from mdi_exec.ops.quantise import GROUP
from mdi_exec.ops.routing import RowGroups

FEW_ROWS = 64  # up to here a dense product reads codes; beyond, expanded weights pay


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


def weight_gemm(n, k, experts, tile, block, rows_per_cta, stages, warpgroups, in_registers):
    """out [rows, n] = x [rows, k] times the tile's expert's FP8 weight [n, k]^T.

    words int32 [experts, n, k/4], scales E8M0 bytes [experts, n/32, k/32].
    """
    rows, tiles = T.dynamic("rows"), T.dynamic("tiles")
    scale_rows, cta_scale_rows, groups = -(-n // GROUP), rows_per_cta // GROUP, k // GROUP
    function = f"mdi::decode<{rows_per_cta}, {4 * warpgroups}, {block // GROUP}, {groups}>"

    @T.prim_func
    def fp8_gemm(
        x: T.Tensor((rows, k), "bfloat16"),
        words: T.Tensor((experts, n, k // 4), "int32"),
        scales: T.Tensor((experts, scale_rows, groups), "uint8"),
        tile_expert: T.Tensor((tiles,), "int32"),
        tile_start: T.Tensor((tiles,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
        out: T.Tensor((rows, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, rows_per_cta), tiles, threads=128 * warpgroups) as (bn, bt):
            weight = T.alloc_fragment((rows_per_cta, block), "bfloat16")
            codes = T.alloc_shared((rows_per_cta, block // 4), "int32")
            tokens = T.alloc_shared((tile, block), "bfloat16")
            factors = T.alloc_shared((cta_scale_rows, groups), "uint8")
            sums = T.alloc_fragment((rows_per_cta, tile), "float32")
            if in_registers:
                T.import_source(DECODE_SOURCE)
            if tile_expert[bt] >= 0:
                T.copy(scales[tile_expert[bt], bn * cta_scale_rows, 0], factors)
                T.clear(sums)
                for step in T.Pipelined(k // block, num_stages=stages):
                    T.copy(words[tile_expert[bt], bn * rows_per_cta, step * (block // 4)], codes)
                    T.copy(x[tile_start[bt], step * block], tokens)
                    if in_registers:
                        T.call_extern(
                            "handle", function, T.address_of(codes[0, 0]),
                            T.address_of(factors[0, step * (block // GROUP)]), weight.data,
                            T.get_thread_binding(),
                        )  # fmt: skip
                    else:
                        for i, j in T.Parallel(rows_per_cta, block):
                            weight[i, j] = _decoded(codes, factors, i, j, step, block, True)
                    T.gemm(weight, tokens, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                _write(sums, out, bn * rows_per_cta, tile_start[bt], offsets[tile_expert[bt] + 1])

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
        out: T.Tensor((rows, n), "bfloat16"),
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
                _write(sums, out, bn * rows_per_cta, tile_start[bt], offsets[tile_expert[bt] + 1])

    return portable_expert_gemm


@T.macro
def _write(sums, out, column, first, after):
    """Write a tile's sums, turned, for tokens from `first` up to the expert's last."""
    rows_per_cta, tile = sums.shape
    turned = T.alloc_shared((tile, rows_per_cta), "bfloat16")
    end, start = T.alloc_var("int32", init=after), T.alloc_var("int32", init=first)
    for i, j in T.Parallel(rows_per_cta, tile):
        turned[j, i] = T.cast(sums[i, j], "bfloat16")
    for j, i in T.Parallel(tile, rows_per_cta):
        if start + j < end and column + i < out.shape[1]:
            out[start + j, column + i] = turned[j, i]


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
            groups.tile_start, groups.offsets, out)  # fmt: skip
    return out


@cache
def _even_tiles(num_rows: int, groups: int, tile: int, device: torch.device) -> tuple[Tensor, ...]:
    """Tiles of `groups` experts of `num_rows` rows each; made once for each number of rows."""
    experts = torch.arange(groups, dtype=torch.int32, device=device)
    starts = torch.arange(0, num_rows, tile, dtype=torch.int32, device=device)
    offsets = torch.arange(groups + 1, dtype=torch.int32, device=device) * num_rows
    tile_expert = experts.repeat_interleave(len(starts))
    return tile_expert, (offsets[:-1].unsqueeze(1) + starts).flatten(), offsets


def dense_product(x: Tensor, weight: QuantisedWeight, groups: int) -> Tensor:
    """x [T, groups * K] times each group's rows of a packed weight [groups * N, K]^T."""
    rows = x.shape[0]
    tile = next((t for t in (16, 32, 64) if rows <= t), 128)
    codes = torch.unflatten(weight.codes, 0, (groups, -1))
    if groups > 1:  # groups are experts that all have every row
        x = torch.unflatten(x, 1, (groups, -1)).transpose(0, 1).flatten(0, 1)
    n, k = codes.shape[1], x.shape[1]
    out = torch.empty(x.shape[0], n, dtype=torch.bfloat16, device=x.device)
    if rows:
        scales = weight.scales.view(torch.uint8).view(groups, -1, k // GROUP)
        tiles = _even_tiles(rows, groups, tile, x.device)
        shape = (n, k, groups, tile, block_of(k), 64, 4, 1)
        compiled(weight_gemm, *shape, has_known_registers())(x, codes, scales, *tiles, out)
    return torch.unflatten(out, 0, (groups, -1)).transpose(0, 1).flatten(1) if groups > 1 else out


SAMPLES = (
    Sample(weight_gemm, (1280, 5120, 1, 16, 128, 64, 4, 1, True)),
    Sample(weight_gemm, (1280, 5120, 1, 16, 128, 64, 4, 1, False)),
    Sample(weight_gemm, (64, 128, 1, 16, 128, 64, 4, 1, True)),
    Sample(portable_expert_program, (4608, 5120, 384, 80, 128, 4, 2)),
    Sample(portable_expert_program, (128, 64, 16, 16, 128, 4, 2)),
)
