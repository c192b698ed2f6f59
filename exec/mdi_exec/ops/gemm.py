"""Matrix products: float32 accumulation, and rows whose result no other row can change.

Quantised products are summed block by block of 32 inputs, as the released kernels do
(docs/model.md, "Number formats"). A library GEMM picks its blocking by the number of rows, so a
row's last bits would depend on its batch. `matmul` always multiplies tiles of `ROW_TILE` rows,
padding the last one: every product of a given weight then has the same shape, and chunking or
batching cannot be seen in the result. That holds for one machine and one number of threads: with
others a library may split sums differently. Read next: `expert_gemm.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.packing import (
    LARGEST_FP4_SCALE,
    LARGEST_FP8_SCALE,
    pack_fp4,
    pack_fp8,
    pack_scales,
    unpack_fp4,
    unpack_fp8,
    unpack_scales,
)
from mdi_exec.ops.quantise import GROUP, Quantised, dequantise, unpack_e2m1
from mdi_shared.errors import ConfigError

ROW_TILE = {"cpu": 32, "cuda": 128}
# A product of few outputs has few blocks: kernels sum it in parts of so many inputs, a block each.
PART = 640
WIDE = 4096  # outputs from which there are blocks enough
# Against a product summed in other blocks than 32: the sums differ in float32's last bits, so a
# bfloat16 result may differ by one unit in the last place, rarely.
GEMM_MAX_ULP = 1
GEMM_MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [N, K], or [E, N, K] stacked by expert, kept as codes and scales.

    FP8: codes E4M3 [..., N, K], one E8M0 scale per 32x32 tile (the last tile may be cut).
    FP4: codes int8 [..., N, K/2], one E8M0 scale per (row, 32 inputs).
    Packed, for kernels: the same codes as int32 words in another order, of FP4 with scales likewise
    and inputs filled up to whole blocks (`packing.py`).
    `values`, when memory was granted for it, is what `dequantised` would compute every time, in
    float32 or bfloat16.
    """

    codes: Tensor
    scales: Tensor
    values: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        return self.codes.dtype == torch.int32

    @property
    def is_fp8(self) -> bool:
        if self.is_packed:
            return 4 * self.codes.shape[-1] == GROUP * self.scales.shape[-1]
        return self.codes.dtype == torch.float8_e4m3fn

    def packed(self) -> "QuantisedWeight":
        """Return the weight in the order kernels read; raises `ConfigError` for huge scales.

        Kernels decode by one multiplication that must not overflow, which bounds the scales; it
        waits for the device, once, when the weight is loaded.
        """
        if not self.scales.is_meta:
            self._require_scales_fit()
        if self.is_fp8:
            return QuantisedWeight(pack_fp8(self.codes), self.scales, self.values)
        return QuantisedWeight(pack_fp4(self.codes), pack_scales(self.scales), self.values)

    def _require_scales_fit(self) -> None:
        most = LARGEST_FP8_SCALE if self.is_fp8 else LARGEST_FP4_SCALE
        largest = int(self.scales.view(torch.uint8).max())
        if largest > most:
            raise ConfigError("scale", f"2^{largest - 127}",
                              f"kernels take weight scales up to 2^{most - 127}")  # fmt: skip

    def dequantised(self) -> Tensor:
        """Float32 [..., N, K]; exact, since every scale is a power of two."""
        if self.values is not None:
            return self.values.to(torch.float32)
        scales = self.scales.to(torch.float32)
        if self.is_fp8:
            codes = unpack_fp8(self.codes) if self.is_packed else self.codes
            values = codes.to(torch.float32)
            scales = scales.repeat_interleave(GROUP, dim=-2)[..., : values.shape[-2], :]
        else:
            values = unpack_e2m1(unpack_fp4(self.codes) if self.is_packed else self.codes)
            scales = unpack_scales(scales) if self.is_packed else scales
        return values * scales.repeat_interleave(GROUP, dim=-1)[..., : values.shape[-1]]

    def expanded(self, dtype: torch.dtype = torch.float32) -> "QuantisedWeight":
        """Return the same weight with its values kept; bfloat16 holds them exactly, too."""
        return QuantisedWeight(self.codes, self.scales, self.dequantised().to(dtype))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors of a weight that no values were kept of."""
        assert self.values is None
        return self.codes, self.scales

    @property
    def out_width(self) -> int:
        """Rows N of the weight, or of each expert's."""
        return self.codes.shape[-2]

    @property
    def num_values(self) -> int:
        """Numbers the weight holds."""
        per_code = self.codes.itemsize if self.is_fp8 else 2 * self.codes.itemsize
        return per_code * self.codes.numel()

    def expert(self, index: int) -> "QuantisedWeight":
        values = None if self.values is None else self.values[index]
        return QuantisedWeight(self.codes[index], self.scales[index], values)


def matmul_ref(x: Tensor, weight: Tensor, block: int | None = None) -> Tensor:
    """Multiply as `matmul` does; with `block`, sum products of that many inputs one by one."""
    rows, tile = x.shape[0], ROW_TILE.get(x.device.type, 128)
    inputs = x.shape[1]
    block = block or inputs
    padded_rows = -(-rows // tile) * tile
    padded = torch.zeros(padded_rows, inputs, dtype=torch.float32, device=x.device)
    padded[:rows] = x
    transposed = weight.to(torch.float32).t()
    out = torch.empty(padded_rows, weight.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, padded_rows, tile):
        part, total = padded[start : start + tile], out[start : start + tile]
        torch.mm(part[:, :block], transposed[:block], out=total)
        for at in range(block, inputs, block):
            total += torch.mm(part[:, at : at + block], transposed[at : at + block])
    return out[:rows]


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by weight [N, K]^T; both are promoted, the result is float32 [T, N]."""
    return select(x, ref=matmul_ref, kernel="gemm.matmul")(x, weight)


def num_parts(outputs: int, inputs: int) -> int:
    """Return in how many parts kernels sum a product: the same for any number of rows."""
    return inputs // PART if outputs < WIDE and inputs % PART == 0 else 1


class Partial(NamedTuple):
    """A product [T, N] not yet added up: float32 parts [S, T, N], to be added in order.

    What comes next adds them up as it reads them, and rounds the sum to `dtype`. Few rows come in
    `num_parts` parts and many in one, added up already: the sum is the same.
    """

    parts: Tensor
    dtype: torch.dtype

    def total(self) -> Tensor:
        """Return the product, float32 [T, N]."""
        total = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        return total

    def rounded(self) -> Tensor:
        """Return the product in the activations' dtype."""
        return self.total().to(self.dtype)

    @classmethod
    def of(cls, product: Tensor) -> "Partial":
        """Return a product [T, N] that is added up, in float32 or rounded, as one part."""
        return cls(product.to(torch.float32).unsqueeze(0), product.dtype)

    @property
    def like(self) -> Tensor:
        """An empty tensor of the product's dtype, by which to choose what comes next."""
        return self.parts.new_empty(0, dtype=self.dtype)


def partial_matmul_ref(x: Tensor, weight: Tensor) -> Partial:
    return Partial(matmul_ref(x, weight).unsqueeze(0), x.dtype)


def partial_matmul(x: Tensor, weight: Tensor) -> Partial:
    """Multiply as `matmul` does, for someone who adds up the parts."""
    return select(x, ref=partial_matmul_ref, kernel="gemm.partial_matmul")(x, weight)


def add_parts_ref(product: Partial, scale: float) -> Tensor:
    return product.rounded() * scale


def add_parts(product: Partial, scale: float = 1.0) -> Tensor:
    """Return `Partial.rounded` times a factor, rounded once more: [T, N]."""
    return select(product.like, ref=add_parts_ref, kernel="gemm.add_parts")(product, scale)


def quantised_gemm_ref(
    x: Quantised | Tensor, weight: QuantisedWeight, groups: int = 1
) -> Tensor:  # fmt: skip
    values = dequantise(x) if isinstance(x, Quantised) else x
    dtype = torch.float32 if values is x and values.dtype == torch.float32 else torch.bfloat16
    parts = zip(
        torch.unflatten(values, 1, (groups, -1)).unbind(1),
        torch.unflatten(weight.dequantised(), 0, (groups, -1)), strict=True,
    )  # fmt: skip
    return torch.cat([matmul_ref(part, rows, GROUP) for part, rows in parts], dim=1).to(dtype)


def partial_gemm_ref(x: Quantised | Tensor, weight: QuantisedWeight) -> Partial:
    values = dequantise(x) if isinstance(x, Quantised) else x
    dtype = torch.float32 if values is x and values.dtype == torch.float32 else torch.bfloat16
    return Partial(matmul_ref(values, weight.dequantised(), GROUP).unsqueeze(0), dtype)


def partial_gemm(x: Quantised | Tensor, weight: QuantisedWeight) -> Partial:
    """Multiply as `quantised_gemm` does, for someone who adds up the parts."""
    if isinstance(x, Quantised):
        return partial_gemm_ref(x, weight)
    return select(x, ref=partial_gemm_ref, kernel="gemm.partial_gemm")(x, weight)


def quantised_gemm(x: Quantised | Tensor, weight: QuantisedWeight, groups: int = 1) -> Tensor:
    """Multiply x [T, K] by a quantised weight [N, K]^T.

    A rounded x gives bfloat16 [T, N], whether it comes as codes and scales or as bfloat16 values
    (see `quantise_activation`); a float32 x (unrounded numerics) gives float32. With `groups`, x is
    [T, groups * K] and each of its parts has its own rows of the weight [groups * N, K]: the result
    is [T, groups * N].
    """
    if isinstance(x, Quantised):
        return quantised_gemm_ref(x, weight, groups)
    run = select(x, ref=quantised_gemm_ref, kernel="gemm.quantised_gemm")
    return run(x, weight, groups)
