"""Parameters and bytes of a model's weights, by part.

Only the backbone is counted: the draft head and the vision tower take no part in the steps
`work.py` describes. Byte counts are those of the released formats (docs/model.md, "Checkpoints"):
routed experts FP4, other projections FP8, both with their scales; the rest bf16 or f32.

Read next: `work.py`, which turns them into the traffic of a step.
"""

from mdi_shared.cost.shape import ModelShape

TILE = 32  # FP8 weights carry one scale byte per 32 x 32 tile, FP4 weights one per 32 inputs


def fp8_bytes(rows: int, columns: int) -> int:
    """Bytes of an FP8 matrix with its tile scales."""
    return rows * columns + -(-rows // TILE) * -(-columns // TILE)


def expert_params(shape: ModelShape) -> int:
    """Parameters of one expert, routed or shared: w1, w3 and w2."""
    return 3 * shape.hidden_size * shape.moe_intermediate_size


def expert_bytes(shape: ModelShape) -> int:
    """Bytes of one routed expert in FP4 with its scales."""
    return expert_params(shape) // 2 + expert_params(shape) // TILE


def attention_matrices(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Rows and columns of one layer's FP8 projections: wq_a, wq_b, wkv, wo_a, wo_b."""
    hidden, wide = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    grouped = shape.o_groups * shape.o_lora_rank
    return (
        (shape.q_lora_rank, hidden),
        (wide, shape.q_lora_rank),
        (shape.head_dim, hidden),
        (grouped, wide // shape.o_groups),
        (hidden, grouped),
    )


def engram_matrix(shape: ModelShape) -> tuple[int, int]:
    """Rows and columns of one Engram projection: a key per stream copy and one value."""
    columns = shape.engram_rows_per_token * shape.engram_head_dim
    return shape.hidden_size * (shape.hc_mult + 1), columns


def engram_row_bytes(shape: ModelShape) -> int:
    """Bytes of one Engram table row, FP8 with a scale per 32."""
    return shape.engram_head_dim + shape.engram_head_dim // TILE


def weight_params(shape: ModelShape) -> dict[str, int]:
    """Parameters by part; they sum to the backbone with its Engram tables."""
    layers, hidden, copies = shape.num_hidden_layers, shape.hidden_size, shape.hc_mult
    engram_rows, engram_columns = engram_matrix(shape)
    query_rows, query_columns = _index_query(shape)
    indexers = len(shape.index_source_layer_ids)
    return {
        "routed_experts": layers * shape.n_routed_experts * expert_params(shape),
        "engram_tables": sum(shape.engram_num_embeddings) * shape.engram_head_dim,
        "attention": layers * sum(rows * cols for rows, cols in attention_matrices(shape)),
        "shared_experts": layers * shape.n_shared_experts * expert_params(shape),
        "embed_head": 2 * shape.vocab_size * hidden,
        "engram_projections": shape.num_engram_layers * engram_rows * engram_columns,
        "router": layers * shape.n_routed_experts * hidden,
        "index_compress": indexers * query_rows * query_columns + _index_compress_bf16(shape),
        "hyper_connections": layers * 2 * copies * (copies + 2) * copies * hidden,
        "small": _small_bf16(shape) + _small_f32(shape),
    }


def weight_bytes(shape: ModelShape) -> dict[str, int]:
    """Bytes by part, as stored; the keys are those of `weight_params`."""
    params = weight_params(shape)
    layers, hidden = shape.num_hidden_layers, shape.hidden_size
    inter = shape.moe_intermediate_size
    shared = 2 * fp8_bytes(inter, hidden) + fp8_bytes(hidden, inter)
    indexers = len(shape.index_source_layer_ids)
    return {
        "routed_experts": layers * shape.n_routed_experts * expert_bytes(shape),
        "engram_tables": sum(shape.engram_num_embeddings) * engram_row_bytes(shape),
        "attention": layers * sum(fp8_bytes(*matrix) for matrix in attention_matrices(shape)),
        "shared_experts": layers * shape.n_shared_experts * shared,
        "embed_head": 2 * params["embed_head"],
        "engram_projections": shape.num_engram_layers * fp8_bytes(*engram_matrix(shape)),
        "router": 2 * params["router"],
        "index_compress": indexers * fp8_bytes(*_index_query(shape))
        + 2 * _index_compress_bf16(shape),
        "hyper_connections": 4 * params["hyper_connections"],
        "small": 2 * _small_bf16(shape) + 4 * _small_f32(shape),
    }


def _index_query(shape: ModelShape) -> tuple[int, int]:
    """Rows and columns of an indexer's FP8 query projection."""
    return shape.index_n_heads * shape.index_head_dim, shape.q_lora_rank


def _index_compress_bf16(shape: ModelShape) -> int:
    """Parameters of index head weights, index key projections and KV compressors (with gates)."""
    heads = len(shape.index_source_layer_ids) * shape.index_n_heads * shape.hidden_size
    keys = len(shape.kv_source_layer_ids) * shape.index_head_dim * shape.head_dim
    compressors = 2 * shape.num_kv_source_r2_layers + shape.num_kv_source_r1_layers
    return heads + keys + compressors * shape.head_dim * shape.hidden_size


def _small_bf16(shape: ModelShape) -> int:
    """Norm vectors and the Engram gates' vectors, as parameters."""
    per_layer = 2 * shape.hidden_size + shape.q_lora_rank + shape.head_dim
    sources = len(shape.kv_source_layer_ids) * (shape.head_dim + shape.index_head_dim)
    gates = shape.num_engram_layers * 2 * shape.hc_mult * shape.hidden_size
    return shape.num_hidden_layers * per_layer + shape.hidden_size + sources + gates


def _small_f32(shape: ModelShape) -> int:
    """Attention sinks, router biases (text, image), hyper-connection bases and scales."""
    hyper = 2 * (shape.hc_mult * (shape.hc_mult + 2) + 3)
    per_layer = shape.num_attention_heads + 2 * shape.n_routed_experts + hyper
    return shape.num_hidden_layers * per_layer
