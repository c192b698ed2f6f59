"""Mixture of experts: routed FP4 experts and one shared FP8 expert (architecture spec, §7).

Sums run in expert order, per token, so the result does not depend on who else is in the batch.
"""

import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import Linear, QLinear
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.expert_gemm import expert_gemm, tile_rows
from mdi_exec.ops.gemm import quantised_gemm
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.routing import RowGroups, combine, group_rows, route
from mdi_exec.ops.swiglu import swiglu_quantise


class Router:
    """Chooses experts by biased scores, weighs them by unbiased ones."""

    def __init__(self, config: ModelConfig, weights: Weights, num_experts: int, k: int) -> None:
        self.gate = Linear(weights, "gate", num_experts, config.hidden_size)
        self.bias = weights.tensor("gate.bias", num_experts)
        self.image_bias = weights.tensor("gate.bias_vl", num_experts)
        self.k = k
        self.scale = config.routed_scaling_factor

    def __call__(self, f_in: Tensor, is_image: Tensor | None) -> tuple[Tensor, Tensor]:
        """Route f_in [T, D]: experts int32 [T, k], ascending, and float32 weights [T, k].

        is_image bool [T] picks the bias; None means text only.
        """
        bias = self.bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(1), self.image_bias, self.bias)
        return route(self.gate.float32(f_in), bias, self.k, self.scale)


class Moe:
    """The feed-forward sublayer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.num_experts, k = config.n_routed_experts, config.num_experts_per_tok
        if plan.is_draft:
            self.num_experts, k = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.router = Router(config, weights, self.num_experts, k)
        experts, shared = weights.sub("experts"), weights.sub("shared_experts")
        self.w13 = experts.fp4_experts(("w1", "w3"), self.num_experts, inner, width)
        self.w2 = experts.fp4_experts(("w2",), self.num_experts, width, inner)
        self.shared_w13 = shared.fp8_stack(("w1", "w3"), inner, width)
        self.shared_w2 = QLinear(shared, "w2", width, inner)

    def __call__(self, f_in: Tensor, x: Quantised | Tensor, ctx: StepContext) -> Tensor:
        """Return the sublayer's output [T, D] for its normed input f_in [T, D]; x is it rounded."""
        experts, weights = self.router(f_in, ctx.batch.is_image)
        tile = tile_rows(experts.numel(), self.num_experts)
        groups = group_rows(experts, self.num_experts, tile)
        ctx.note_expert_counts(groups.counts)
        routed = self._routed(x, groups, tile, weights)
        gate, up = quantised_gemm(x, self.shared_w13).chunk(2, dim=1)
        hidden = swiglu_quantise(gate, up, self.limit)
        return combine(routed, groups.position, self.shared_w2(hidden))

    def _routed(
        self, x: Quantised | Tensor, groups: RowGroups, tile: int, weights: Tensor
    ) -> Tensor:
        """Return the chosen experts' outputs [T * k, D], sorted by expert."""
        token = groups.order // weights.shape[1]
        rows = x.rows(token) if isinstance(x, Quantised) else x[token]
        gate, up = expert_gemm(rows, self.w13, groups, tile).chunk(2, dim=1)
        hidden = swiglu_quantise(gate, up, self.limit, weights.flatten()[groups.order])
        return expert_gemm(hidden, self.w2, groups, tile)
