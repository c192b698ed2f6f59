"""A random-weight model for benchmarks: built, its cache filled, its layers' least work counted.

Counts are of this code's arithmetic: multiply-adds of the projections and of the pairs that
attention and indexer really meet, and bytes of weights and cache that a step must read. They make
floors, so what can be left out is left out (activations, norms, index maths).
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu_timing import PartTimer
from torch import Tensor

from mdi_exec.model.batch import BLOCK_TOKENS, Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_exec.model.transformer import Layer, Streams, Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.ops.row_pool import RowPool
from mdi_exec.ranks.exchange import NO_EXCHANGE, WHOLE, ExpertExchange, ExpertShard
from mdi_exec.weights.source import ModelSource, open_model

FILL_ROWS = 4096  # different rows a cache is filled with
BF16, FP8, FP4 = 2.0, 1 + 1 / 1024, 0.5 + 1 / 32  # bytes of a weight, scales included


def build(
    options: argparse.Namespace,
    device: torch.device,
    shard: ExpertShard = WHOLE,
    exchange: ExpertExchange = NO_EXCHANGE,
) -> tuple[ModelSource, Transformer]:
    """Draw the weights of a preset on the device and load them, packed where kernels run.

    Of `options`: preset, layers, experts, and copies_gb for bfloat16 copies of dense weights. In a
    group of ranks only `shard` is loaded, and `exchange` reaches the rest.
    """
    numbers = {"layers": options.layers, "experts": options.experts}
    given = "".join(f",{name}={n}" for name, n in numbers.items() if n is not None)
    source = open_model(f"random:{options.preset}{given}", device)
    is_cuda = device.type == "cuda"
    budget = ExpansionBudget(options.copies_gb * 1e9 if is_cuda else 0.0, for_kernels=is_cuda)
    weights = Weights(source.tensors, device, budget=budget, shard=shard)
    model = Transformer(source.config, weights, token_map=source.token_map, exchange=exchange)
    return source, model


def filled_cache(model: Transformer, *, num_blocks: int, num_slots: int) -> DeviceCache:
    """Return a cache whose every row holds random values, encoded as the model would."""
    layout = CacheLayout(config=model.config, numerics=model.numerics)
    cache = DeviceCache(layout, num_blocks=num_blocks, num_slots=num_slots, device=model.device)
    dice = torch.Generator(model.device).manual_seed(0)
    for pool in (*cache.windows, *cache.entries.values(), *cache.keys.values()):
        _fill(pool, dice)
    for tail in cache.tails.values():
        tail.normal_(generator=dice)
    most = model.config.engram_compressed_vocab_size
    cache.engram_ids.random_(0, most, generator=dice)
    return cache


def _fill(pool: RowPool, dice: torch.Generator) -> None:
    values = torch.empty(FILL_ROWS, pool.format.width, device=pool.codes.device)
    rows = pool.encode(values.normal_(generator=dice).to(torch.bfloat16))
    for start in range(0, pool.codes.shape[0], FILL_ROWS):
        count = min(FILL_ROWS, pool.codes.shape[0] - start)
        pool.codes[start : start + count] = rows.codes[:count]
        pool.scales[start : start + count] = rows.scales[:count]


def blocks_for(tokens: int) -> int:
    """Blocks that a context of so many tokens takes."""
    return -(-tokens // BLOCK_TOKENS)


def batch_of(
    num_seqs: int, rows: int, context: int, ids: Tensor, device: torch.device
) -> Batch:  # fmt: skip
    """Return a batch of equal sequences that own blocks 1, 2, .. and slots 1, 2, .. in turn."""
    each = blocks_for(context)
    items = [
        BatchItem(rows, context, 1 + i, range(1 + i * each, 1 + (i + 1) * each), 1)
        for i in range(num_seqs)
    ]
    return Batch.build(items, ids, device)


class TimedLayer:
    """A layer that tells a timer when it begins; stands in for it in `model.layers`."""

    def __init__(self, layer: Layer, timer: PartTimer, part: str) -> None:
        self.layer = layer
        self.plan = layer.plan
        self.timer = timer
        self.part = part

    def store_entries(self, streams: Streams, ctx: object) -> Streams:
        """Begin the layer's part: compressing is its first work."""
        self.timer.mark(self.part)
        return self.layer.store_entries(streams, ctx)  # type: ignore[arg-type]

    def __call__(self, streams: Streams, ctx: object, then: object = None) -> Streams:
        out = self.layer(streams, ctx, then)  # type: ignore[arg-type]
        self.timer.mark("the rest")
        return out

    def __getattr__(self, name: str) -> object:
        return getattr(self.layer, name)


def time_parts(model: Transformer, timer: PartTimer) -> None:
    """Make every forward pass mark its parts: "layer N", "engram", "embedding", "head"."""

    def marked(function: Callable[..., object], part: str) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            timer.mark(part)
            out = function(*arguments)
            timer.mark("the rest")
            return out

        return run

    for name, part in (("embed_rows", "embedding"), ("add_engram", "engram"), ("logits", "head")):
        setattr(model, name, marked(getattr(model, name), part))
    model.layers = [
        TimedLayer(layer, timer, f"layer {layer.plan.index}")  # type: ignore[misc]
        for layer in model.layers
    ]


class Work(NamedTuple):
    """Floating-point operations (2 a multiply-add) and bytes that something takes at least."""

    flops: float = 0.0
    num_bytes: float = 0.0

    def plus(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)


def _product(rows: float, out_width: int, in_width: int, weight_bytes: float) -> Work:
    return Work(2.0 * rows * out_width * in_width, weight_bytes * out_width * in_width)


def _sum(parts: list[Work]) -> Work:
    return Work(sum(p.flops for p in parts), sum(p.num_bytes for p in parts))


class StepShape(NamedTuple):
    """Sequences of a step, each with `rows` new tokens that end at context length `context`."""

    num_seqs: int
    rows: int
    context: int

    @property
    def total_rows(self) -> int:
        return self.num_seqs * self.rows

    def pairs(self, ratio: int, most: int | None = None) -> float:
        """Pairs of a row and a visible entry, `most` at most for each row."""
        first = self.context - self.rows
        found = 0
        for position in range(first, self.context):
            seen = (position + 1) // ratio
            found += seen if most is None else min(seen, most)
        return float(self.num_seqs * found)


def layer_work(
    c: ModelConfig, plan: LayerPlan, step: StepShape, active_experts: float | None = None
) -> Work:
    """Return the least work of a layer, without Engram; all experts count unless told."""
    return _sum([_attention_work(c, plan, step), _expert_work(c, step, active_experts),
                 _stream_work(c, step)])  # fmt: skip


def _stream_work(c: ModelConfig, step: StepShape) -> Work:
    """Hyper-connections of both sublayers: the projections, and the streams read and written."""
    width = c.hc_mult * c.hidden_size
    streams = Work(0.0, 2 * 2 * BF16 * step.total_rows * width)
    return _product(2 * step.total_rows, c.hc_width, width, 4.0).plus(streams)


def _attention_work(c: ModelConfig, plan: LayerPlan, step: StepShape) -> Work:
    rows, wide = step.total_rows, c.num_attention_heads * c.head_dim
    grouped = c.o_groups * c.o_lora_rank
    parts = [
        _product(rows, c.q_lora_rank, c.hidden_size, FP8),
        _product(rows, wide, c.q_lora_rank, FP8),
        _product(rows, c.head_dim, c.hidden_size, FP8),
        _product(rows, grouped, wide // c.o_groups, FP8),
        _product(rows, c.hidden_size, grouped, FP8),
    ]
    pairs = step.pairs(1, c.sliding_window)
    kept = step.num_seqs * c.sliding_window * c.head_dim * FP8
    if plan.ratio:
        pairs += step.pairs(plan.ratio, c.index_topk)
        read = min(step.pairs(plan.ratio, c.index_topk), step.num_seqs * step.context / plan.ratio)
        kept += read * c.head_dim * (0.5 + 1 / 16)
    parts.append(Work(4.0 * pairs * wide, kept))  # scores and values
    if plan.owns_compressor:
        projections = 2 if plan.ratio > 1 else 1
        parts += [_product(rows, c.head_dim, c.hidden_size, BF16)] * projections
    if plan.is_index_source:
        parts.append(_index_work(c, plan, step))
    return _sum(parts)


def _index_work(c: ModelConfig, plan: LayerPlan, step: StepShape) -> Work:
    wide = c.index_n_heads * c.index_head_dim
    most = c.candidate_topk_blocks * c.candidate_block_size if plan.uses_candidates else None
    pairs = step.pairs(plan.ratio, most)
    keys = min(pairs, step.num_seqs * step.context / plan.ratio)
    scores = Work(2.0 * pairs * wide, keys * c.index_head_dim * (0.5 + 1 / 32))
    return _sum([_product(step.total_rows, wide, c.q_lora_rank, FP8), scores])


def _expert_work(c: ModelConfig, step: StepShape, active_experts: float | None) -> Work:
    rows, inner, hidden = step.total_rows, c.moe_intermediate_size, c.hidden_size
    matrices = 3 * inner * hidden
    active = c.n_routed_experts if active_experts is None else active_experts
    routed = Work(2.0 * rows * c.num_experts_per_tok * matrices, active * matrices * FP4)
    shared = Work(2.0 * rows * matrices, matrices * FP8)
    return _sum([_product(rows, c.n_routed_experts, hidden, BF16), routed, shared])


def engram_work(c: ModelConfig, step: StepShape) -> Work:
    """Return the least work of one Engram lookup: table rows and the projection."""
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    table = Work(0.0, step.total_rows * columns * (1 + 1 / 32))
    return _product(step.total_rows, (c.hc_mult + 1) * c.hidden_size, columns, FP8).plus(table)


def head_work(c: ModelConfig, num_logits: int) -> Work:
    """Return the least work of the output head."""
    return _product(num_logits, c.vocab_size, c.hidden_size, BF16)
