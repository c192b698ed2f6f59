"""Folded FP8: one power-of-two scale a row, and the groups' own scales inside the codes.

Activations are E4M3 with a scale for each 32 values, weights E2M1 likewise, and Hopper's tensor
cores know no scales. Folding makes operands of plain E4M3 codes: a group whose scale is 2^s below
the row's gets codes 2^s smaller. E4M3 has room for that: weights stay exact, and of activations
only the smallest values of groups far below their row's largest lose bits. Products then run at
twice bfloat16's rate, faithful to bfloat16's own rounding (docs/performance.md).

A row's scale depends on the row alone. The reference multiplies what folding left, as elsewhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.packing import pack_folded, pack_scales, unpack_folded, unpack_scales
from mdi_exec.ops.quantise import (
    ACTIVATION_FLOOR,
    E4M3_MAX,
    GROUP,
    Quantised,
    dequantise,
    power_of_two_ceil,
    unpack_e2m1,
)
from mdi_shared.errors import ConfigError

LARGEST_LIFT = 11  # 6 * 2^6 and 0.5 * 2^-5 are E4M3's ends for E2M1 values without subnormals
_TOP = 6  # a row's largest group scale is 2^6 of the folded scale
FAR_OCTAVES = 10  # a group further below its row's largest value is counted


@dataclass(frozen=True, slots=True)
class FoldedWeight:
    """An FP4 weight [E, N, K], or of one expert [N, K], with one scale a row.

    codes as those of a `QuantisedWeight`, or packed. lifts uint8 [..., N, K/32]: a group's scale is
    2^(lift - 5) of its row's; packed like codes. scales E8M0 [..., N].
    """

    codes: Tensor
    lifts: Tensor
    scales: Tensor

    @property
    def is_packed(self) -> bool:
        return self.codes.dtype == torch.int32

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.codes, self.lifts, self.scales

    @property
    def out_width(self) -> int:
        return self.scales.shape[-1]

    def packed(self) -> "FoldedWeight":
        """Return the weight in the order kernels read."""
        return FoldedWeight(pack_folded(self.codes), pack_scales(self.lifts), self.scales)

    def expert(self, index: int) -> "FoldedWeight":
        return FoldedWeight(self.codes[index], self.lifts[index], self.scales[index])

    def dequantised(self) -> Tensor:
        """Float32 [..., N, K]; exact."""
        codes = unpack_folded(self.codes) if self.is_packed else self.codes
        lifts = unpack_scales(self.lifts) if self.is_packed else self.lifts
        factors = torch.exp2(lifts.to(torch.float32) - (LARGEST_LIFT - _TOP))
        values = unpack_e2m1(codes) * factors.repeat_interleave(GROUP, dim=-1)
        return values * self.scales.to(torch.float32).unsqueeze(-1)


def require_folding() -> None:
    """Raise `ConfigError` unless the current GPU has kernels for folded products."""
    from mdi_exec.ops.kernels.jit import has_known_registers

    if not has_known_registers():
        raise ConfigError("numerics", "folded", "kernels for it exist for Hopper GPUs only")


def fold_weight(weight: QuantisedWeight) -> FoldedWeight:
    """Fold an unpacked FP4 weight; exact unless a row's scales spread by more than 2^11.

    Groups that far below their row's largest scale become zero: what is lost is less than 2^-11 of
    the largest weights.
    """
    scales = weight.scales.view(torch.uint8).to(torch.int32)
    top = scales.amax(dim=-1, keepdim=True).clamp(min=LARGEST_LIFT)
    lifts = scales - top + LARGEST_LIFT
    is_far = (lifts < 0).repeat_interleave(GROUP // 2, dim=-1)
    codes = weight.codes.masked_fill(is_far, 0)
    row = (top.squeeze(-1) - _TOP).to(torch.uint8).view(torch.float8_e8m0fnu)
    return FoldedWeight(codes, lifts.clamp(min=0).to(torch.uint8), row)


def fold_rows_ref(x: Quantised | Tensor, far: Tensor | None = None) -> Quantised:
    values = dequantise(x) if isinstance(x, Quantised) else x.to(torch.float32)
    amax = values.abs().amax(dim=-1, keepdim=True)
    scales = power_of_two_ceil(amax.clamp(min=ACTIVATION_FLOOR) * (1.0 / E4M3_MAX))
    codes = (values / scales.to(torch.float32)).clamp(-E4M3_MAX, E4M3_MAX)
    if far is not None:
        groups = torch.unflatten(values.abs(), -1, (-1, GROUP)).amax(dim=-1)
        is_far = (groups > 0) & (groups * 2.0**FAR_OCTAVES < amax)
        far += is_far.any(dim=-1).sum()
    return Quantised(codes.to(torch.float8_e4m3fn), scales)


def fold_rows(x: Quantised | Tensor, far: Tensor | None = None) -> Quantised:
    """Fold rounded activations x [R, K] to E4M3 codes [R, K] and one E8M0 scale a row, [R, 1].

    x are codes and scales or bfloat16 values (`quantise_activation`). Rows of which some group lies
    more than 2^10 below the row's largest value are added to `far`, int32 [1].
    """
    if isinstance(x, Quantised):
        return fold_rows_ref(x, far)
    return select(x, ref=fold_rows_ref, kernel="folding.fold_rows")(x, far)
