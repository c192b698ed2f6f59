"""Compressor of a KV-source layer: 1 or 2 tokens become one cached entry (docs/model.md, 2).

At ratio 1 a bfloat16 projection; at ratio 2 a gated average of the two tokens, in float32. Groups
are anchored at absolute positions, whatever the chunks; an unfinished group's values wait in the
slot's tail. Every row makes the group that would end there, whether it does or not: then shapes do
not depend on positions, and a step needs nothing from the host.
"""

from typing import NamedTuple

from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import Linear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.step_context import GroupRows, StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.pairs import Tail, pool_pairs


class Latents(NamedTuple):
    """Compressed vectors [T, d] before rotation, one per row of the step, and their groups."""

    values: Tensor
    groups: GroupRows


class Compressor:
    """Makes and stores (QC) the compressed entries of its layer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.plan = plan
        self.wkv = Linear(weights, "wkv", config.head_dim, config.hidden_size)
        self.wgate = (
            Linear(weights, "wgate", config.head_dim, config.hidden_size)
            if plan.ratio > 1
            else None
        )
        self.norm = RmsNorm(weights, "norm", config.head_dim, config.rms_norm_eps)

    def __call__(self, a_in: Tensor, ctx: StepContext) -> Latents:
        """Complete the step's groups from a_in [T, D]; modifies the entries and the tail."""
        groups, product = ctx.groups(self.plan.ratio), self.wkv.partial(a_in)
        if self.wgate is not None:
            length = ctx.cache.layout.tail_rows(self.plan.index)
            tail = Tail(ctx.cache.tails[self.plan.index], length)
            product, own = pool_pairs(product, self.wgate.partial(a_in), tail, ctx.tables)
            tail.values[ctx.target(length)] = own
        pool = ctx.cache.entries[self.plan.index]
        return Latents(self.norm.store(product, groups.rotation, pool, groups.entry), groups)
