"""Matrix products: float32 accumulation, and rows whose result no other row can change.

A library GEMM picks its blocking by the number of rows, so a row's last bits would depend on its
batch. `matmul` always multiplies tiles of `ROW_TILE` rows, padding the last one: every product of
a given weight then has the same shape, and chunking or batching cannot be seen in the result. That
holds for one machine and one number of threads: with others a library may split sums differently.
Read next: `expert_gemm.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.quantise import GROUP, Quantised, dequantise, unpack_e2m1

ROW_TILE = {"cpu": 32, "cuda": 128}
# Against a product summed in blocks of 32: the sums differ in float32's last bits, so a bfloat16
# result may differ by one unit in the last place, rarely.
GEMM_MAX_ULP = 1
GEMM_MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [N, K], or [E, N, K] stacked by expert, kept as codes and scales.

    FP8: codes E4M3 [..., N, K], one E8M0 scale per 32x32 tile (the last tile may be cut).
    FP4: codes int8 [..., N, K/2], one E8M0 scale per (row, 32 inputs).
    `values`, when memory was granted for it, is what `dequantised` would compute every time.
    """

    codes: Tensor
    scales: Tensor
    values: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Float32 [..., N, K]; exact, since every scale is a power of two."""
        if self.values is not None:
            return self.values
        scales = self.scales.to(torch.float32)
        if self.codes.dtype == torch.float8_e4m3fn:
            values = self.codes.to(torch.float32)
            scales = scales.repeat_interleave(GROUP, dim=-2)[..., : values.shape[-2], :]
        else:
            values = unpack_e2m1(self.codes)
        return values * scales.repeat_interleave(GROUP, dim=-1)[..., : values.shape[-1]]

    def expanded(self) -> "QuantisedWeight":
        """Return the same weight with its float32 values kept."""
        return QuantisedWeight(self.codes, self.scales, self.dequantised())

    @property
    def expanded_bytes(self) -> int:
        """Bytes the float32 values take: 4 for each FP8 code or half FP4 byte."""
        values_per_code = 1 if self.codes.dtype == torch.float8_e4m3fn else 2
        return 4 * values_per_code * self.codes.numel()

    def expert(self, index: int) -> "QuantisedWeight":
        values = None if self.values is None else self.values[index]
        return QuantisedWeight(self.codes[index], self.scales[index], values)


def matmul_ref(x: Tensor, weight: Tensor) -> Tensor:
    rows, tile = x.shape[0], ROW_TILE.get(x.device.type, 128)
    padded_rows = -(-rows // tile) * tile
    padded = torch.zeros(padded_rows, x.shape[1], dtype=torch.float32, device=x.device)
    padded[:rows] = x
    transposed = weight.to(torch.float32).t()
    out = torch.empty(padded_rows, weight.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, padded_rows, tile):
        torch.mm(padded[start : start + tile], transposed, out=out[start : start + tile])
    return out[:rows]


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by weight [N, K]^T; both are promoted, the result is float32 [T, N]."""
    return select(x, ref=matmul_ref)(x, weight)


def quantised_gemm_ref(x: Quantised | Tensor, weight: QuantisedWeight) -> Tensor:
    values = dequantise(x) if isinstance(x, Quantised) else x
    dtype = torch.float32 if values is x and values.dtype == torch.float32 else torch.bfloat16
    return matmul_ref(values, weight.dequantised()).to(dtype)


def quantised_gemm(x: Quantised | Tensor, weight: QuantisedWeight) -> Tensor:
    """Multiply x [T, K] by a quantised weight [N, K]^T.

    A rounded x gives bfloat16 [T, N], whether it comes as codes and scales or as bfloat16 values
    (see `quantise_activation`); a float32 x (unrounded numerics) gives float32.
    """
    if isinstance(x, Quantised):
        return quantised_gemm_ref(x, weight)
    return select(x, ref=quantised_gemm_ref)(x, weight)
