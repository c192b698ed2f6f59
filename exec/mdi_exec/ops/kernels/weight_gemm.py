"""Products of bfloat16 rows with FP4 or FP8 weights, decoded on the way to the tensor cores.

The weight stands on the left (out^T = W x^T): its rows fill the tensor core's 64-row side whatever
the number of tokens, and its decoded values go from registers straight into the product, so that a
weight crosses shared memory once, as codes. Rows of x are grouped by expert and cut into tiles;
`tile_expert` says whose weight a tile needs, and -1 marks an unused tile. A dense weight is the
case of one expert. Sums run over K in ascending order in one accumulator: a row's result does not
depend on its tile.
"""

from functools import cache

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.kernels.decode_source import DECODE_SOURCE
from mdi_exec.ops.kernels.jit import Sample, compiled, has_known_registers
from mdi_exec.ops.packing import block_of
from mdi_exec.ops.quantise import GROUP
from mdi_exec.ops.routing import RowGroups

LARGEST_WIDE_TILE = 96  # beyond, wide blocks outgrow shared memory
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
        bias = 120
    else:
        word = T.shift_right(words[i, column * groups + group], low * 16)
        sign = T.if_then_else(pair == 3, 14, 15 - 3 * pair)
        top = T.if_then_else(pair == 3, 13, 8 - 3 * pair)
        rest = T.if_then_else(pair == 3, 10, 6 - 3 * pair)
        mantissa = T.bitwise_and(T.shift_right(word, rest), 3)
        exponent = T.bitwise_and(T.shift_right(word, top), 1)
        bits = T.shift_left(T.bitwise_and(T.shift_right(word, sign), 1), 31)
        bits = bits | T.shift_left(exponent, 24) | T.shift_left(mantissa, 22)
        bias = 126
    row = i // GROUP if is_fp8 else i
    scale = T.shift_left(T.cast(scales[row, step * groups + group], "int32") + bias, 23)
    return T.cast(T.reinterpret(bits, "float32") * T.reinterpret(scale, "float32"), "bfloat16")


def weight_gemm(
    n, k, experts, is_fp8, dtype, tile, block, rows_per_cta, stages, warpgroups, in_registers
):
    """out [rows, n] = x [rows, k] times the tile's expert's weight [n, k]^T.

    words int32 [experts, n, k/8 (FP4) or k/4 (FP8)], scales E8M0 bytes [experts, n or n/32, k/32].
    """
    rows, tiles = T.dynamic("rows"), T.dynamic("tiles")
    words_per_block = block // (4 if is_fp8 else 8)
    scale_rows = -(-n // GROUP) if is_fp8 else n
    cta_scale_rows = rows_per_cta // GROUP if is_fp8 else rows_per_cta
    groups = k // GROUP
    function = (
        f"mdi::decode<{'true' if is_fp8 else 'false'}, {rows_per_cta}, {4 * warpgroups}, "
        f"{block // GROUP}, {groups}, {5 if is_fp8 else 0}>"
    )

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, k), "bfloat16"),
        words: T.Tensor((experts, n, k // (4 if is_fp8 else 8)), "int32"),
        scales: T.Tensor((experts, scale_rows, groups), "uint8"),
        tile_expert: T.Tensor((tiles,), "int32"),
        tile_start: T.Tensor((tiles,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
        out: T.Tensor((rows, n), dtype),
    ):
        with T.Kernel(T.ceildiv(n, rows_per_cta), tiles, threads=128 * warpgroups) as (bn, bt):
            weight = T.alloc_fragment((rows_per_cta, block), "bfloat16")
            codes = T.alloc_shared((rows_per_cta, words_per_block), "int32")
            tokens = T.alloc_shared((tile, block), "bfloat16")
            factors = T.alloc_shared((cta_scale_rows, groups), "uint8")
            sums = T.alloc_fragment((rows_per_cta, tile), "float32")
            turned = T.alloc_shared((tile, rows_per_cta), dtype)
            if in_registers:
                T.import_source(DECODE_SOURCE)
            if tile_expert[bt] >= 0:
                T.copy(scales[tile_expert[bt], bn * cta_scale_rows, 0], factors)
                T.clear(sums)
                for step in T.Pipelined(k // block, num_stages=stages):
                    T.copy(words[tile_expert[bt], bn * rows_per_cta, step * words_per_block], codes)
                    T.copy(x[tile_start[bt], step * block], tokens)
                    if in_registers:
                        T.call_extern(
                            "handle", function, T.address_of(codes[0, 0]),
                            T.address_of(factors[0, step * (block // GROUP)]), weight.data,
                            T.get_thread_binding(),
                        )  # fmt: skip
                    else:
                        for i, j in T.Parallel(rows_per_cta, block):
                            weight[i, j] = _decoded(codes, factors, i, j, step, block, is_fp8)
                    T.gemm(weight, tokens, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                end = T.alloc_var("int32", init=offsets[tile_expert[bt] + 1])
                start = T.alloc_var("int32", init=tile_start[bt])
                for i, j in T.Parallel(rows_per_cta, tile):
                    turned[j, i] = T.cast(sums[i, j], dtype)
                for j, i in T.Parallel(tile, rows_per_cta):
                    if start + j < end and bn * rows_per_cta + i < n:
                        out[start + j, bn * rows_per_cta + i] = turned[j, i]

    return kernel


def _run(x, codes, scales, is_fp8, tiles, tile, rows_per_cta, stages, warpgroups):
    """Multiply sorted rows x [R, K] by codes [E, n, words]; tiles are expert, start, offsets."""
    experts, n, k = codes.shape[0], codes.shape[1], x.shape[1]
    out = torch.empty(x.shape[0], n, dtype=torch.bfloat16, device=x.device)
    if x.shape[0]:
        run = compiled(
            weight_gemm, n, k, experts, is_fp8, "bfloat16", tile, block_of(k), rows_per_cta,
            stages, warpgroups, has_known_registers(),
        )  # fmt: skip
        run(x, codes, scales.view(torch.uint8).view(experts, -1, k // GROUP), *tiles, out)
    return out


def expert_gemm(x: Tensor, weights: QuantisedWeight, groups: RowGroups, tile: int) -> Tensor:
    tiles = (groups.tile_expert, groups.tile_start, groups.offsets)
    # A wide block multiplies more for every token it loads. Narrower ones are slower even where
    # few tokens make weights the only load (docs/performance.md).
    shape = (256, 3, 2) if tile <= LARGEST_WIDE_TILE else (128, 4, 2)
    return _run(x, weights.codes, weights.scales, weights.is_fp8, tiles, tile, *shape)


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
    out = _run(x, codes, weight.scales, weight.is_fp8,
               _even_tiles(rows, groups, tile, x.device), tile, 64, 4, 1)  # fmt: skip
    return torch.unflatten(out, 0, (groups, -1)).transpose(0, 1).flatten(1) if groups > 1 else out


SAMPLES = (
    Sample(weight_gemm, (4608, 5120, 384, False, "bfloat16", 80, 128, 256, 3, 2, True)),
    Sample(weight_gemm, (5120, 2304, 384, False, "bfloat16", 96, 128, 256, 3, 2, True)),
    Sample(weight_gemm, (4608, 5120, 384, False, "bfloat16", 16, 128, 256, 3, 2, True)),
    Sample(weight_gemm, (1280, 5120, 1, True, "bfloat16", 16, 128, 64, 4, 1, True)),
    Sample(weight_gemm, (4608, 5120, 384, False, "bfloat16", 80, 128, 256, 3, 2, False)),
    Sample(weight_gemm, (1280, 5120, 1, True, "bfloat16", 16, 128, 64, 4, 1, False)),
    Sample(weight_gemm, (128, 128, 16, False, "bfloat16", 16, 128, 128, 4, 2, True)),
    Sample(weight_gemm, (128, 64, 16, False, "bfloat16", 16, 64, 128, 4, 2, True)),
    Sample(weight_gemm, (64, 128, 1, True, "bfloat16", 16, 128, 64, 4, 1, True)),
)
