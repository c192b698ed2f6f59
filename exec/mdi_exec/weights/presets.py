"""Model dimensions to make checkpoints of: the released ones, a slice of them, and two small ones.

Everything is a `config.json` in the released, nested form (docs/model.md, "Dimensions"). No
weights are here (`make_checkpoint.py`), and no run-time options.
"""

from typing import Any

from mdi_exec.model.config import LayerPlan, ModelConfig
from mdi_shared.errors import ConfigError

Config = dict[str, Any]

MANY_EXPERTS = 4_096
MANY_LAYERS, FEW_LAYERS = 40, 6  # a slice has at most all layers, at least one of every kind
SLICE_SOURCE_STRIDE = 6  # layers from one ratio-2 KV source to the next, as in the release
SLICE_REINDEX_STRIDE = 4  # consumer layers from one selection to the next, as in the release
SLICE_ENGRAM_LAYERS = (0, 13)
SLICE_ENGRAM_VOCAB = 100_000  # start of the prime search; 16,000,000 in the release (94 GiB each)

_SAME_IN_ALL: Config = {
    "model_type": "deepseek_v41_text", "num_key_value_heads": 1, "hidden_act": "silu",
    "rms_norm_eps": 1e-20, "attention_bias": False, "tie_word_embeddings": False,
    "rope_theta": 10_000, "compress_rope_theta": 160_000, "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "sliding_window": 128, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "engram_max_ngram_size": 4, "engram_pad_token_id": 2, "dspark_block_size": 5,
}  # fmt: skip

_FLASH: Config = {
    "vocab_size": 129_280, "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280,
    "o_groups": 8, "o_lora_rank": 1024, "max_position_embeddings": 1_048_576,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65_536},
    "n_routed_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 2304,
    "swiglu_limit": 10.0, "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    "engram_layer_ids": [1, 14], "engram_vocab_size": 16_000_000, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_compressed_vocab_size": 99_092, "num_nextn_predict_layers": 3,
    "dspark_noise_token_id": 128_799, "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
_FLASH_VISION: Config = {
    "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16,
    "intermediate_size": 2816, "max_image_tokens": 1024, "min_pixels": 295_936,
}  # fmt: skip

_TINY: Config = {
    "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 8,
    "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32,
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 128},
    "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "swiglu_limit": 2.5, "compress_ratios": [0] * 2 + [2] * 4 + [1] * 6 + [0] * 3,
    "kv_source_layer_ids": [2, 4, 6], "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 32,
    "candidate_source_layer_id": 6, "candidate_topk_blocks": 8, "candidate_block_size": 8,
    "engram_layer_ids": [1, 4], "engram_vocab_size": 500, "engram_n_heads": 2,
    "engram_head_dim": 32, "num_nextn_predict_layers": 3, "dspark_noise_token_id": 1023,
    "dspark_target_layer_ids": [9, 10, 11], "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
_TINY_VISION: Config = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 96, "max_image_tokens": 64, "min_pixels": 7056,
}  # fmt: skip

_SMALL: Config = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 16,
    "head_dim": 128, "qk_rope_head_dim": 32, "q_lora_rank": 256, "o_groups": 4,
    "o_lora_rank": 128, "max_position_embeddings": 32_768,
    "rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 4096},
    "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384,
    "swiglu_limit": 10.0, "compress_ratios": [0] * 2 + [2] * 6 + [1] * 8 + [0] * 3,
    "kv_source_layer_ids": [2, 5, 8], "index_source_layer_ids": [2, 5, 8, 12],
    "index_n_heads": 16, "index_head_dim": 64, "index_topk": 128,
    "candidate_source_layer_id": 8, "candidate_topk_blocks": 64, "candidate_block_size": 8,
    "engram_layer_ids": [1, 5], "engram_vocab_size": 50_000, "engram_n_heads": 4,
    "engram_head_dim": 64, "num_nextn_predict_layers": 3, "dspark_noise_token_id": 8191,
    "dspark_target_layer_ids": [13, 14, 15], "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 16, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
_SMALL_VISION: Config = {**_TINY_VISION, "num_hidden_layers": 4, "hidden_size": 128}

_RELEASED_IMAGE_ID = 129_264
PRESETS = ("tiny", "small", "flash-slice")


def released_config() -> Config:
    """Return the config of the released V4.1-Flash."""
    return _nested(_FLASH, _FLASH_VISION, image_token_id=_RELEASED_IMAGE_ID)


def preset_config(
    preset: str, *, layers: int | None = None, num_experts: int | None = None,
    with_draft: bool = True, with_vision: bool = True,
) -> Config:  # fmt: skip
    """Return a preset's config, Engram's vocabulary-dependent sizes still missing.

    `layers` (6 .. 40, 6 unless given) goes with "flash-slice" only. `num_experts` replaces the
    routed experts of a layer. Raises `ConfigError` for an unknown preset or a wrong size.
    """
    if preset not in PRESETS:
        raise ConfigError("preset", preset, f"must be one of {', '.join(PRESETS)}")
    if preset == "flash-slice":
        text = _slice(FEW_LAYERS if layers is None else layers)
        config = _nested(text, _FLASH_VISION, image_token_id=_RELEASED_IMAGE_ID)
    elif layers is not None:
        raise ConfigError("layers", layers, f"preset {preset!r} has its own number of layers; "
                          "only 'flash-slice' takes one")  # fmt: skip
    elif preset == "tiny":
        config = _nested(_TINY, _TINY_VISION, image_token_id=1022)
    else:
        config = _nested(_SMALL, _SMALL_VISION, image_token_id=8190)
    text = config["text_config"]
    if num_experts is not None:
        least = text["num_experts_per_tok"]
        if not least <= num_experts <= MANY_EXPERTS:
            raise ConfigError("experts", num_experts, f"must be from {least}, those a token takes, "
                              f"to {MANY_EXPERTS}")  # fmt: skip
        text["n_routed_experts"] = num_experts
    if not with_draft:
        text["num_nextn_predict_layers"] = 0
        text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    if not with_vision:
        del config["vision_config"]
    return config


def layer_kinds(config: ModelConfig) -> list[str]:
    """Name what each layer of the backbone computes; layers of one kind take the same time.

    The shortest slice, six layers, has every kind of the release once: "window+engram",
    "source r2", "reuse r2", "candidate source r1", "re-index r1", "reuse r1". "r2" and "r1" are
    tokens per compressed entry. A source compresses and selects among all its entries; the
    candidate source also keeps the blocks that "re-index" layers select among; "reuse" layers read
    the selection of the layer before. Engram is a part of its own that some layer comes with.
    """
    plans = [config.layer_plan(layer) for layer in range(config.num_hidden_layers)]
    return [
        _kind(plan) + ("+engram" if plan.engram_index is not None else "") for plan in plans
    ]  # fmt: skip


def _kind(plan: LayerPlan) -> str:
    if not plan.ratio:
        return "window"
    if plan.owns_compressor:
        what = "candidate source" if plan.is_candidate_source else "source"
    elif plan.is_index_source:
        what = "re-index" if plan.uses_candidates else "index"
    else:
        what = "reuse"
    return f"{what} r{plan.ratio}"


def _slice(layers: int) -> Config:
    """The released dimensions with fewer layers: window, ratio-2 sources, then ratio 1."""
    if not FEW_LAYERS <= layers <= MANY_LAYERS:
        raise ConfigError("layers", layers, f"must lie in {FEW_LAYERS} .. {MANY_LAYERS}: fewer "
                          "would leave out a kind of layer")  # fmt: skip
    first = layers // 2  # of the consumer layers
    sources = [*range(1, first, SLICE_SOURCE_STRIDE), first]
    text = {
        **_FLASH,
        "num_hidden_layers": layers,
        "compress_ratios": [0] + [2] * (first - 1) + [1] * (layers - first) + [0] * 3,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": [*sources, *range(first + 1, layers, SLICE_REINDEX_STRIDE)],
        "candidate_source_layer_id": first,
        "engram_layer_ids": [layer for layer in SLICE_ENGRAM_LAYERS if layer < first],
        "engram_vocab_size": SLICE_ENGRAM_VOCAB,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
    }
    del text["engram_num_embeddings"], text["engram_compressed_vocab_size"]
    return text


def _nested(text: Config, vision: Config, *, image_token_id: int) -> Config:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {**_SAME_IN_ALL, **text},
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "patch_size": 14,
            "rope_theta": 10_000,
            "downsample_ratio": 3,
            "max_wh_ratio": None,
            **vision,
        },
    }
