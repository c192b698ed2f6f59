"""The model's rounding primitives: FP8 and FP4 codes with one scale per group.

| function            | short     | codes | group | scale                | used for               |
|---------------------|-----------|-------|-------|----------------------|------------------------|
| `quantise_fp8`      | QA, QW    | E4M3  | 32    | E8M0, power of two   | GEMM inputs, window KV |
| `quantise_fp4`      | QI        | E2M1  | 32    | E8M0, power of two   | index queries and keys |
| `quantise_fp4_e4m3` | QC        | E2M1  | 16    | E4M3, any value      | compressed KV entries  |

All are bit-exact: no tolerance applies (docs/model.md, "Number formats"). E2M1 codes are packed two
a byte, even element in the low nibble. Kernels keep rounded activations as bfloat16 values instead
of codes (`quantise_activation`); the product is the same. Read next: `gemm.py`.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select

GROUP = 32
ENTRY_GROUP = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_BIAS = 127
# Floors of a group's largest magnitude, so that no scale is zero.
ACTIVATION_FLOOR = 1e-4
INDEX_FLOOR = 6.0 * 2.0**-126
ENTRY_FLOOR = 6.0 * 2.0**-9

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points; a tie goes to the even code, so at every other one "equal" already counts.
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True),
               (2.5, False), (3.5, True), (5.0, False))  # fmt: skip


class Quantised(NamedTuple):
    """Codes [..., d] (E4M3) or [..., d/2] (packed E2M1, uint8), and scales [..., d/group]."""

    codes: Tensor
    scales: Tensor

    def rows(self, index: Tensor | slice) -> "Quantised":
        """Select along the first dimension."""
        if not self.codes.is_cuda:
            return Quantised(self.codes[index], self.scales[index])
        # As bytes: not every version of CUDA's indexing knows these dtypes.
        return Quantised(*(t.view(torch.uint8)[index].view(t.dtype) for t in self))


def power_of_two_ceil(values: Tensor) -> Tensor:
    """Round positive float32 up to a power of two, on the bits; returns E8M0."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def e2m1_codes(values: Tensor) -> Tensor:
    """Round float32 in [-6, 6] to 4-bit E2M1 codes, uint8, ties to the even code."""
    magnitude = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for step, tie_goes_up in _E2M1_STEPS:
        code += (magnitude >= step if tie_goes_up else magnitude > step).to(torch.uint8)
    return code


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., d] into bytes [..., d/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Decode bytes (uint8 or int8) [..., d/2] into float32 values [..., d]."""
    raw = packed.view(torch.uint8).to(torch.int32)
    return torch.nn.functional.embedding(raw, _e2m1_pairs(packed.device)).flatten(-2)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Both values of every byte, float32 [256, 2], low nibble first; made once per device."""
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=torch.float32)
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack((low, high), dim=1).to(device)


def _grouped(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Split the last dimension into groups; returns float32 values and each group's amax."""
    values = torch.unflatten(x.to(torch.float32), -1, (-1, group))
    return values, values.abs().amax(dim=-1)


def _spread(scales: Tensor, group: int) -> Tensor:
    return scales.to(torch.float32).repeat_interleave(group, dim=-1)


def quantise_fp8_ref(x: Tensor) -> Quantised:
    values, amax = _grouped(x, GROUP)
    scales = power_of_two_ceil(amax.clamp(min=ACTIVATION_FLOOR) * (1.0 / E4M3_MAX))
    scaled = values / scales.to(torch.float32).unsqueeze(-1)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Quantised(codes.flatten(-2), scales)


def quantise_fp4_ref(x: Tensor) -> Quantised:
    values, amax = _grouped(x, GROUP)
    scales = power_of_two_ceil(amax.clamp(min=INDEX_FLOOR) * (1.0 / E2M1_MAX))
    scaled = values / scales.to(torch.float32).unsqueeze(-1)
    return Quantised(pack_e2m1(e2m1_codes(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)), scales)


def quantise_fp4_e4m3_ref(x: Tensor) -> Quantised:
    values, amax = _grouped(x, ENTRY_GROUP)
    # torch turns values beyond 448 into NaN; the format saturates.
    scales = (amax.clamp(min=ENTRY_FLOOR) / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = values / scales.to(torch.float32).unsqueeze(-1)  # a true division: see the spec
    return Quantised(pack_e2m1(e2m1_codes(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)), scales)


def quantise_fp8(x: Tensor) -> Quantised:
    """QA and QW: x [..., d] to E4M3 codes [..., d] and E8M0 scales [..., d/32]."""
    return select(x, ref=quantise_fp8_ref, kernel="quantise.quantise_fp8")(x)


def quantise_fp4(x: Tensor) -> Quantised:
    """QI: x [..., d] to packed E2M1 [..., d/2] and E8M0 scales [..., d/32]."""
    return select(x, ref=quantise_fp4_ref, kernel="quantise.quantise_fp4")(x)


def quantise_fp4_e4m3(x: Tensor) -> Quantised:
    """QC: x [..., d] to packed E2M1 [..., d/2] and E4M3 scales [..., d/16]."""
    kernel = "quantise.quantise_fp4_e4m3"
    return select(x, ref=quantise_fp4_e4m3_ref, kernel=kernel)(x)


def dequantise(rows: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes times scales, float32 rounded once to `dtype`; any of the three formats."""
    is_fp8 = rows.codes.dtype == torch.float8_e4m3fn
    values = rows.codes.to(torch.float32) if is_fp8 else unpack_e2m1(rows.codes)
    group = values.shape[-1] // rows.scales.shape[-1]
    return (values * _spread(rows.scales, group)).to(dtype)


def quantise_activation_ref(x: Tensor) -> Quantised | Tensor:
    return x if x.dtype == torch.float32 else quantise_fp8_ref(x)


def quantise_activation(x: Tensor) -> Quantised | Tensor:
    """Round a GEMM input x [..., d] (QA); float32 activations pass unrounded (see `numerics.py`).

    References return codes and scales; the kernel returns the rounded values, bfloat16 [..., d].
    """
    return select(x, ref=quantise_activation_ref, kernel="quantise.round_activation")(x)


def round_fp4_ref(x: Tensor) -> Tensor:
    return dequantise(quantise_fp4_ref(x), x.dtype)


def round_fp4(x: Tensor) -> Tensor:
    """QI as values: what `quantise_fp4` of x [..., d] stands for, in x's dtype."""
    return select(x, ref=round_fp4_ref, kernel="quantise.round_fp4")(x)
