"""Indexer: which compressed entries a query attends to (architecture spec, §6.4).

An owner layer stores index keys; every index source scores them and leaves its choice in the step
context for the layers behind it. The candidate source also leaves the blocks that later index
sources may choose from. Nothing is carried from step to step.
"""

import torch
from torch import Tensor

from mdi_exec.model.compressor import Latents
from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.linear import Linear, QLinear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.index_scores import index_scores
from mdi_exec.ops.quantise import Quantised, dequantise, quantise_fp4
from mdi_exec.ops.rope import rotate
from mdi_exec.ops.top_entries import candidate_blocks, top_entries

# Scored columns come in whole tiles, and rows in blocks that keep what is gathered at once small.
COLUMN_TILE = 64
MAX_GATHERED_VALUES = 2**25


class IndexKeys:
    """Makes and stores (QI) the index keys of a KV-source layer, from un-rotated latents."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.plan = plan
        self.wk = Linear(weights, "wk", config.index_head_dim, config.head_dim)
        self.norm = RmsNorm(weights, "k_norm", config.index_head_dim, config.rms_norm_eps)

    def __call__(self, latents: Latents, ctx: StepContext) -> None:
        groups = latents.groups
        rotation = ctx.ropes.rotation(groups.first_position, self.plan.ratio)
        pool = ctx.cache.keys[self.plan.index]
        keys = rotate(self.norm(self.wk(latents.values)), rotation)
        pool.write(groups.entry, pool.encode(keys))


class Indexer:
    """Scores and selects for an index source; `__call__` sets `ctx.selected` (and candidates)."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.config = config
        self.plan = plan
        heads, width = config.index_n_heads, config.index_head_dim
        self.head_shape = (heads, width)
        self.wq_b = QLinear(weights, "wq_b", heads * width, config.q_lora_rank)
        self.weights_proj = Linear(weights, "weights_proj", heads, config.hidden_size)

    def __call__(self, qr: Quantised | Tensor, a_in: Tensor, ctx: StepContext) -> None:
        """Select for each row from qr [T, q_lora_rank] (rounded) and a_in [T, D]."""
        queries, head_weights = self.queries(qr, ctx), self.head_weights(a_in)
        columns = self._num_columns(ctx)
        width = self.config.index_head_dim + self.config.index_n_heads
        step = max(1, MAX_GATHERED_VALUES // (columns * width))
        chosen, blocks = [], []
        for start in range(0, ctx.batch.num_rows, step):
            rows = slice(start, start + step)
            selected, kept = self._select(queries[rows], head_weights[rows], rows, ctx)
            chosen.append(selected)
            blocks.append(kept)
        ctx.selected = torch.cat(chosen)
        if self.plan.is_candidate_source:
            ctx.candidates = torch.cat([b for b in blocks if b is not None])

    def queries(self, qr: Quantised | Tensor, ctx: StepContext) -> Tensor:
        """Return rounded index queries [T, H, d]."""
        q = torch.unflatten(self.wq_b(qr), 1, self.head_shape)
        q = rotate(q, ctx.rotation(self.plan.ratio))
        return q if q.dtype == torch.float32 else dequantise(quantise_fp4(q), q.dtype)

    def head_weights(self, a_in: Tensor) -> Tensor:
        """Return scaled head weights [T, H]; they may be negative."""
        scale = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        weights: Tensor = self.weights_proj(a_in) * scale
        return weights

    def _num_columns(self, ctx: StepContext) -> int:
        """Columns to score: all entries of the longest context, or all candidates, in tiles."""
        if self.plan.uses_candidates:
            assert ctx.candidates is not None, "the candidate source runs before its users"
            return ctx.candidates.shape[1] * self.config.candidate_block_size
        entries = ctx.batch.max_k // self.plan.ratio
        return max(1, -(-entries // COLUMN_TILE)) * COLUMN_TILE

    def _columns(self, rows: slice, ctx: StepContext) -> tuple[Tensor, Tensor]:
        """Return the entries scored for each row, ascending [R, M], and which are visible."""
        visible = ctx.visible(self.plan.ratio)[rows].unsqueeze(1)
        if not self.plan.uses_candidates:
            entries = torch.arange(self._num_columns(ctx), device=visible.device)
            entries = entries.expand(visible.shape[0], -1)
            return entries, entries < visible
        assert ctx.candidates is not None, "the candidate source runs before its users"
        size, blocks = self.config.candidate_block_size, ctx.candidates[rows]
        inside = torch.arange(size, device=blocks.device)
        entries = (blocks.unsqueeze(2) * size + inside).flatten(1)
        return entries, (entries >= 0) & (entries < visible)

    def scores(
        self, queries: Tensor, head_weights: Tensor, rows: slice, ctx: StepContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores [R, M] of a slice of rows, the entries scored, and which are visible."""
        assert self.plan.kv_source is not None, "an index source reads some layer's keys"
        entries, is_visible = self._columns(rows, ctx)
        seq = ctx.batch.seq_of_row[rows].unsqueeze(1)
        key_rows = ctx.entry_rows(seq, entries.masked_fill(~is_visible, -1), self.plan.ratio)
        pool = ctx.cache.keys[self.plan.kv_source]
        return index_scores(queries, head_weights, pool, key_rows), entries, is_visible

    def _select(
        self, queries: Tensor, head_weights: Tensor, rows: slice, ctx: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        scores, entries, is_visible = self.scores(queries, head_weights, rows, ctx)
        columns = top_entries(scores, is_visible, self.config.index_topk)
        chosen = torch.gather(entries, 1, columns.clamp(min=0)).masked_fill(columns < 0, -1)
        seq = ctx.batch.seq_of_row[rows].unsqueeze(1)
        selected = ctx.entry_rows(seq, chosen, self.plan.ratio)
        if not self.plan.is_candidate_source:
            return selected, None
        config = self.config
        visible = ctx.visible(self.plan.ratio)[rows]
        return selected, candidate_blocks(
            scores, visible, config.candidate_block_size, config.candidate_topk_blocks
        )
