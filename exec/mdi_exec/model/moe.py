"""Mixture of experts: routed FP4 experts and one shared FP8 expert (docs/model.md, 5).

Sums run in expert order, per token, so the result does not depend on who else is in the batch. In a
group of ranks each holds some of the routed experts; `exchange.py` brings rows to them and back.
"""

from functools import partial

import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import Linear, QLinear
from mdi_exec.model.ranges import in_range
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.backend import runs_kernels
from mdi_exec.ops.expert_gemm import expert_gemm, tile_rows
from mdi_exec.ops.folding import FoldedWeight, fold_rows
from mdi_exec.ops.gemm import quantised_gemm
from mdi_exec.ops.quantise import Quantised, quantise_activation_ref
from mdi_exec.ops.routing import combine, group_tokens, route
from mdi_exec.ops.swiglu import RowWeights, swiglu_quantise


class Router:
    """Chooses experts by biased scores, weighs them by unbiased ones."""

    def __init__(self, config: ModelConfig, weights: Weights, num_experts: int, k: int) -> None:
        self.gate = Linear(weights, "gate", num_experts, config.hidden_size)
        self.bias = weights.tensor("gate.bias", num_experts)
        self.image_bias = weights.tensor("gate.bias_vl", num_experts)
        self.k = k
        self.scale = config.routed_scaling_factor

    @in_range("router")
    def __call__(self, f_in: Tensor, is_image: Tensor | None) -> tuple[Tensor, Tensor]:
        """Route f_in [T, D]: experts int32 [T, k], ascending, and float32 weights [T, k].

        is_image bool [T] picks the bias; None means text only.
        """
        bias = self.bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(1), self.image_bias, self.bias)
        return route(self.gate.partial(f_in), bias, self.k, self.scale)


class Moe:
    """The feed-forward sublayer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.num_experts, k = config.n_routed_experts, config.num_experts_per_tok
        if plan.is_draft:
            self.num_experts, k = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        self.num_ranks = weights.shard.size
        self.num_own = len(weights.shard.experts(self.num_experts))
        self.width, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.router = Router(config, weights, self.num_experts, k)
        experts, shared = weights.sub("experts"), weights.sub("shared_experts")
        self.w13 = experts.fp4_experts(("w1", "w3"), self.num_experts, inner, self.width)
        self.w2 = experts.fp4_experts(("w2",), self.num_experts, self.width, inner)
        self.far_rows: Tensor | None = None
        if isinstance(self.w13, FoldedWeight):
            self.far_rows = torch.zeros(1, dtype=torch.int32, device=weights.device)
        self.shared_w13 = shared.fp8_stack(("w1", "w3"), inner, self.width)
        self.shared_w2 = QLinear(shared, "w2", self.width, inner)

    @in_range("shared expert")
    def __call__(self, f_in: Tensor, x: Quantised | Tensor, ctx: StepContext) -> Tensor:
        """Return the sublayer's output [T, D] for its normed input f_in [T, D]; x is it rounded."""
        experts, weights = self.router(f_in, ctx.batch.is_image)
        run = partial(self._run_own, ctx)
        routed, position = ctx.exchange.routed(x, experts, weights, self.num_own, run)
        gate, up = quantised_gemm(x, self.shared_w13).chunk(2, dim=1)
        hidden = swiglu_quantise(gate, up, self.limit)
        return combine(routed, position, self.shared_w2(hidden))

    def serve(self, ctx: StepContext, like: Tensor) -> None:
        """Run own experts for other ranks' rows, in a layer where this rank has none itself.

        `like` gives device and dtype of activations.
        """
        none = like.new_empty(0, self.width)
        x = none if runs_kernels(none) else quantise_activation_ref(none)
        experts = torch.empty(0, self.router.k, dtype=torch.int32, device=like.device)
        weights = experts.to(torch.float32)
        ctx.exchange.routed(x, experts, weights, self.num_own, partial(self._run_own, ctx))

    @in_range("routed experts")
    def _run_own(
        self, ctx: StepContext, x: Quantised | Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run own experts as `exchange.RunExperts` asks for: outputs [R * k, D], sorted by expert.

        Rows for experts of other ranks come last, and what stands there means nothing.
        """
        tile = tile_rows(x, experts.numel() // self.num_ranks, self.num_own)
        groups, rows = group_tokens(self._operand(x), experts, self.num_own, tile,
                                    some_elsewhere=self.num_ranks > 1)  # fmt: skip
        ctx.note_expert_counts(groups.counts)
        gate, up = expert_gemm(rows, self.w13, groups, tile).chunk(2, dim=1)
        row_weights = RowWeights(weights.flatten(), groups.order)
        hidden = swiglu_quantise(gate, up, self.limit, row_weights)
        return expert_gemm(self._operand(hidden), self.w2, groups, tile), groups.position

    def _operand(self, x: Quantised | Tensor) -> Quantised | Tensor:
        """Return rounded rows in the form that the experts' weights multiply with.

        `far_rows` counts folded rows of which some group lay far below the row's largest value.
        """
        return fold_rows(x, self.far_rows) if isinstance(self.w13, FoldedWeight) else x
