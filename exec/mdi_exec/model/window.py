"""Window KV: each layer's own key of every token, of which the last 128 stay in the slot's ring."""

import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import QLinear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.rope import rotate


class WindowKv:
    """Makes, rounds (QW) and stores the window keys of one layer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.plan = plan
        self.wkv = QLinear(weights, "wkv", config.head_dim, config.hidden_size)
        self.norm = RmsNorm(weights, "kv_norm", config.head_dim, config.rms_norm_eps)

    def __call__(self, x: Quantised | Tensor, ctx: StepContext) -> Tensor:
        """Return window keys [n * R + T, d]: those kept from before, then the step's own.

        Modifies the ring, after reading it: a long chunk overwrites what its first rows still see.
        """
        pool, ring = ctx.cache.windows[self.plan.index], ctx.window_ring
        rows = pool.encode(rotate(self.norm(self.wkv(x)), ctx.rotation(self.plan.ratio)))
        keys = torch.cat((pool.gather(ring.kept), pool.decode(rows)))
        pool.write(ring.target, rows.rows(ring.written))
        return keys
