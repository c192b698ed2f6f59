"""The least work of a step, by layer and part: what no schedule of the same arithmetic undercuts.

Counted are multiply-adds of the projections and of the pairs that attention and indexer really
meet, and bytes of weights and cache that a step must read. They make floors, so what can be left
out is left out: activations but the streams, norms, index maths. Parts are the ranges of a layer
(`ranges.py`); "streams written" is what a layer does outside of them.
"""

from collections.abc import Iterable
from typing import NamedTuple

from mdi_exec.model.config import LayerPlan, ModelConfig

BF16, FP8, FP4 = 2.0, 1 + 1 / 1024, 0.5 + 1 / 32  # bytes of a weight, scales included
STREAMS = "streams written"


class Work(NamedTuple):
    """Floating-point operations (2 a multiply-add) and bytes that something takes at least."""

    flops: float = 0.0
    num_bytes: float = 0.0

    def plus(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)


class StepShape(NamedTuple):
    """Sequences of a step, each with `rows` new tokens that end at context length `context`."""

    num_seqs: int
    rows: int
    context: int

    @property
    def total_rows(self) -> int:
        return self.num_seqs * self.rows

    def __str__(self) -> str:
        if self.rows == 1:
            return f"decode of {self.num_seqs:,} sequences at context {self.context:,}"
        return f"prefill of {self.total_rows:,} tokens at context {self.context:,}"

    def pairs(self, ratio: int, most: int | None = None) -> float:
        """Pairs of a row and a visible entry, `most` at most for each row."""
        first = self.context - self.rows
        found = 0
        for position in range(first, self.context):
            seen = (position + 1) // ratio
            found += seen if most is None else min(seen, most)
        return float(self.num_seqs * found)


def sum_of(parts: Iterable[Work]) -> Work:
    """Add works up."""
    total = Work()
    for part in parts:
        total = total.plus(part)
    return total


def step_work(c: ModelConfig, step: StepShape, active_experts: list[int]) -> dict[str, Work]:
    """Return a whole step's least work by part; `active_experts` that some row chose, by layer."""
    total: dict[str, Work] = {}
    for layer, active in enumerate(active_experts):
        for part, work in layer_parts(c, c.layer_plan(layer), step, active).items():
            total[part] = total.get(part, Work()).plus(work)
    if c.engram_layer_ids:
        total["engram"] = sum_of([engram_work(c, step)] * len(c.engram_layer_ids))
    total["head"] = head_work(c, step.num_seqs)
    return total


def layer_work(
    c: ModelConfig, plan: LayerPlan, step: StepShape, active_experts: float | None = None
) -> Work:
    """Return the least work of a layer, without Engram; all experts count unless told."""
    return sum_of(layer_parts(c, plan, step, active_experts).values())


def layer_parts(
    c: ModelConfig, plan: LayerPlan, step: StepShape, active_experts: float | None = None
) -> dict[str, Work]:
    """Return the least work of a layer by part, as `layer_work`."""
    return {**_stream_parts(c, step), **_attention_parts(c, plan, step),
            **_expert_parts(c, step, active_experts)}  # fmt: skip


def _product(rows: float, out_width: int, in_width: int, weight_bytes: float) -> Work:
    return Work(2.0 * rows * out_width * in_width, weight_bytes * out_width * in_width)


def _stream_parts(c: ModelConfig, step: StepShape) -> dict[str, Work]:
    """Hyper-connections of both sublayers: the projections, and the streams read and written."""
    width = c.hc_mult * c.hidden_size
    return {"coefficients": _product(2 * step.total_rows, c.hc_width, width, 4.0),
            STREAMS: Work(0.0, 2 * 2 * BF16 * step.total_rows * width)}  # fmt: skip


def _attention_parts(c: ModelConfig, plan: LayerPlan, step: StepShape) -> dict[str, Work]:
    rows, wide = step.total_rows, c.num_attention_heads * c.head_dim
    grouped = c.o_groups * c.o_lora_rank
    parts = {
        "queries": _product(rows, c.q_lora_rank, c.hidden_size, FP8).plus(
            _product(rows, wide, c.q_lora_rank, FP8)
        ),
        "window": _product(rows, c.head_dim, c.hidden_size, FP8),
        "output": _product(rows, grouped, wide // c.o_groups, FP8).plus(
            _product(rows, c.hidden_size, grouped, FP8)
        ),
    }
    pairs = step.pairs(1, c.sliding_window)
    kept = step.num_seqs * c.sliding_window * c.head_dim * FP8
    if plan.ratio:
        seen = step.pairs(plan.ratio, c.index_topk)
        pairs += seen
        read = min(seen, step.num_seqs * step.context / plan.ratio)
        kept += read * c.head_dim * (0.5 + 1 / 16)
    parts["attention"] = Work(4.0 * pairs * wide, kept)  # scores and values
    if plan.owns_compressor:
        product = _product(rows, c.head_dim, c.hidden_size, BF16)
        parts["compressor"] = sum_of([product] * (2 if plan.ratio > 1 else 1))
    if plan.is_index_source:
        parts["index"] = _index_work(c, plan, step)
    return parts


def _index_work(c: ModelConfig, plan: LayerPlan, step: StepShape) -> Work:
    wide = c.index_n_heads * c.index_head_dim
    most = c.candidate_topk_blocks * c.candidate_block_size if plan.uses_candidates else None
    pairs = step.pairs(plan.ratio, most)
    keys = min(pairs, step.num_seqs * step.context / plan.ratio)
    scores = Work(2.0 * pairs * wide, keys * c.index_head_dim * (0.5 + 1 / 32))
    return _product(step.total_rows, wide, c.q_lora_rank, FP8).plus(scores)


def _expert_parts(c: ModelConfig, step: StepShape, active_experts: float | None) -> dict[str, Work]:
    rows, inner, hidden = step.total_rows, c.moe_intermediate_size, c.hidden_size
    matrices = 3 * inner * hidden
    active = c.n_routed_experts if active_experts is None else active_experts
    return {
        "router": _product(rows, c.n_routed_experts, hidden, BF16),
        "routed experts": Work(2.0 * rows * c.num_experts_per_tok * matrices,
                               active * matrices * FP4),
        "shared expert": Work(2.0 * rows * matrices, matrices * FP8),
    }  # fmt: skip


def engram_work(c: ModelConfig, step: StepShape) -> Work:
    """Return the least work of one Engram lookup: table rows and the projection."""
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    table = Work(0.0, step.total_rows * columns * (1 + 1 / 32))
    return _product(step.total_rows, (c.hc_mult + 1) * c.hidden_size, columns, FP8).plus(table)


def head_work(c: ModelConfig, num_logits: int) -> Work:
    """Return the least work of the output head."""
    return _product(num_logits, c.vocab_size, c.hidden_size, BF16)
