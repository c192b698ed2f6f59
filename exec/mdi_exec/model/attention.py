"""Attention of a layer: low-rank queries over window, selected entries, sink (docs/model.md, 4).

KV-source layers also compress; index sources also select. Everything a later layer borrows goes
through the cache (entries, keys) or the step context (selection). Read next: `window.py`,
`compressor.py`, `indexer.py`.
"""

import torch
from torch import Tensor

from mdi_exec.model.compressor import Compressor
from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.indexer import Indexer, IndexKeys
from mdi_exec.model.linear import QLinear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.ranges import in_range
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.model.window import WindowKv
from mdi_exec.ops.gemm import quantised_gemm
from mdi_exec.ops.quantise import Quantised, quantise_activation
from mdi_exec.ops.rope import rotate
from mdi_exec.ops.row_pool import RowPool
from mdi_exec.ops.sparse_attention import attend_staged, sparse_attention


class Attention:
    """Call `store_entries` with every row of the step, then the layer itself with the kept rows."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        heads, width, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
        self.plan = plan
        self.head_shape = (heads, width)
        self.wq_a = QLinear(weights, "wq_a", rank, config.hidden_size)
        self.q_norm = RmsNorm(weights, "q_norm", rank, config.rms_norm_eps)
        self.wq_b = QLinear(weights, "wq_b", heads * width, rank)
        self.window = WindowKv(config, plan, weights)
        self.sink = weights.tensor("attn_sink", heads)
        self.output = GroupedOutput(config, weights)
        self.compressor = self.index_keys = self.indexer = None
        if plan.owns_compressor:
            self.compressor = Compressor(config, plan, weights.sub("compressor"))
            self.index_keys = IndexKeys(config, plan, weights.sub("indexer"))
        if plan.is_index_source:
            self.indexer = Indexer(config, plan, weights.sub("indexer"))

    @in_range("compressor")
    def store_entries(self, a_in: Tensor, ctx: StepContext) -> None:
        """Compress a_in [T, D] into this layer's cache; a layer that owns none does nothing."""
        if self.compressor is not None and self.index_keys is not None:
            self.index_keys(self.compressor(a_in, ctx), ctx)

    @in_range("queries")
    def __call__(self, a_in: Tensor, x: Quantised | Tensor, ctx: StepContext) -> Tensor:
        """Return the sublayer's output [T, D] for its normed input a_in [T, D]; x is it rounded."""
        qr = self.q_norm.rounded(self.wq_a.partial(x))
        q = torch.unflatten(self.wq_b(qr), 1, self.head_shape)
        if self.indexer is not None:
            self.indexer(qr, a_in, ctx)
        return self.output(self.attend(q, self.window(x, ctx), ctx))

    @in_range("attention")
    def attend(self, q: Tensor, window: RowPool, ctx: StepContext) -> Tensor:
        """Return the outputs [T, H, d] of heads whose queries are not rotated yet."""
        source, rotation = self.plan.kv_source, ctx.rotation(self.plan.ratio)
        selected = None if source is None else ctx.selected
        staged = ctx.staged.entries(0 if source is None else self.plan.ratio)
        if staged is not None:
            keys = ctx.staged.keys(source, staged, window)
            rows, q = ctx.staged.key_rows(selected, staged), rotate(q, rotation)
            return rotate(attend_staged(q, keys, rows, self.sink), rotation, inverse=True)
        return sparse_attention(
            q, window, ctx.window_rows, self.sink,
            entries=None if source is None else ctx.cache.entries[source], entry_rows=selected,
            rotation=rotation,
        )  # fmt: skip


class GroupedOutput:
    """The low-rank output projection: one down-projection per group of heads, one shared up.

    The first weight is FP8 in the checkpoint, but its input is not rounded to FP8.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.num_groups, rank = config.o_groups, config.o_lora_rank
        group_width = config.num_attention_heads * config.head_dim // config.o_groups
        self.wo_a = weights.fp8("wo_a", config.o_groups * rank, group_width)
        self.wo_b = QLinear(weights, "wo_b", config.hidden_size, config.o_groups * rank)

    @in_range("output")
    def __call__(self, heads: Tensor) -> Tensor:
        down = quantised_gemm(heads.flatten(1), self.wo_a, self.num_groups)
        return self.wo_b(quantise_activation(down))
