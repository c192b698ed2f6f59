"""The tensors a DeepSeek-V4.1 checkpoint must hold: name, dtype and shape, from the config alone.

This is a table, not a reader: it opens nothing. Names are the released ones, without the optional
`model.` prefix; `.scale` stands beside `.weight` (docs/model.md, "Checkpoints"). Read next:
`checkpoint.py` (compares files with the table), `weights/random.py` (fills it with numbers).
"""

import math
from typing import NamedTuple

from mdi_exec.model.config import LayerPlan, ModelConfig, VisionConfig

TILE = 32  # rows and columns of an FP8 weight under one scale
FP4_GROUP = 32  # inputs of an FP4 weight row under one scale
ENGRAM_GROUP = 32  # columns of an Engram table row under one scale

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class TensorSpec(NamedTuple):
    """One tensor: dtype as safetensors spells it, and shape (FP4 is I8, two elements a byte)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


class _Scope:
    """The table being filled, under one name prefix."""

    def __init__(self, table: dict[str, TensorSpec], prefix: str = "") -> None:
        self.table = table
        self.prefix = prefix

    def sub(self, name: str) -> "_Scope":
        return _Scope(self.table, f"{self.prefix}{name}.")

    def add(self, name: str, dtype: str, *shape: int) -> None:
        full_name = self.prefix + name
        assert full_name not in self.table, f"{full_name} is named twice"
        self.table[full_name] = TensorSpec(dtype, shape)

    def bf16(self, name: str, *shape: int) -> None:
        self.add(name, "BF16", *shape)

    def f32(self, name: str, *shape: int) -> None:
        self.add(name, "F32", *shape)

    def norm(self, name: str, width: int) -> None:
        self.bf16(f"{name}.weight", width)

    def linear(self, name: str, rows: int, columns: int) -> None:
        """A bfloat16 weight with bias."""
        self.bf16(f"{name}.weight", rows, columns)
        self.bf16(f"{name}.bias", rows)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self.add(f"{name}.weight", "F8_E4M3", rows, columns)
        self.add(f"{name}.scale", "F8_E8M0", -(-rows // TILE), -(-columns // TILE))

    def fp4(self, name: str, rows: int, columns: int) -> None:
        self.add(f"{name}.weight", "I8", rows, columns // 2)
        self.add(f"{name}.scale", "F8_E8M0", rows, columns // FP4_GROUP)


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return every tensor of `config`, text model first, then draft head, then image tower."""
    table: dict[str, TensorSpec] = {}
    root = _Scope(table)
    root.bf16("embed.weight", config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        _add_layer(root.sub(f"layers.{layer}"), config, config.layer_plan(layer))
    root.norm("norm", config.hidden_size)
    root.bf16("head.weight", config.vocab_size, config.hidden_size)
    _add_draft_head(root, config)
    if config.vision is not None:
        _add_image_tower(root, config.vision, config.hidden_size)
    return table


def _add_layer(scope: _Scope, c: ModelConfig, plan: LayerPlan) -> None:
    for name in ("attn_norm", "ffn_norm"):
        scope.norm(name, c.hidden_size)
    for name in ("hc_attn", "hc_ffn"):
        scope.f32(f"{name}_fn", c.hc_width, c.hc_mult * c.hidden_size)
        scope.f32(f"{name}_base", c.hc_width)
        scope.f32(f"{name}_scale", 3)  # read, write, mix
    _add_attention(scope.sub("attn"), c, plan)
    _add_experts(scope.sub("ffn"), c, plan)
    if plan.engram_index is not None:
        _add_engram(scope.sub("engram"), c, plan.engram_index)


def _add_attention(scope: _Scope, c: ModelConfig, plan: LayerPlan) -> None:
    heads_width = c.num_attention_heads * c.head_dim
    scope.f32("attn_sink", c.num_attention_heads)
    scope.fp8("wq_a", c.q_lora_rank, c.hidden_size)
    scope.norm("q_norm", c.q_lora_rank)
    scope.fp8("wq_b", heads_width, c.q_lora_rank)
    scope.fp8("wkv", c.head_dim, c.hidden_size)
    scope.norm("kv_norm", c.head_dim)
    scope.fp8("wo_a", c.o_groups * c.o_lora_rank, heads_width // c.o_groups)
    scope.fp8("wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
    if plan.owns_compressor:
        compressor = scope.sub("compressor")
        compressor.bf16("wkv.weight", c.head_dim, c.hidden_size)
        if plan.ratio > 1:  # with one token per entry there is nothing to weigh
            compressor.bf16("wgate.weight", c.head_dim, c.hidden_size)
        compressor.norm("norm", c.head_dim)
    if plan.is_index_source:
        indexer = scope.sub("indexer")
        indexer.fp8("wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        indexer.bf16("weights_proj.weight", c.index_n_heads, c.hidden_size)
        if plan.owns_index_keys:
            indexer.bf16("wk.weight", c.index_head_dim, c.head_dim)
            indexer.norm("k_norm", c.index_head_dim)


def _add_experts(scope: _Scope, c: ModelConfig, plan: LayerPlan) -> None:
    num_experts = c.dspark_n_routed_experts if plan.is_draft else c.n_routed_experts
    scope.bf16("gate.weight", num_experts, c.hidden_size)
    scope.f32("gate.bias", num_experts)
    scope.f32("gate.bias_vl", num_experts)
    inner = c.moe_intermediate_size
    for expert in range(num_experts):
        routed = scope.sub(f"experts.{expert}")
        routed.fp4("w1", inner, c.hidden_size)
        routed.fp4("w2", c.hidden_size, inner)
        routed.fp4("w3", inner, c.hidden_size)
    shared = scope.sub("shared_experts")
    shared.fp8("w1", inner, c.hidden_size)
    shared.fp8("w2", c.hidden_size, inner)
    shared.fp8("w3", inner, c.hidden_size)


def _add_engram(scope: _Scope, c: ModelConfig, engram_index: int) -> None:
    rows = c.engram_num_embeddings[engram_index]
    scope.add("embed.weight", "F8_E4M3", rows, c.engram_head_dim)
    scope.add("embed.scale", "F8_E8M0", rows, c.engram_head_dim // ENGRAM_GROUP)
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    scope.fp8("wkv", (c.hc_mult + 1) * c.hidden_size, columns)
    scope.bf16("q_weight", c.hc_mult, c.hidden_size)
    scope.bf16("k_weight", c.hc_mult, c.hidden_size)


def _add_draft_head(root: _Scope, c: ModelConfig) -> None:
    """Draft layers; the first one also reads the model's features, the last one writes tokens."""
    for i in range(c.num_nextn_predict_layers):
        _add_layer(root.sub(f"mtp.{i}"), c, c.layer_plan(c.num_hidden_layers + i))
    if not c.num_nextn_predict_layers:
        return
    first, last = root.sub("mtp.0"), root.sub(f"mtp.{c.num_nextn_predict_layers - 1}")
    first.fp8("main_proj", c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
    first.norm("main_norm", c.hidden_size)
    last.norm("norm", c.hidden_size)
    last.bf16("markov_head.embed.weight", c.vocab_size, c.dspark_markov_rank)
    last.bf16("markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
    last.bf16("confidence_head.proj.weight", 1, c.hidden_size + c.dspark_markov_rank)


def _add_image_tower(root: _Scope, v: VisionConfig, text_width: int) -> None:
    vision, width = root.sub("vision"), v.hidden_size
    vision.linear("patch_embed.proj", width, 3 * v.patch_size**2)
    for i in range(v.num_hidden_layers):
        block = vision.sub(f"blocks.{i}")
        block.norm("norm1", width)
        block.linear("attn.wqkv", 3 * width, width)
        block.linear("attn.wo", width, width)
        block.norm("norm2", width)
        block.bf16("mlp.w1.weight", 2 * v.intermediate_size, width)
        block.bf16("mlp.w2.weight", width, v.intermediate_size)
    vision.norm("norm", width)
    aligner = root.sub("aligner")
    aligner.linear("w1", text_width, width * v.downsample_ratio**2)
    aligner.linear("w2", text_width, text_width)
    for name in ("image_start", "image_end", "image_newline"):
        root.bf16(name, text_width)
