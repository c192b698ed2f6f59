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
from mdi_exec.ops.row_pool import RowPool


class WindowKv:
    """Makes, rounds (QW) and stores the window keys of one layer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.plan = plan
        self.wkv = QLinear(weights, "wkv", config.head_dim, config.hidden_size)
        self.norm = RmsNorm(weights, "kv_norm", config.head_dim, config.rms_norm_eps)

    @in_range("window")
    def __call__(self, x: Quantised | Tensor, ctx: StepContext) -> RowPool:
        """Return the pool that `ctx.window_rows` counts in, with the step's keys.

        That is the ring, or what was kept in it before, n * R rows, and the step's T rows behind.
        The ring gets its rows then, too.
        """
        ring, target = ctx.cache.windows[self.plan.index], ctx.target(ctx.rings[0])
        product, rotation = self.wkv.partial(x), ctx.rotation(self.plan.ratio)
        if ctx.reads_ring:
            self.norm.store(product, rotation, ring, target)
            return ring
        kept, place = ctx.window()
        codes, scales = (part.new_empty(len(kept) + len(target), part.shape[1])
                         for part in (ring.codes, ring.scales))  # fmt: skip
        torch.index_select(ring.codes, 0, kept, out=codes[: len(kept)])
        torch.index_select(ring.scales, 0, kept, out=scales[: len(kept)])
        pool = RowPool.of(Quantised(codes, scales), ring.format)
        self.norm.store(product, rotation, pool, place)
        ring.write(target, Quantised(codes[len(kept) :], scales[len(kept) :]))
        return pool
