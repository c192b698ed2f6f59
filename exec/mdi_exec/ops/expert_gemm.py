"""The experts' matrix products: rows sorted by expert, one weight per group of rows.

The reference walks the experts that have rows; a kernel would run all groups at once.
"""

import torch
from torch import Tensor

from mdi_exec.ops.gemm import QuantisedWeight, matmul_ref
from mdi_exec.ops.quantise import Quantised, dequantise


def expert_gemm_ref(x: Quantised | Tensor, weights: QuantisedWeight, row_counts: Tensor) -> Tensor:
    values = dequantise(x) if isinstance(x, Quantised) else x
    out = torch.empty(
        values.shape[0], weights.codes.shape[1], device=weights.codes.device,
        dtype=torch.bfloat16 if isinstance(x, Quantised) else torch.float32,
    )  # fmt: skip
    start = 0
    for expert, count in enumerate(row_counts.tolist()):
        if count:
            rows = slice(start, start + count)
            out[rows] = matmul_ref(values[rows], weights.expert(expert).dequantised())
            start += count
    return out


def expert_gemm(x: Quantised | Tensor, weights: QuantisedWeight, row_counts: Tensor) -> Tensor:
    """Multiply each row by its expert's weight [N, K]^T.

    x has R rows of K inputs sorted by expert, weights are stacked [E, N, K], row_counts [E] says
    how many rows each expert has (their sum is R). Returns [R, N], dtype as `quantised_gemm`. The
    reference reads row_counts on the host.
    """
    return expert_gemm_ref(x, weights, row_counts)
