"""Root-mean-square normalisation with a learned weight; statistics and product in float32."""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.to(torch.float32)
    normed = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.to(torch.float32) * normed).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [..., d] over its last dimension; weight [d]. Returns x's dtype."""
    return select(x, ref=rms_norm_ref)(x, weight, eps)
