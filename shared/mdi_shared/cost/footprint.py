"""Parameters and bytes of a model's weights, by part.

Only the backbone is counted: the draft head and the vision tower take no part in the steps
`work.py` describes. Byte counts are those of the released formats (docs/model.md, "Checkpoints"):
routed experts FP4, other projections FP8, both with their scales; the rest bf16 or f32.

Read next: `work.py`, which turns them into the traffic of a step.
"""

from collections.abc import Callable

from mdi_shared.cost.shape import ModelShape

TILE = 32  # FP8 weights carry one scale byte per 32 x 32 tile, FP4 weights one per 32 inputs

# How many matrices, the bytes of one with so many rows and columns, rows, columns.
Matrices = tuple[int, Callable[[int, int], int], int, int]


def fp4_bytes(rows: int, columns: int) -> int:
    """Bytes of an FP4 matrix with its scales."""
    return rows * columns // 2 + rows * columns // TILE


def fp8_bytes(rows: int, columns: int) -> int:
    """Bytes of an FP8 matrix with its tile scales."""
    return rows * columns + -(-rows // TILE) * -(-columns // TILE)


def fp8_row_bytes(rows: int, columns: int) -> int:
    """Bytes of an FP8 table whose rows are read one by one: a scale per 32 of each row."""
    return rows * (columns + columns // TILE)


def bf16_bytes(rows: int, columns: int) -> int:
    """Bytes of a bf16 matrix."""
    return 2 * rows * columns


def f32_bytes(rows: int, columns: int) -> int:
    """Bytes of an f32 matrix."""
    return 4 * rows * columns


def expert_params(shape: ModelShape) -> int:
    """Parameters of one expert, routed or shared: w1, w3 and w2."""
    return 3 * shape.hidden_size * shape.moe_intermediate_size


def expert_bytes(shape: ModelShape) -> int:
    """Bytes of one routed expert in FP4 with its scales."""
    return fp4_bytes(3 * shape.moe_intermediate_size, shape.hidden_size)


def attention_matrices(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Rows and columns of one layer's FP8 projections: wq_a, wq_b, wkv, wo_a, wo_b."""
    hidden, wide = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    grouped, low = shape.o_groups * shape.o_lora_rank, shape.q_lora_rank
    wo_a = (grouped, wide // shape.o_groups)
    return (low, hidden), (wide, low), (shape.head_dim, hidden), wo_a, (hidden, grouped)


def engram_matrix(shape: ModelShape) -> tuple[int, int]:
    """Rows and columns of one Engram projection: a key per stream copy and one value."""
    columns = shape.engram_rows_per_token * shape.engram_head_dim
    return shape.hidden_size * (shape.hc_mult + 1), columns


def weight_params(shape: ModelShape) -> dict[str, int]:
    """Parameters by part; they sum to the backbone with its Engram tables."""
    return {
        part: sum(n * rows * columns for n, _, rows, columns in stored)
        for part, stored in _weights(shape).items()
    }


def weight_bytes(shape: ModelShape) -> dict[str, int]:
    """Bytes by part, as stored; the keys are those of `weight_params`."""
    return {
        part: sum(n * size(rows, columns) for n, size, rows, columns in stored)
        for part, stored in _weights(shape).items()
    }


def _weights(shape: ModelShape) -> dict[str, list[Matrices]]:
    """Every weight of the backbone, vectors as matrices of one row."""
    layers, hidden, inter = shape.num_hidden_layers, shape.hidden_size, shape.moe_intermediate_size
    experts, shared = layers * shape.n_routed_experts, layers * shape.n_shared_experts
    copies, engrams = shape.hc_mult, shape.num_engram_layers
    indexers, sources = len(shape.index_source_layer_ids), len(shape.kv_source_layer_ids)
    heads, mixes = shape.index_n_heads, copies * (copies + 2)
    norms = 2 * hidden + shape.q_lora_rank + shape.head_dim
    # Attention sinks, router biases (text, image), hyper-connection bases and scales.
    constants = shape.num_attention_heads + 2 * shape.n_routed_experts + 2 * (mixes + 3)
    return {
        "routed_experts": [(experts, fp4_bytes, 3 * inter, hidden)],
        "engram_tables": [(1, fp8_row_bytes, sum(shape.engram_num_embeddings),
                           shape.engram_head_dim)],
        "attention": [(layers, fp8_bytes, *matrix) for matrix in attention_matrices(shape)],
        "shared_experts": [(2 * shared, fp8_bytes, inter, hidden),
                           (shared, fp8_bytes, hidden, inter)],
        "embed_head": [(2, bf16_bytes, shape.vocab_size, hidden)],
        "engram_projections": [(engrams, fp8_bytes, *engram_matrix(shape))],
        "router": [(layers, bf16_bytes, shape.n_routed_experts, hidden)],
        "index_compress": [  # of indexers queries and head weights, of sources keys, compressors
            (indexers, fp8_bytes, heads * shape.index_head_dim, shape.q_lora_rank),
            (indexers, bf16_bytes, heads, hidden),
            (sources, bf16_bytes, shape.index_head_dim, shape.head_dim),
            (shape.num_compressors, bf16_bytes, shape.head_dim, hidden)],
        "hyper_connections": [(2 * layers, f32_bytes, mixes, copies * hidden)],
        "small": [
            (layers, bf16_bytes, 1, norms), (1, bf16_bytes, 1, hidden),
            (sources, bf16_bytes, 1, shape.head_dim + shape.index_head_dim),
            (2 * engrams, bf16_bytes, copies, hidden),  # the gates' vectors
            (layers, f32_bytes, 1, constants)],
    }  # fmt: skip
