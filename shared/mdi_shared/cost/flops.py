"""What a row and a pair cost in FLOPs, for one model (docs/rules.md, R31).

FLOPs are FP8-equivalent: per multiply-add FP4 counts 1, FP8 2, bf16 4, f32 8. Padding rows,
replicas, norms and the draft model are not counted. Nothing here knows a machine or a time.

Read next: `work.py`, which multiplies them by the rows and pairs of a step.
"""

from functools import lru_cache
from typing import NamedTuple

from mdi_shared.cost.footprint import attention_matrices, engram_matrix, expert_params
from mdi_shared.cost.shape import ModelShape


class WorkCoefficients(NamedTuple):
    """What a shape multiplies rows and pairs by; made once per shape by `coefficients`.

    FP8-equivalent FLOPs: `*_layer_row` per row and layer, `*_row` per row of the producer part and
    `*_consumer_row` per consumer row, both summed over their layers; `*_pair` per pair and layer;
    `key_row` per index key, `logit_row` per row of logits.
    """

    attn_row: int
    attn_consumer_row: int
    ffn_layer_row: int  # shared expert and router
    experts_layer_row: int  # routed experts
    hyper_layer_row: int
    boundary_row: int  # per row that no consumer layer runs: it still leaves the producers mixed
    engram_row: int
    key_row: int
    core_pair: int
    index_pair: int
    logit_row: int
    other_row: int  # everything but attention
    other_consumer_row: int

    def flops(
        self, rows: int, consumer_rows: int, key_rows: int, core: int, index: int
    ) -> tuple[int, int]:
        """Return FLOPs of attention, and of everything but the LM head."""
        attn = self.attn_row * rows + self.attn_consumer_row * consumer_rows
        attn += self.key_row * key_rows + self.core_pair * core + self.index_pair * index
        other = self.other_row * rows + self.other_consumer_row * consumer_rows
        return attn, attn + other + self.boundary_row * (rows - consumer_rows)


@lru_cache(maxsize=64)
def coefficients(shape: ModelShape) -> WorkCoefficients:
    """Return the coefficients for `shape` (FP8 attention, experts and index queries)."""
    hidden, copies = shape.hidden_size, shape.hc_mult
    producers, consumers = shape.num_producer_layers, shape.num_consumer_layers
    index_wide = shape.index_n_heads * shape.index_head_dim
    project = 2 * sum(rows * cols for rows, cols in attention_matrices(shape))
    index = 2 * shape.q_lora_rank * index_wide + 4 * hidden * shape.index_n_heads
    index_consumers = shape.num_index_r1_layers + shape.num_candidate_layers
    compress = 4 * hidden * shape.head_dim * shape.num_compressors  # every source, for all rows
    ffn = 2 * shape.n_shared_experts * expert_params(shape) + 4 * hidden * shape.n_routed_experts
    experts = 2 * shape.num_experts_per_tok * expert_params(shape)
    mix = 8 * copies * hidden
    hyper = 2 * (mix * copies * (copies + 2) + mix + 8 * copies * (copies + 1) * hidden)
    engram_rows, engram_columns = engram_matrix(shape)
    engram = shape.num_engram_layers * (2 * engram_rows * engram_columns + mix)
    return WorkCoefficients(
        attn_row=producers * project + shape.num_index_r2_layers * index + compress,
        attn_consumer_row=consumers * project + index_consumers * index,
        ffn_layer_row=ffn,
        experts_layer_row=experts,
        hyper_layer_row=hyper,
        boundary_row=mix * copies * (copies + 2),
        engram_row=engram,
        key_row=4 * shape.head_dim * shape.index_head_dim,
        core_pair=8 * shape.num_attention_heads * shape.head_dim,
        index_pair=index_wide,  # FP4 keys
        logit_row=4 * hidden * shape.vocab_size,
        other_row=producers * (ffn + experts + hyper) + engram,
        other_consumer_row=consumers * (ffn + experts + hyper),
    )
