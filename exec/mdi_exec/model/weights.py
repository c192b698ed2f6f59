"""Where the model takes its tensors from: anything with `get(name)`, walked by name prefix.

Building a module loads it: each takes a `Weights` scope and asks for the tensors it needs, by their
released names. Shapes are checked here once more, so that a wrong file cannot load quietly.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mdi_exec.model.config import require
from mdi_exec.ops.gemm import QuantisedWeight


class TensorSource(Protocol):
    """A checkpoint; `get` raises an error that names the tensor when there is none."""

    def get(self, name: str) -> Tensor: ...


@dataclass(slots=True)
class ExpansionBudget:
    """Bytes left for float32 copies of quantised weights; the first ones asked for get them.

    Copies save the reference ops a conversion at every call and change no result.
    """

    left_bytes: float = 0.0

    def apply(self, weight: QuantisedWeight) -> QuantisedWeight:
        """Return the weight, with its copy if that still fits."""
        if weight.expanded_bytes > self.left_bytes:
            return weight
        self.left_bytes -= weight.expanded_bytes
        return weight.expanded()


class Weights:
    """The tensors under one name prefix, placed on `device` as they are asked for.

    `budget`, shared by all scopes, pays for float32 copies; without it there are none.
    """

    def __init__(
        self,
        source: TensorSource,
        device: torch.device | str = "cpu",
        prefix: str = "",
        budget: ExpansionBudget | None = None,
    ) -> None:
        self.source = source
        self.device = torch.device(device)
        self.prefix = prefix
        self.budget = ExpansionBudget() if budget is None else budget

    def sub(self, name: str, device: torch.device | str | None = None) -> "Weights":
        """Return the scope `<prefix><name>.`, optionally placed on another device."""
        return Weights(self.source, self.device if device is None else device,
                       f"{self.prefix}{name}.", self.budget)  # fmt: skip

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor; raises `ConfigError` when its shape is not the config's."""
        full_name = self.prefix + name
        value = self.source.get(full_name)
        require(tuple(value.shape) == shape, full_name, tuple(value.shape),
                f"the config asks for shape {shape}")  # fmt: skip
        return value.to(self.device)

    def fp8(self, name: str, rows: int, columns: int) -> QuantisedWeight:
        """Return the FP8 weight `name` with one scale per 32x32 tile."""
        scope = self.sub(name)
        weight = QuantisedWeight(
            scope.tensor("weight", rows, columns),
            scope.tensor("scale", -(-rows // 32), -(-columns // 32)),
        )
        return self.budget.apply(weight)

    def fp4_experts(self, name: str, num_experts: int, rows: int, columns: int) -> QuantisedWeight:
        """Return all experts' FP4 weight `name`, stacked [E, rows, columns]."""
        codes = torch.empty(num_experts, rows, columns // 2, dtype=torch.int8, device=self.device)
        scales = torch.empty(num_experts, rows, columns // 32, dtype=torch.uint8,
                             device=self.device)  # fmt: skip
        for expert in range(num_experts):
            scope = self.sub(f"{expert}.{name}")
            codes[expert] = scope.tensor("weight", rows, columns // 2).view(torch.int8)
            scales[expert] = scope.tensor("scale", rows, columns // 32).view(torch.uint8)
        return self.budget.apply(QuantisedWeight(codes, scales.view(torch.float8_e8m0fnu)))
