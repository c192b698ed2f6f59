"""Indexer: which compressed entries a query attends to (docs/model.md, 4).

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
from mdi_exec.model.ranges import in_range
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.ops.backend import runs_kernels
from mdi_exec.ops.gemm import add_parts
from mdi_exec.ops.index_scores import Listed, PagedRows, score_entries
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.rope import rotate_round
from mdi_exec.ops.top_entries import candidate_blocks, top_visible

# Rows are scored in blocks that bound what is held at once: scores on a GPU; references also gather
# every key they score.
MAX_SCORES = 2**27
MAX_GATHERED_VALUES = 2**25


class IndexKeys:
    """Makes and stores (QI) the index keys of a KV-source layer, from un-rotated latents."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.plan = plan
        self.wk = Linear(weights, "wk", config.index_head_dim, config.head_dim)
        self.norm = RmsNorm(weights, "k_norm", config.index_head_dim, config.rms_norm_eps)

    def __call__(self, latents: Latents, ctx: StepContext) -> None:
        groups, pool = latents.groups, ctx.cache.keys[self.plan.index]
        self.norm.store(self.wk.partial(latents.values), groups.rotation, pool, groups.entry)


class Indexer:
    """Scores and selects for an index source; `__call__` sets `ctx.selected` (and candidates)."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        self.config = config
        self.plan = plan
        heads, width = config.index_n_heads, config.index_head_dim
        self.head_shape = (heads, width)
        self.wq_b = QLinear(weights, "wq_b", heads * width, config.q_lora_rank)
        self.weights_proj = Linear(weights, "weights_proj", heads, config.hidden_size)

    @in_range("index")
    def __call__(self, qr: Quantised | Tensor, a_in: Tensor, ctx: StepContext) -> None:
        """Select for each row from qr [T, q_lora_rank] (rounded) and a_in [T, D]."""
        queries, head_weights = self.queries(qr, ctx), self.head_weights(a_in)
        pages, columns = ctx.pages(self.plan.ratio), self.num_columns(ctx)
        step = self._rows_at_once(queries, columns)
        chosen, blocks = [], []
        for start in range(0, ctx.batch.num_rows, step):
            rows = slice(start, start + step)
            part, listed = pages.part(rows), self.listed(ctx, rows)
            scores = self.scores(queries[rows], head_weights[rows], part, listed, ctx)
            selected, kept = self._select(scores, part, listed, ctx)
            chosen.append(selected)
            blocks.append(kept)
        ctx.selected = torch.cat(chosen) if len(chosen) > 1 else chosen[0]
        if self.plan.is_candidate_source:
            found = [part for part in blocks if part is not None]
            ctx.candidates = torch.cat(found) if len(found) > 1 else found[0]

    def queries(self, qr: Quantised | Tensor, ctx: StepContext) -> Tensor:
        """Return rounded index queries [T, H, d]."""
        q = torch.unflatten(self.wq_b(qr), 1, self.head_shape)
        return rotate_round(q, ctx.rotation(self.plan.ratio))

    def head_weights(self, a_in: Tensor) -> Tensor:
        """Return scaled head weights [T, H]; they may be negative."""
        scale = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        return add_parts(self.weights_proj.partial(a_in), scale)

    def num_columns(self, ctx: StepContext) -> int:
        """Columns to score: all entries of the longest context, or all candidates, in tiles."""
        if self.plan.uses_candidates:
            assert ctx.candidates is not None, "the candidate source runs before its users"
            return ctx.candidates.shape[1] * self.config.candidate_block_size
        return ctx.num_columns(self.plan.ratio)

    def listed(self, ctx: StepContext, rows: slice) -> Listed | None:
        """The blocks that rows may choose from; None = all entries."""
        if not self.plan.uses_candidates:
            return None
        return ctx.listed(rows, self.config.candidate_block_size)

    def scores(
        self, queries: Tensor, head_weights: Tensor, pages: PagedRows, listed: Listed | None,
        ctx: StepContext,
    ) -> Tensor:  # fmt: skip
        """Return the scores [R, columns] of some rows."""
        assert self.plan.kv_source is not None, "an index source reads some layer's keys"
        keys = ctx.cache.keys[self.plan.kv_source]
        return score_entries(queries, head_weights, keys, pages, self.num_columns(ctx), listed)

    def _rows_at_once(self, queries: Tensor, columns: int) -> int:
        if runs_kernels(queries):
            return max(1, MAX_SCORES // columns)
        width = self.config.index_head_dim + self.config.index_n_heads
        return max(1, MAX_GATHERED_VALUES // (columns * width))

    def _select(
        self, scores: Tensor, pages: PagedRows, listed: Listed | None, ctx: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return the best entries' rows, int32 [R, topk], and a candidate source's blocks."""
        config, visible = self.config, pages.visible
        limit = visible if listed is None else listed.limit
        columns = top_visible(scores, limit, config.index_topk)
        selected = ctx.selected_rows(self.plan.ratio, pages, columns, listed)
        if not self.plan.is_candidate_source:
            return selected, None
        return selected, candidate_blocks(
            scores, visible, config.candidate_block_size, config.candidate_topk_blocks
        )
