"""The experts' matrix products: rows sorted by expert, one weight per group of rows.

The reference walks the experts that have rows; the kernel runs all groups at once, and learns which
from the tiles that `group_rows` has cut.
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.folding import FoldedWeight
from mdi_exec.ops.gemm import QuantisedWeight, matmul_ref
from mdi_exec.ops.quantise import GROUP, Quantised, dequantise
from mdi_exec.ops.routing import RowGroups

ExpertWeights = QuantisedWeight | FoldedWeight

_TILES = (16, 32, 64, 80)
LARGEST_TILE = 96
_SPARE = 1.25  # most experts' rows should fit in one tile


def portable_tile_rows(num_rows: int, num_experts: int) -> int:
    mean = num_rows / num_experts
    return next((tile for tile in _TILES if _SPARE * mean <= tile), LARGEST_TILE)


def tile_rows(x: Quantised | Tensor, num_rows: int, num_experts: int) -> int:
    """Return how many rows a tile should have for R rows over E experts; a matter of speed only.

    x are the rows, or others like them: kernels may have tiles of their own.
    """
    deciding = x.codes if isinstance(x, Quantised) else x
    run = select(deciding, ref=portable_tile_rows, kernel="expert_gemm.tile_rows")
    return run(num_rows, num_experts)


def expert_gemm_ref(
    x: Quantised | Tensor, weights: ExpertWeights, groups: RowGroups, tile: int
) -> Tensor:
    values = dequantise(x) if isinstance(x, Quantised) else x
    is_rounded = isinstance(x, Quantised) or values.dtype == torch.bfloat16
    out = torch.empty(
        values.shape[0], weights.out_width, device=weights.codes.device,
        dtype=torch.bfloat16 if is_rounded else torch.float32,
    )  # fmt: skip
    start = 0
    for expert, count in enumerate(groups.counts.tolist()):
        if count:
            rows = slice(start, start + count)
            # Not kept in a variable: one expert's values at a time. Packed ones are padded.
            out[rows] = matmul_ref(
                values[rows], weights.expert(expert).dequantised()[:, : values.shape[1]], GROUP
            )
            start += count
    return out


def expert_gemm(
    x: Quantised | Tensor, weights: ExpertWeights, groups: RowGroups, tile: int
) -> Tensor:
    """Multiply each row by its expert's weight [N, K]^T.

    x has R rows of K inputs sorted by expert, weights are stacked [E, N, K], and `groups` says
    whose rows are whose, in tiles of `tile` rows. Returns [R, N], dtype as `quantised_gemm`. Folded
    weights take folded rows. The reference reads the experts' counts on the host.
    """
    if isinstance(x, Quantised) and isinstance(weights, FoldedWeight):
        kernel, dtypes = "expert_gemm.folded_gemm", (torch.float8_e4m3fn,)
        chosen = select(x.codes, ref=expert_gemm_ref, kernel=kernel, dtypes=dtypes)
        return chosen(x, weights, groups, tile)
    if isinstance(x, Quantised):
        return expert_gemm_ref(x, weights, groups, tile)
    run = select(x, ref=expert_gemm_ref, kernel="expert_gemm.expert_gemm")
    return run(x, weights, groups, tile)
