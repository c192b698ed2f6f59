"""The experts' activation, fused with the rounding of its result.

The gate branch is clamped above only, the linear branch on both sides, and the routing weight
multiplies before the rounding, so it changes the codes (docs/model.md, 5).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.elementwise import everywhere
from mdi_exec.ops.quantise import Quantised, quantise_activation_ref


class RowWeights(NamedTuple):
    """Row r's weight is values[order[r]]: float32 [N] and int32 [R]."""

    values: Tensor
    order: Tensor


def swiglu_quantise_ref(
    gate: Tensor, up: Tensor, limit: float, row_weights: RowWeights | None
) -> Quantised | Tensor:
    a = gate.to(torch.float32).clamp(max=limit)
    b = up.to(torch.float32).clamp(-limit, limit)
    hidden = everywhere(torch.nn.functional.silu, a) * b
    if row_weights is not None:
        hidden = row_weights.values[row_weights.order].unsqueeze(-1) * hidden
    return quantise_activation_ref(hidden.to(gate.dtype))


def swiglu_quantise(
    gate: Tensor, up: Tensor, limit: float, row_weights: RowWeights | None = None
) -> Quantised | Tensor:
    """Compute row_weight * silu(min(gate, limit)) * clamp(up, ±limit), ready for the next GEMM.

    gate and up [R, I] in the activation dtype, row_weights None for 1. They may be the halves of
    one [R, 2I] tensor, which a kernel reads where it lies. Returns FP8 codes and scales (a kernel:
    their bfloat16 values [R, I]), or float32 [R, I] for float32 inputs.
    """
    run = select(gate, ref=swiglu_quantise_ref, kernel="swiglu.swiglu_quantise")
    return run(gate, up, limit, row_weights)
