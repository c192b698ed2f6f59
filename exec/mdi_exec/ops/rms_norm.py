"""Root-mean-square normalisation with a learned weight; statistics and product in float32.

`rms_norm_round` also rounds the result for the quantised GEMM behind it (docs/model.md, "Number
formats").
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.quantise import Quantised, quantise_activation_ref


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.to(torch.float32)
    normed = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.to(torch.float32) * normed).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [..., d] over its last dimension; weight [d]. Returns x's dtype."""
    return select(x, ref=rms_norm_ref, kernel="norm.rms_norm")(x, weight, eps)


def rms_norm_round_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantised | Tensor]:
    normed = rms_norm_ref(x, weight, eps)
    return normed, quantise_activation_ref(normed)


def rms_norm_round(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantised | Tensor]:
    """Return `rms_norm` of x [..., d] and `quantise_activation` of that, d a multiple of 32.

    Of float32 x both are the unrounded norm.
    """
    return select(x, ref=rms_norm_round_ref, kernel="norm.rms_norm_round")(x, weight, eps)


def rms_norm_round_sum_ref(product: Partial, weight: Tensor, eps: float) -> Quantised | Tensor:
    return rms_norm_round_ref(product.rounded(), weight, eps)[1]


def rms_norm_round_sum(product: Partial, weight: Tensor, eps: float) -> Quantised | Tensor:
    """Return a product's [T, d] `rms_norm`, rounded as by `quantise_activation`."""
    kernel = "norm.rms_norm_round_sum"
    return select(product.like, ref=rms_norm_round_sum_ref, kernel=kernel)(product, weight, eps)
