"""Which part of the model a step's FLOPs belong to, and the fewest bytes each part must move.

"Fewest" means perfect reuse inside a step: every weight is read once, every cache entry at most
once per layer that reads it, and activations between two matrices never leave the chip. Real
kernels move more; how much more is an efficiency, not a count, and belongs to `roofline.py`.
Which experts a step touches is not known here, so their expected number is used.

Read next: `roofline.py`, which turns both into time.
"""

from functools import lru_cache
from typing import NamedTuple

from mdi_shared.cost.flops import coefficients
from mdi_shared.cost.footprint import bf16_bytes, expert_bytes, fp8_row_bytes, weight_bytes
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.work import StepWork
from mdi_shared.errors import ConfigError


class ByComponent(NamedTuple):
    """One number per part of the model, in the order a layer runs them."""

    engram: int  # table look-up and projection
    hyper_connections: int
    dense: int  # attention projections, compressors, index queries, router, shared expert
    index_scores: int
    attention: int  # core attention over the window and the selected entries
    experts: int  # routed experts
    exchange: int  # rows sent to experts on other ranks, and their results
    head: int


class _Traffic(NamedTuple):
    """Bytes a shape multiplies its work by, other than those of its cache entries."""

    engram_weights: int
    engram_row: int
    hyper_weights: int
    hyper_row: int  # per row and layer
    dense_weights: int
    kv_per_two_tokens: int
    expert: int
    send_row: int  # per row, layer and receiving rank, there and back
    head_weights: int


@lru_cache(maxsize=64)
def _traffic(shape: ModelShape) -> _Traffic:
    weights, hidden = weight_bytes(shape), shape.hidden_size
    dense = ("attention", "shared_experts", "router", "index_compress", "small")
    engram_rows = shape.num_engram_layers * shape.engram_rows_per_token
    return _Traffic(
        engram_weights=weights["engram_projections"],
        engram_row=fp8_row_bytes(engram_rows, shape.engram_head_dim),
        hyper_weights=weights["hyper_connections"],
        # Per sublayer, in bf16: the copies in and out, the mixed input out, the output in.
        hyper_row=2 * 2 * (2 * shape.hc_mult + 2) * hidden,
        dense_weights=sum(weights[part] for part in dense),
        kv_per_two_tokens=int(2 * shape.kv_bytes_per_token),
        expert=expert_bytes(shape),
        # FP8 with a scale per 32 on the way out, bf16 on the way back.
        send_row=fp8_row_bytes(1, hidden) + bf16_bytes(1, hidden),
        head_weights=weights["embed_head"] // 2,
    )


def step_flops(shape: ModelShape, work: StepWork) -> ByComponent:
    """Return the FP8-equivalent FLOPs of a step by component; they sum to `flops_total`."""
    c, rows, consumers = coefficients(shape), work.rows, work.consumer_rows
    layer_rows = _layer_rows(shape, work)
    return ByComponent(
        c.engram_row * rows,
        c.hyper_layer_row * layer_rows + c.boundary_row * (rows - consumers),
        c.attn_row * rows + c.attn_consumer_row * consumers + c.key_row * work.key_rows
        + c.ffn_layer_row * layer_rows,
        c.index_pair * (work.idx_pairs_r2 + work.idx_pairs_r1),
        c.core_pair * (work.core_pairs + work.swa_pairs),
        c.experts_layer_row * layer_rows,
        0,
        c.logit_row * work.logit_rows,
    )  # fmt: skip


def step_bytes(shape: ModelShape, work: StepWork, ep: int = 1) -> ByComponent:
    """Return the fewest bytes one rank moves in a step, by component.

    All but `exchange` are traffic of the rank's own memory; `exchange` counts what it sends and
    receives over the link. With `ep` > 1 the routed experts are split over that many ranks,
    assumed to run equal steps: the rank's experts serve `ep` times its rows. Raises `ConfigError`
    when `ep` does not divide the experts.
    """
    if ep < 1 or shape.n_routed_experts % ep:
        raise ConfigError("ep", ep, f"must divide n_routed_experts = {shape.n_routed_experts}")
    if work.rows == 0:
        return ByComponent(0, 0, 0, 0, 0, 0, 0, 0)
    t, rows, half_k, sum_k = _traffic(shape), work.rows, work.sum_k // 2, work.sum_k
    layer_rows = _layer_rows(shape, work)
    keys = min(work.idx_pairs_r2, shape.num_index_r2_layers * half_k)
    full_layers = shape.num_index_r1_layers + shape.num_candidate_layers
    keys += min(work.idx_pairs_r1, full_layers * sum_k)
    own = shape.num_core_r2_layers * half_k + shape.num_core_r1_layers * sum_k
    # In each layer a sequence's rows reach their own entries and a window before the first.
    before = shape.num_hidden_layers * (shape.sliding_window - 1) * work.n_seqs
    window = min(work.swa_pairs, layer_rows + before) + layer_rows  # the rows are written, too
    experts = shape.num_producer_layers * distinct_experts(shape, rows * ep)
    experts += shape.num_consumer_layers * distinct_experts(shape, work.consumer_rows * ep)
    return ByComponent(
        t.engram_weights + t.engram_row * rows,
        t.hyper_weights + t.hyper_row * layer_rows,
        t.dense_weights + 2 * shape.hidden_size * rows + t.kv_per_two_tokens * rows // 2,
        shape.index_key_bytes * keys,
        shape.entry_bytes * min(work.core_pairs, own) + shape.window_bytes * window,
        int(t.expert * experts / ep + 0.5),
        int(2 * t.send_row * layer_rows * _other_ranks(shape, ep) + 0.5),
        t.head_weights + 4 * shape.vocab_size * work.logit_rows,
    )


def _layer_rows(shape: ModelShape, work: StepWork) -> int:
    return shape.num_producer_layers * work.rows + shape.num_consumer_layers * work.consumer_rows


def distinct_experts(shape: ModelShape, rows: int) -> float:
    """Expected number of different routed experts `rows` rows choose in a layer.

    Rows choose independently and all experts are equally popular; real routing is more uneven, so
    it touches fewer.
    """
    missed = 1.0 - shape.num_experts_per_tok / shape.n_routed_experts
    return float(shape.n_routed_experts * (1.0 - missed**rows))


def _other_ranks(shape: ModelShape, ep: int) -> float:
    """Expected number of other ranks a row is sent to: those with one of its experts, each once."""
    return float((ep - 1) * (1.0 - (1.0 - 1.0 / ep) ** shape.num_experts_per_tok))
