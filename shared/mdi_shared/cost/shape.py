"""The dimensions of a model that decide what a step costs, and the bytes that follow from them.

Field names are the checkpoint's own (nested `config.json`). What does not change a cost is left
out: rope, norms' epsilons, special tokens, the draft head and the vision tower. This is not the
executor's model configuration, and it reads no file.

Read next: `footprint.py` (weights), `work.py` (rows, pairs and FLOPs of a step), `step_cost.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import Any

from mdi_shared.errors import ConfigError, Rule, require_rules

SCALE_GROUP = 32  # values per E8M0 scale byte of index keys and window entries


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of one DeepSeek-V4.1-like model; layers are the backbone's.

    `compress_ratios` has one entry per layer: 0 (window only), 2, or 1. All layers from the first
    ratio-1 layer on are consumers: they read the compressed cache of that layer.
    `replay_keep_tokens` > 0 sends only the last so many tokens of a prompt through the consumers
    (bounded replay, compact mode); 0 is off. `name` and `replay_keep_tokens` identify a shape in
    caches. Raises `ConfigError` naming the field, its value and what is allowed.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    hc_mult: int
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    replay_keep_tokens: int = 0

    def __post_init__(self) -> None:
        require_rules(self, self._rules())

    def _rules(self) -> Iterator[Rule]:
        ratios, boundary = self.compress_ratios, self.n_prefill_layer
        yield ("compress_ratios", bool(ratios) and all(r in (0, 1, 2) for r in ratios),
               "needs one of 0, 1, 2 per layer")  # fmt: skip
        yield ("compress_ratios", all(r == 1 for r in ratios[boundary:]),
               "must stay 1 from the first ratio-1 layer on")  # fmt: skip
        sources, indexed = self.kv_source_layer_ids, self.index_source_layer_ids
        for name, layers in (("kv_source_layer_ids", sources), ("index_source_layer_ids", indexed)):
            yield name, list(layers) == sorted(set(layers)), "must be ascending"
            yield (name, all(0 <= i < len(ratios) and ratios[i] for i in layers),
                   "must name layers of ratio 1 or 2")  # fmt: skip
        yield ("kv_source_layer_ids", set(sources) <= set(indexed),
               f"must be among the index sources {indexed}")  # fmt: skip
        candidate = self.candidate_source_layer_id
        yield ("candidate_source_layer_id", candidate in indexed and candidate >= boundary,
               f"must be an index source of ratio 1, from {boundary} on")  # fmt: skip
        yield ("engram_layer_ids", all(0 <= i < boundary for i in self.engram_layer_ids),
               f"must be below the first ratio-1 layer, {boundary}")  # fmt: skip
        yield ("engram_num_embeddings",
               len(self.engram_num_embeddings) == len(self.engram_layer_ids),
               "needs one number of rows per Engram layer")  # fmt: skip
        keep = self.replay_keep_tokens
        yield ("replay_keep_tokens", keep == 0 or keep >= self.sliding_window,
               f"must be 0 (off) or at least sliding_window = {self.sliding_window}")  # fmt: skip

    def __hash__(self) -> int:
        # Caches are keyed by shapes in hot paths; hashing thirty fields there would dominate.
        return hash((self.name, self.replay_keep_tokens))

    # Layers of each kind. Counted once: every step asks for them.

    @cached_property
    def num_hidden_layers(self) -> int:
        return len(self.compress_ratios)

    @cached_property
    def n_prefill_layer(self) -> int:
        """First ratio-1 layer: layers before it are producers, it and all after it consumers."""
        ratios = self.compress_ratios
        return ratios.index(1) if 1 in ratios else len(ratios)

    @cached_property
    def num_producer_layers(self) -> int:
        return self.n_prefill_layer

    @cached_property
    def num_consumer_layers(self) -> int:
        return self.num_hidden_layers - self.n_prefill_layer

    @cached_property
    def num_core_r2_layers(self) -> int:
        """Layers that attend to selected ratio-2 entries."""
        return self.compress_ratios.count(2)

    @cached_property
    def num_core_r1_layers(self) -> int:
        return self.compress_ratios.count(1)

    @cached_property
    def num_index_r2_layers(self) -> int:
        """Layers that score every visible ratio-2 entry."""
        return sum(i < self.n_prefill_layer for i in self.index_source_layer_ids)

    @cached_property
    def num_index_r1_layers(self) -> int:
        """Ratio-1 layers that score every visible entry: up to the candidate source."""
        last = self.candidate_source_layer_id
        return sum(self.n_prefill_layer <= i <= last for i in self.index_source_layer_ids)

    @cached_property
    def num_candidate_layers(self) -> int:
        """Index layers after the candidate source; they score its candidate blocks only."""
        return sum(i > self.candidate_source_layer_id for i in self.index_source_layer_ids)

    @cached_property
    def num_kv_source_r2_layers(self) -> int:
        return sum(i < self.n_prefill_layer for i in self.kv_source_layer_ids)

    @cached_property
    def num_kv_source_r1_layers(self) -> int:
        return len(self.kv_source_layer_ids) - self.num_kv_source_r2_layers

    @property
    def num_compressors(self) -> int:
        """Projections of the KV compressors: ratio-2 ones have a value and a gate."""
        return 2 * self.num_kv_source_r2_layers + self.num_kv_source_r1_layers

    @property
    def num_engram_layers(self) -> int:
        return len(self.engram_layer_ids)

    @property
    def engram_rows_per_token(self) -> int:
        """Table rows one Engram layer looks up per token: one per n-gram size (2..) and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    # Bytes of state (docs/model.md, "Where each state lives")

    @cached_property
    def entry_bytes(self) -> int:
        """One compressed KV entry: E2M1 codes and an E4M3 scale per 16."""
        return self.head_dim // 2 + self.head_dim // 16

    @cached_property
    def index_key_bytes(self) -> int:
        """One index key: E2M1 codes and an E8M0 scale per 32."""
        return self.index_head_dim // 2 + self.index_head_dim // SCALE_GROUP

    @cached_property
    def window_bytes(self) -> int:
        """One token in one layer's window ring: E4M3 codes and an E8M0 scale per 32."""
        return self.head_dim + self.head_dim // SCALE_GROUP

    @cached_property
    def kv_bytes_per_token(self) -> Fraction:
        """Compressed entries and index keys per token of context, all KV sources, exact."""
        entries = Fraction(self.num_kv_source_r2_layers, 2) + self.num_kv_source_r1_layers
        return entries * (self.entry_bytes + self.index_key_bytes)

    def kv_bytes_per_block(self, block_size: int = 128) -> int:
        """Bytes of one KV block of `block_size` tokens, all KV sources."""
        size = self.kv_bytes_per_token * block_size
        if size.denominator != 1:
            raise ConfigError("block_size", block_size, "must hold whole compressed entries: even")
        return size.numerator

    @property
    def ring_bytes_per_slot(self) -> int:
        return self.num_hidden_layers * self.sliding_window * self.window_bytes

    @property
    def tail_bytes_per_slot(self) -> int:
        """Value and gate (f32) of the one token a ratio-2 compressor may have to keep."""
        return self.num_kv_source_r2_layers * 2 * self.head_dim * 4

    @property
    def state_bytes_per_slot(self) -> int:
        """Rings and tails of one sequence, without speculation; its few n-gram ids not counted."""
        return self.ring_bytes_per_slot + self.tail_bytes_per_slot


def shape_by_name(name: str) -> ModelShape:
    """Return a built-in shape; raise `ConfigError` listing the names when there is none such."""
    if name not in SHAPES:
        raise ConfigError("model", name, f"must be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_from_mapping(stated: Mapping[str, Any]) -> ModelShape:
    """Return the shape that `asdict` took apart, lists standing for tuples as they do in JSON.

    Raises `ConfigError` for fields missing or unknown.
    """
    known = {field.name for field in fields(ModelShape)}
    for name in sorted(set(stated) - known):
        raise ConfigError(f"shape.{name}", stated[name], "unknown dimension")
    for name in sorted(known - set(stated) - {"replay_keep_tokens"}):
        raise ConfigError(f"shape.{name}", None, "is missing")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stated.items()}
    return ModelShape(**values)


# DeepSeek-V4.1-Flash as released (config.json of deepseek-ai/DeepSeek-V4.1-Flash).
V41_FLASH = ModelShape(
    name="v41-flash",
    vocab_size=129_280,
    hidden_size=5_120,
    num_attention_heads=64,
    head_dim=512,
    q_lora_rank=1_280,
    o_lora_rank=1_024,
    o_groups=8,
    sliding_window=128,
    compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2_048,
    candidate_block_size=8,
    n_routed_experts=384,
    num_experts_per_tok=6,
    n_shared_experts=1,
    moe_intermediate_size=2_304,
    hc_mult=4,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384_006_168, 384_016_682),
    engram_max_ngram_size=4,
    engram_n_heads=8,
    engram_head_dim=256,
)

# Every structural feature of the real model in 8.6 M parameters (docs/model.md, "Dimensions").
TINY = ModelShape(
    name="tiny",
    vocab_size=1_024,
    hidden_size=128,
    num_attention_heads=8,
    head_dim=64,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    sliding_window=128,
    compress_ratios=(0,) * 2 + (2,) * 4 + (1,) * 6,
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8, 10),
    index_n_heads=16,
    index_head_dim=32,
    index_topk=32,
    candidate_source_layer_id=6,
    candidate_topk_blocks=8,
    candidate_block_size=8,
    n_routed_experts=16,
    num_experts_per_tok=3,
    n_shared_experts=1,
    moe_intermediate_size=64,
    hc_mult=4,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(3_144, 3_424),
    engram_max_ngram_size=4,
    engram_n_heads=2,
    engram_head_dim=32,
)

SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in (V41_FLASH, TINY)}
