"""Window KV: each layer's own key of every token, of which the last 128 stay in the slot's ring."""

import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import QLinear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.ranges import in_range
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.rope import rotate
from mdi_exec.ops.row_pool import RowPool


class WindowKv:
    """Makes, rounds (QW) and stores the window keys of one layer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.plan = plan
        self.wkv = QLinear(weights, "wkv", config.head_dim, config.hidden_size)
        self.norm = RmsNorm(weights, "kv_norm", config.head_dim, config.rms_norm_eps)

    @in_range("window")
    def __call__(self, x: Quantised | Tensor, ctx: StepContext) -> RowPool:
        """Return window keys as rows of a pool, n * R + T: those kept from before, then the step's.

        Modifies the ring, after reading it: a long chunk overwrites what its first rows still see.
        """
        pool, ring = ctx.cache.windows[self.plan.index], ctx.window_ring
        new = pool.encode(rotate(self.norm(self.wkv(x)), ctx.rotation(self.plan.ratio)))
        codes = torch.cat((pool.codes[ring.kept], new.codes))
        scales = torch.cat((pool.scales[ring.kept], new.scales))
        pool.write(ring.target, new)
        return RowPool.of(Quantised(codes, scales), pool.format)
