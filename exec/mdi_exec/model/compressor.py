"""Compressor of a KV-source layer: 1 or 2 tokens become one cached entry (docs/model.md, 2).

At ratio 1 a bfloat16 projection; at ratio 2 a gated average of the two tokens, in float32. Groups
are anchored at absolute positions, whatever the chunks; an unfinished group's values wait in the
slot's tail. Every row makes the group that would end there, whether it does or not: then shapes do
not depend on positions, and a step needs nothing from the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import Linear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.step_context import GroupRows, StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.rope import Rotation, rotate
from mdi_exec.ops.row_pool import store_rows


class Latents(NamedTuple):
    """Compressed vectors [T, d] before rotation, one per row of the step, their groups, and the
    rotation of the groups' first positions."""

    values: Tensor
    groups: GroupRows
    rotation: Rotation


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
        layer, ratio = self.plan.index, self.plan.ratio
        tail_rows = ctx.cache.layout.tail_rows(layer)
        groups = ctx.groups(ratio, tail_rows)
        pooled = self.wkv(a_in) if self.wgate is None else self._pool(a_in, groups, ctx)
        latents = self.norm(pooled)
        rotation = ctx.ropes.rotation(groups.first_position, ratio)
        # A copy: keys are made from un-rotated latents, and a kernel rotates in place.
        store_rows(ctx.cache.entries[layer], groups.entry, rotate(latents.clone(), rotation))
        return Latents(latents, groups, rotation)

    def _pool(self, a_in: Tensor, groups: GroupRows, ctx: StepContext) -> Tensor:
        """Average each group's values, weighted elementwise by a softmax over its gates."""
        assert self.wgate is not None, "only gated compressors pool"
        layer = self.plan.index
        tail, ring = ctx.cache.tails[layer], ctx.ring(ctx.cache.layout.tail_rows(layer))
        new = torch.stack((self.wkv.float32(a_in), self.wgate.float32(a_in)), dim=1)
        members = torch.cat((tail[ring.kept], new))[groups.members]  # [T, r, 2, d]
        tail[ring.target] = new
        weights = torch.softmax(members[:, :, 1], dim=1)
        return (members[:, :, 0] * weights).sum(dim=1).to(a_in.dtype)
