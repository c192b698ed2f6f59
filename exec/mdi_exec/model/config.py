"""Dimensions and layer plan of a DeepSeek-V4.1 model, validated once, when they are made.

Field names are those of the released `config.json`. This is not a place for run-time options
(batch sizes, memory): those belong to the engine. Read next: `config_reader.py` (the two forms a
config file comes in), `transformer.py` (who uses the plan).
"""

from dataclasses import dataclass, fields

from mdi_shared.cost.shape import ModelShape
from mdi_shared.errors import ConfigError

QUANT_GROUP = 32  # inputs per activation scale, and side of an FP8 weight tile
RATIOS = (0, 1, 2)  # tokens per compressed KV entry; 0 = window only


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Dimensions of the image tower; its tensors are named, the tower itself is not built here."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer owns and what it borrows from an earlier one.

    `ratio` is tokens per compressed entry (0 = window only). `kv_source` and `index_source` are
    the layers whose compressed cache and whose selection this layer reads, None without either.
    `engram_index` counts Engram layers. A draft layer's `index` continues behind the last layer.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    uses_candidates: bool
    engram_index: int | None
    is_consumer: bool
    is_draft: bool

    @property
    def owns_compressor(self) -> bool:
        return self.kv_source == self.index

    @property
    def owns_index_keys(self) -> bool:
        return self.kv_source == self.index

    @property
    def is_index_source(self) -> bool:
        return self.index_source == self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the text model's shape depends on. Raises `ConfigError` naming field and value.

    Lengths are tokens, sizes are elements. `compress_ratios` covers layers, then draft layers.
    `engram_num_embeddings` has one row count per Engram layer, the sum of its primes.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_length: int
    rope_beta_fast: float
    rope_beta_slow: float
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _check_dimensions(self)
        _check_groups(self)
        _check_candidates(self)
        _check_engram_and_draft(self)

    @property
    def n_prefill_layer(self) -> int:
        """First consumer layer: the first of ratio 1; num_hidden_layers when there is none."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def hc_width(self) -> int:
        """Coefficients per hyper-connection set: read, write, and n x n mixing."""
        return (2 + self.hc_mult) * self.hc_mult

    def layer_plan(self, layer: int) -> LayerPlan:
        """Return the plan of `layer` in 0 .. num_hidden_layers + num_nextn_predict_layers - 1."""
        ratio, is_draft = self.compress_ratios[layer], layer >= self.num_hidden_layers
        kv_source = index_source = None
        if ratio:
            kv_source = max(s for s in self.kv_source_layer_ids if s <= layer)
            index_source = max(s for s in self.index_source_layer_ids if s <= layer)
        candidate = self.candidate_source_layer_id
        return LayerPlan(
            index=layer,
            ratio=ratio,
            kv_source=kv_source,
            index_source=index_source,
            is_candidate_source=layer == candidate,
            uses_candidates=candidate is not None and layer == index_source and layer > candidate,
            engram_index=(
                self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None
            ),
            is_consumer=self.n_prefill_layer <= layer < self.num_hidden_layers,
            is_draft=is_draft,
        )


# A model has one shared expert everywhere (docs/model.md, "Dimensions"); `config_reader.py` makes
# sure.
_SHARED_EXPERTS = 1


def shape_of(config: ModelConfig, name: str, *, replay_keep_tokens: int = 0) -> ModelShape:
    """Return what of `config` decides what a step costs, for `mdi_shared.cost` and for traces."""
    own = {"name", "compress_ratios", "n_shared_experts", "replay_keep_tokens"}
    same = {f.name: getattr(config, f.name) for f in fields(ModelShape) if f.name not in own}
    return ModelShape(
        name=name,
        compress_ratios=config.compress_ratios[: config.num_hidden_layers],
        n_shared_experts=_SHARED_EXPERTS,
        replay_keep_tokens=replay_keep_tokens,
        **same,
    )


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise `ConfigError(field, value, allowed)` unless `holds`."""
    if not holds:
        raise ConfigError(field, value, allowed)


_MAY_BE_ZERO = (
    "num_nextn_predict_layers", "engram_pad_token_id", "dspark_noise_token_id", "bos_token_id",
    "eos_token_id", "pad_token_id", "image_token_id", "candidate_source_layer_id",
)  # fmt: skip
_WHOLE_GROUPS = (
    "hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size",
    "index_head_dim", "engram_head_dim",
)  # fmt: skip


# Far above every model of this kind, and low enough that nothing larger than it should is made.
_MOST_INT, _MOST_FLOAT = 2**20, 1e9
_MOST = {
    "vocab_size": 2**24, "max_position_embeddings": 2**30, "rope_original_length": 2**30,
    "num_hidden_layers": 1_024, "num_nextn_predict_layers": 64, "num_attention_heads": 4_096,
    "head_dim": 4_096, "index_n_heads": 4_096, "index_head_dim": 4_096, "sliding_window": 65_536,
    "candidate_block_size": 4_096, "n_routed_experts": 16_384, "dspark_n_routed_experts": 16_384,
    "hc_mult": 32, "hc_sinkhorn_iters": 1_000, "engram_max_ngram_size": 16, "engram_n_heads": 256,
    "engram_head_dim": 16_384, "engram_vocab_size": 2**32, "engram_compressed_vocab_size": 2**24,
    **{f"{name}_token_id": 2**24 for name in
       ("engram_pad", "dspark_noise", "bos", "eos", "pad", "image")},
    "rms_norm_eps": 0.1, "hc_eps": 0.1, "swiglu_limit": 1e6, "routed_scaling_factor": 1e6,
}  # fmt: skip


def _check_dimensions(c: ModelConfig) -> None:
    for name in c.__dataclass_fields__:
        value = getattr(c, name)
        if isinstance(value, int | float):
            most = _MOST.get(name, _MOST_INT if isinstance(value, int) else _MOST_FLOAT)
            is_low = value < 0 or (value == 0 and name not in _MAY_BE_ZERO)
            require(not is_low and value <= most, name, value,
                    f"must be {'at least' if name in _MAY_BE_ZERO else 'above'} 0 and at most "
                    f"{most:,}")  # fmt: skip
    for name in _WHOLE_GROUPS:
        require(getattr(c, name) % QUANT_GROUP == 0, name, getattr(c, name),
                f"must be a multiple of {QUANT_GROUP}, the inputs one scale covers")  # fmt: skip
    most = min(c.head_dim, c.index_head_dim)
    require(c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= most, "qk_rope_head_dim",
            c.qk_rope_head_dim, f"must be even and at most {most}")  # fmt: skip
    require(c.num_attention_heads % c.o_groups == 0, "o_groups", c.o_groups,
            f"must divide num_attention_heads = {c.num_attention_heads}")  # fmt: skip
    experts = c.n_routed_experts
    require(c.num_experts_per_tok <= experts, "num_experts_per_tok", c.num_experts_per_tok,
            f"must be at most n_routed_experts = {experts}")  # fmt: skip
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id",
                 "engram_pad_token_id", "dspark_noise_token_id"):  # fmt: skip
        require(getattr(c, name) < c.vocab_size, name, getattr(c, name),
                f"must be below vocab_size = {c.vocab_size}")  # fmt: skip


def _check_groups(c: ModelConfig) -> None:
    """KV groups: KV sources are index sources, and a group has one ratio (docs/model.md)."""
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    require(len(ratios) == layers + c.num_nextn_predict_layers, "compress_ratios", ratios,
            f"must have num_hidden_layers + num_nextn_predict_layers = "
            f"{layers + c.num_nextn_predict_layers} entries")  # fmt: skip
    require(all(r in RATIOS for r in ratios), "compress_ratios", ratios, "each must be 0, 1 or 2")
    require(not any(ratios[layers:]), "compress_ratios", ratios, "draft layers must have ratio 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        require(all(a < b for a, b in zip((-1, *ids), (*ids, layers), strict=True)), name, ids,
                f"must ascend and lie in 0 .. {layers - 1}")  # fmt: skip
    sources = c.kv_source_layer_ids
    require(all(s in c.index_source_layer_ids for s in sources), "kv_source_layer_ids", sources,
            f"each must be among index_source_layer_ids = {c.index_source_layer_ids}")  # fmt: skip
    require(all(ratios[s] for s in c.index_source_layer_ids), "index_source_layer_ids",
            c.index_source_layer_ids, "each must be a layer of compress ratio above 0")  # fmt: skip
    for layer in range(layers):
        before = [s for s in sources if s <= layer]
        want = ratios[before[-1]] if before else 0
        require(ratios[layer] == want, f"compress_ratios[{layer}]", ratios[layer],
                f"must be {want}, the ratio of its KV source "
                f"{before[-1] if before else '(none)'}")  # fmt: skip
    first = c.n_prefill_layer
    require(all(r == 1 for r in ratios[first:layers]), "compress_ratios", ratios,
            f"every layer from {first}, the first of ratio 1, must have ratio 1")  # fmt: skip


def _check_candidates(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    if source is None:
        return
    require(source in c.index_source_layer_ids, "candidate_source_layer_id", source,
            f"must be among index_source_layer_ids = {c.index_source_layer_ids}")  # fmt: skip
    crossing = [s for s in c.kv_source_layer_ids if s > source]
    require(not crossing, "candidate_source_layer_id", source,
            f"KV sources {crossing} lie behind it, but its users must read its cache")  # fmt: skip
    entries = c.candidate_topk_blocks * c.candidate_block_size
    require(entries >= c.index_topk, "candidate_topk_blocks", c.candidate_topk_blocks,
            f"times candidate_block_size it gives {entries} entries; must be at least "
            f"index_topk = {c.index_topk}")  # fmt: skip


def _check_engram_and_draft(c: ModelConfig) -> None:
    first, layers = c.n_prefill_layer, c.num_hidden_layers
    ids = c.engram_layer_ids
    require(all(a < b for a, b in zip((-1, *ids), (*ids, first), strict=True)), "engram_layer_ids",
            ids, f"must ascend and be producer layers, below {first}")  # fmt: skip
    require(len(c.engram_num_embeddings) == len(ids), "engram_num_embeddings",
            c.engram_num_embeddings, f"must have one entry per Engram layer {ids}")  # fmt: skip
    require(c.engram_max_ngram_size >= 2, "engram_max_ngram_size", c.engram_max_ngram_size,
            "must be at least 2")  # fmt: skip
    targets = c.dspark_target_layer_ids
    require(all(0 <= t < layers for t in targets), "dspark_target_layer_ids", targets,
            f"each must lie in 0 .. {layers - 1}")  # fmt: skip
    require(len({t >= first for t in targets}) <= 1, "dspark_target_layer_ids", targets,
            f"must all be below, or all from, n_prefill_layer = {first}")  # fmt: skip
