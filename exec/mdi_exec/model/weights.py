"""Where the model takes its tensors from: anything with `get(name)`, walked by name prefix.

Building a module loads it: each takes a `Weights` scope and asks for the tensors it needs, by their
released names. Shapes are checked here once more, so that a wrong file cannot load quietly. In a
group of ranks only the own shard of experts and Engram rows is asked for.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mdi_exec.model.config import require
from mdi_exec.ops.expert_gemm import ExpertWeights
from mdi_exec.ops.folding import FoldedWeight, fold_weight, require_folding
from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ranks.exchange import WHOLE, ExpertShard
from mdi_shared.errors import ConfigError


class TensorSource(Protocol):
    """A checkpoint; both raise an error that names the tensor when there is none."""

    def get(self, name: str) -> Tensor: ...

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows start .. stop-1 only; asked for when there are several ranks."""


@dataclass(slots=True)
class ExpansionBudget:
    """Bytes left for unpacked copies of quantised weights; the first ones asked for get them.

    Copies change no result. References save a conversion at every call by float32 copies of any
    weight. With `for_kernels`, weights are packed for kernels, and dense ones get bfloat16 copies,
    which many rows multiply faster. With `folds_experts`, experts are folded (`Numerics.FOLDED`).
    """

    left_bytes: float = 0.0
    for_kernels: bool = False
    folds_experts: bool = False

    def apply(self, weight: QuantisedWeight) -> QuantisedWeight:
        """Return the weight in its final form."""
        dtype = torch.bfloat16 if self.for_kernels else torch.float32
        num_bytes = weight.num_values * dtype.itemsize
        if num_bytes <= self.left_bytes and (weight.is_fp8 or not self.for_kernels):
            self.left_bytes -= num_bytes
            weight = weight.expanded(dtype)
        return weight.packed() if self.for_kernels else weight

    def expert_form(self, weight: QuantisedWeight) -> ExpertWeights:
        """Return one expert's FP4 weight as it is stacked with others'."""
        if self.folds_experts and self.for_kernels:
            require_folding()
        made = fold_weight(weight) if self.folds_experts else weight
        return made.packed() if self.for_kernels else made


CHECKED_AT_ONCE = 2**26  # values: bounds the scratch memory of a check


class FiniteCheck:
    """Looks for values that are no finite numbers in what is loaded, without awaiting the device.

    NaN may hide: in a router's bias it only selects, and logits stay finite. FP4 codes have none.
    """

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._looks: list[tuple[str, Tensor]] = []  # name, and whether it is broken

    def look(self, name: str, value: Tensor) -> None:
        """Begin to look at a tensor where it lies; it is not kept."""
        if value.dtype != torch.int8 and value.numel() and not value.is_meta:
            parts = torch.split(value.reshape(-1), CHECKED_AT_ONCE)
            self._looks.append((name, torch.stack([_is_broken(part) for part in parts]).any()))

    def require(self) -> None:
        """Wait for what was seen; raise `ConfigError` with tensor, index and value of the first."""
        looks, self._looks = self._looks, []
        where = max((seen.device for _, seen in looks), key=lambda device: device.type == "cuda")
        broken = torch.stack([seen.to(where) for _, seen in looks]).tolist()  # waits once
        for (name, _), is_broken in zip(looks, broken, strict=True):
            if is_broken:
                index, number = _first_broken(self.source.get(name))
                raise ConfigError(f"{name}{index}", number, "a weight must be a finite number")


def _first_broken(value: Tensor) -> tuple[list[int], float]:
    for first, part in enumerate(torch.split(value.reshape(-1), CHECKED_AT_ONCE)):
        numbers = part.to(torch.float32)
        for at in torch.nonzero(~torch.isfinite(numbers)).flatten().tolist():
            place = torch.unravel_index(torch.tensor(first * CHECKED_AT_ONCE + at), value.shape)
            return [int(i) for i in place], numbers[at].item()
    raise AssertionError("a tensor that was broken when loaded is not any more")


def _is_broken(part: Tensor) -> Tensor:
    if part.dtype == torch.float8_e4m3fn:
        return (part.view(torch.uint8) & 0x7F).amax() == 0x7F
    if part.dtype == torch.float8_e8m0fnu:
        return part.view(torch.uint8).amax() == 0xFF
    return ~torch.isfinite(torch.stack(part.aminmax())).all()


class Weights:
    """The tensors under one name prefix, placed on `device` as they are asked for.

    `budget`, shared by all scopes, pays for float32 copies; without it there are none. `shard` is
    the part of experts and Engram rows to load; `finite`, shared too, looks at all of it.
    """

    def __init__(
        self,
        source: TensorSource,
        device: torch.device | str = "cpu",
        prefix: str = "",
        budget: ExpansionBudget | None = None,
        shard: ExpertShard = WHOLE,
        finite: FiniteCheck | None = None,
    ) -> None:
        self.source = source
        self.device = torch.device(device)
        self.prefix = prefix
        self.budget = ExpansionBudget() if budget is None else budget
        self.shard = shard
        self._finite = FiniteCheck(source) if finite is None else finite

    def require_finite(self) -> None:
        """Raise `ConfigError` if any tensor asked for so far holds NaN or infinity."""
        self._finite.require()

    def sub(self, name: str, device: torch.device | str | None = None) -> "Weights":
        """Return the scope `<prefix><name>.`, optionally placed on another device."""
        return Weights(self.source, self.device if device is None else device,
                       f"{self.prefix}{name}.", self.budget, self.shard, self._finite)  # fmt: skip

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor; raises `ConfigError` when its shape is not the config's."""
        full_name = self.prefix + name
        value = self.source.get(full_name)
        require(tuple(value.shape) == shape, full_name, tuple(value.shape),
                f"the config asks for shape {shape}")  # fmt: skip
        return self._placed(full_name, value)

    def own_rows(self, name: str, num_rows: int, width: int) -> Tensor:
        """Return this rank's rows of the table `name` [num_rows, width]."""
        if self.shard.size == 1:
            return self.tensor(name, num_rows, width)
        full_name, own = self.prefix + name, self.shard.rows(num_rows)
        value = self.source.get_rows(full_name, own.start, own.stop)
        require(tuple(value.shape) == (len(own), width), full_name, tuple(value.shape),
                f"the config asks for rows of {width}, {len(own)} of them here")  # fmt: skip
        return self._placed(full_name, value)

    def _placed(self, full_name: str, value: Tensor) -> Tensor:
        placed = value.to(self.device)
        self._finite.look(full_name, placed)
        return placed

    def fp8(self, name: str, rows: int, columns: int) -> QuantisedWeight:
        """Return the FP8 weight `name` with one scale per 32x32 tile."""
        return self.fp8_stack((name,), rows, columns)

    def fp8_stack(self, names: tuple[str, ...], rows: int, columns: int) -> QuantisedWeight:
        """Return FP8 weights of `rows` each, one below the other; rows are whole scale tiles."""
        parts = [self.sub(name) for name in names]
        tiles = (-(-rows // 32), -(-columns // 32))
        assert len(names) == 1 or rows % 32 == 0, f"{names} share a scale tile"
        codes = torch.cat(
            [part.tensor("weight", rows, columns).view(torch.uint8) for part in parts]
        )
        scales = torch.cat([part.tensor("scale", *tiles).view(torch.uint8) for part in parts])
        return self.budget.apply(
            QuantisedWeight(codes.view(torch.float8_e4m3fn), _as_scales(scales))
        )

    def fp4_experts(
        self, names: tuple[str, ...], num_experts: int, rows: int, columns: int
    ) -> ExpertWeights:
        """Return own experts' FP4 weights, `names` stacked: [own, names * rows, columns].

        Raises `ConfigError` when `num_experts` cannot be split over the ranks.
        """
        stacked: list[Tensor] = []
        own = self.shard.experts(num_experts)
        # Where only shapes are wanted, one expert gives them.
        read = own[:1] if self.device.type == "meta" else own
        for index, expert in enumerate(read):
            scopes = [self.sub(f"{expert}.{name}") for name in names]
            codes = [s.tensor("weight", rows, columns // 2).view(torch.int8) for s in scopes]
            scales = [s.tensor("scale", rows, columns // 32).view(torch.uint8) for s in scopes]
            weight = QuantisedWeight(torch.cat(codes), _as_scales(torch.cat(scales)))
            made = self.budget.expert_form(weight)
            if not stacked:
                stacked = [part.new_empty(len(own), *part.shape) for part in made.parts]
            for whole, part in zip(stacked, made.parts, strict=True):
                whole.view(torch.uint8)[index] = part.view(torch.uint8)
        if self.budget.folds_experts:
            return FoldedWeight(*stacked)
        found = QuantisedWeight(*stacked)
        return found if self.budget.for_kernels else self.budget.apply(found)


def _as_scales(raw: Tensor) -> Tensor:
    return raw.view(torch.float8_e8m0fnu)
