"""Mixture of experts: routed FP4 experts and one shared FP8 expert (architecture spec, §7).

Sums run in expert order, per token, so the result does not depend on who else is in the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import Linear, QLinear
from mdi_exec.model.weights import Weights
from mdi_exec.ops.elementwise import everywhere
from mdi_exec.ops.expert_gemm import expert_gemm
from mdi_exec.ops.quantise import Quantised, quantise_activation
from mdi_exec.ops.swiglu import swiglu_quantise

WEIGHT_EPS = 1e-20


class Routing(NamedTuple):
    """Chosen experts int64 [T, k], ascending, and their float32 weights [T, k]."""

    experts: Tensor
    weights: Tensor


class Router:
    """Chooses experts by biased scores, weighs them by unbiased ones."""

    def __init__(self, config: ModelConfig, weights: Weights, num_experts: int, k: int) -> None:
        self.gate = Linear(weights, "gate", num_experts, config.hidden_size)
        self.bias = weights.tensor("gate.bias", num_experts)
        self.image_bias = weights.tensor("gate.bias_vl", num_experts)
        self.k = k
        self.scale = config.routed_scaling_factor

    def scores(self, f_in: Tensor) -> Tensor:
        """Return float32 scores [T, E]."""
        return everywhere(torch.nn.functional.softplus, self.gate.float32(f_in)).sqrt()

    def __call__(self, f_in: Tensor, is_image: Tensor | None) -> Routing:
        """Route f_in [T, D]; is_image bool [T] or None picks the bias."""
        scores = self.scores(f_in)
        biased = scores + self.bias
        if is_image is not None:
            biased = torch.where(is_image.unsqueeze(1), scores + self.image_bias, biased)
        chosen = torch.sort(biased, dim=1, descending=True, stable=True).indices[:, : self.k]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(dim=1, keepdim=True) + WEIGHT_EPS) * self.scale
        experts, order = chosen.sort(dim=1)
        return Routing(experts, weights.gather(1, order))


class Moe:
    """The feed-forward sublayer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.num_experts, k = config.n_routed_experts, config.num_experts_per_tok
        if plan.is_draft:
            self.num_experts, k = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.router = Router(config, weights, self.num_experts, k)
        experts = weights.sub("experts")
        self.w1 = experts.fp4_experts("w1", self.num_experts, inner, width)
        self.w3 = experts.fp4_experts("w3", self.num_experts, inner, width)
        self.w2 = experts.fp4_experts("w2", self.num_experts, width, inner)
        shared = weights.sub("shared_experts")
        self.shared_w1 = QLinear(shared, "w1", inner, width)
        self.shared_w3 = QLinear(shared, "w3", inner, width)
        self.shared_w2 = QLinear(shared, "w2", width, inner)

    def __call__(self, f_in: Tensor, is_image: Tensor | None = None) -> Tensor:
        """Return the sublayer's output [T, D] for its normed input f_in [T, D]."""
        x = quantise_activation(f_in)
        routed = self._routed(x, self.router(f_in, is_image))
        total = torch.zeros(f_in.shape, dtype=torch.float32, device=f_in.device)
        for slot in range(routed.shape[1]):
            total = total + routed[:, slot].to(torch.float32)
        hidden = swiglu_quantise(self.shared_w1(x), self.shared_w3(x), self.limit)
        return (total + self.shared_w2(hidden).to(torch.float32)).to(f_in.dtype)

    def _routed(self, x: Quantised | Tensor, routing: Routing) -> Tensor:
        """Return each chosen expert's output [T, k, D], in expert order."""
        num_tokens, k = routing.experts.shape
        flat = routing.experts.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        token = order // k
        rows = x.rows(token) if isinstance(x, Quantised) else x[token]
        hidden = swiglu_quantise(
            expert_gemm(rows, self.w1, counts), expert_gemm(rows, self.w3, counts),
            self.limit, routing.weights.flatten()[order],
        )  # fmt: skip
        sorted_out = expert_gemm(hidden, self.w2, counts)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return torch.unflatten(out, 0, (num_tokens, k))
