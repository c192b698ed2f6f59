"""Reading a config.json: the nested form of the release, or the flat form beside it.

One table row per field: nested name, flat name. Values this runtime has exactly one
implementation for (`_FIXED`) must agree when they are present; other keys of the file (training
options, library versions) have no meaning here and are left alone. The flat form describes the
text model only here: images need the nested form's `vision_config`.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from mdi_exec.model.config import ModelConfig, VisionConfig, require
from mdi_shared.json_input import read_json


class _Missing:
    """What a key that is not there reads as; null is a value."""

    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


class _Name(NamedTuple):
    """Where a field stands: `section.key` in the nested form, and its key in the flat form."""

    nested: str
    flat: str


MODEL_TYPE = "deepseek_v41"

# Only fields whose place or name differs; any other is text_config.<field>, flat <field>.
_NAMES = {
    "hidden_size": _Name("text_config.hidden_size", "dim"),
    "num_hidden_layers": _Name("text_config.num_hidden_layers", "n_layers"),
    "num_nextn_predict_layers": _Name("text_config.num_nextn_predict_layers", "n_mtp_layers"),
    "rms_norm_eps": _Name("text_config.rms_norm_eps", "norm_eps"),
    "num_attention_heads": _Name("text_config.num_attention_heads", "n_heads"),
    "qk_rope_head_dim": _Name("text_config.qk_rope_head_dim", "rope_head_dim"),
    "sliding_window": _Name("text_config.sliding_window", "window_size"),
    "kv_source_layer_ids": _Name("text_config.kv_source_layer_ids", "kv_source_layers"),
    "index_source_layer_ids": _Name("text_config.index_source_layer_ids", "index_source_layers"),
    "candidate_source_layer_id": _Name(
        "text_config.candidate_source_layer_id", "candidate_source_layer"
    ),
    "rope_factor": _Name("text_config.rope_scaling.factor", "rope_factor"),
    "rope_original_length": _Name(
        "text_config.rope_scaling.original_max_position_embeddings", "original_seq_len"
    ),
    "rope_beta_fast": _Name("text_config.rope_scaling.beta_fast", "beta_fast"),
    "rope_beta_slow": _Name("text_config.rope_scaling.beta_slow", "beta_slow"),
    "num_experts_per_tok": _Name("text_config.num_experts_per_tok", "n_activated_experts"),
    "moe_intermediate_size": _Name("text_config.moe_intermediate_size", "moe_inter_dim"),
    "routed_scaling_factor": _Name("text_config.routed_scaling_factor", "route_scale"),
    "engram_pad_token_id": _Name("text_config.engram_pad_token_id", "engram_pad_id"),
    "dspark_num_experts_per_tok": _Name(
        "text_config.dspark_num_experts_per_tok", "dspark_n_activated_experts"
    ),
    "bos_token_id": _Name("bos_token_id", "bos_token_id"),
    "eos_token_id": _Name("eos_token_id", "eos_token_id"),
    "pad_token_id": _Name("pad_token_id", "pad_token_id"),
    "image_token_id": _Name("image_token_id", "image_token_id"),
}

# The flat form does not carry these; the released model's token ids stand for themselves.
_FLAT_TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_FLAT_IMAGE_TOKEN_ID = 129_264

# (nested name, flat name, the one value there is an implementation for)
_FIXED: tuple[tuple[str, str, object], ...] = (
    ("text_config.hidden_act", "hidden_act", "silu"),
    ("text_config.attention_bias", "attention_bias", False),
    ("text_config.tie_word_embeddings", "tie_word_embeddings", False),
    ("text_config.num_key_value_heads", "n_kv_heads", 1),
    ("text_config.n_shared_experts", "n_shared_experts", 1),
    ("text_config.scoring_func", "score_func", "sqrtsoftplus"),
    ("text_config.topk_method", "topk_method", "noaux_tc"),
    ("text_config.norm_topk_prob", "norm_topk_prob", True),
    ("text_config.gate_temp", "gate_temp", 1.0),
    ("text_config.hc_shifted", "hc_shifted", True),
    ("text_config.use_fp4_sparse_kv", "use_fp4_sparse_kv", True),
    ("text_config.dspark_target_attn_input", "dspark_target_attn_input", True),
    ("text_config.rope_scaling.rope_type", "rope_type", "yarn"),
    ("quantization_config.quant_method", "dtype", "fp8"),
    ("dtype", "torch_dtype", "bfloat16"),
    ("quantization_config.activation_scheme", "activation_scheme", "dynamic"),
    ("quantization_config.weight_block_size", "weight_block_size", [32, 32]),
    ("quantization_config.scale_fmt", "scale_fmt", "ue8m0"),
    ("quantization_config.expert_dtype", "expert_dtype", "fp4"),
)


def read_config(data: Mapping[str, Any]) -> ModelConfig:
    """Build a `ModelConfig` from either form; raises `ConfigError` naming key and value."""
    stated = data.get("model_type", MODEL_TYPE)
    require(stated == MODEL_TYPE, "model_type", stated, f"only {MODEL_TYPE!r} is implemented")
    is_nested = "text_config" in data
    require(is_nested or "dim" in data, "config", sorted(data)[:8],
            "must have text_config (the released form) or dim (the flat form)")  # fmt: skip
    for nested, flat, wanted in _FIXED:
        key = nested if is_nested else flat
        value = _look_up(data, key)
        require(value is _MISSING or value == wanted, key, value,
                f"only {wanted!r} is implemented")  # fmt: skip
    values: dict[str, Any] = {
        field.name: _convert(_key(field.name, is_nested), _read(data, field.name, is_nested),
                             str(field.type))
        for field in fields(ModelConfig)
        if field.name != "vision"
    }  # fmt: skip
    key = "text_config.index_k_source_layer_ids" if is_nested else "index_k_source_layers"
    owners = _look_up(data, key)
    sources = _look_up(data, _key("kv_source_layer_ids", is_nested))
    require(owners is _MISSING or owners == sources, key, owners,
            f"must equal the KV sources {sources}")  # fmt: skip
    return ModelConfig(**values, vision=_read_vision(data, is_nested))


def read_config_file(path: Path) -> ModelConfig:
    """Read a config.json; raises `ConfigError` when it is absent, not JSON, or not usable."""
    data = read_json(path, "config")
    require(isinstance(data, dict), "config", str(path), "must hold a JSON object")
    assert isinstance(data, dict), "checked above"
    return read_config(data)


def _key(field: str, is_nested: bool) -> str:
    name = _NAMES.get(field, _Name(f"text_config.{field}", field))
    return name.nested if is_nested else name.flat


def _look_up(data: Mapping[str, Any], key: str) -> object:
    value: object = data
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _read(data: Mapping[str, Any], field: str, is_nested: bool) -> object:
    key = _key(field, is_nested)
    value = _look_up(data, key)
    if value is _MISSING and not is_nested:
        if field == "max_position_embeddings":  # the flat form implies it
            factor, length = (_number(n, data.get(n)) for n in ("rope_factor", "original_seq_len"))
            return int(min(factor * length, 2**53))
        if field in _FLAT_TOKEN_IDS:
            return _FLAT_TOKEN_IDS[field]
        if field == "image_token_id":
            return _FLAT_IMAGE_TOKEN_ID
    require(value is not _MISSING, key, None, "is missing")
    return value


def _convert(key: str, value: object, declared: str) -> int | float | tuple[int, ...] | None:
    """Check a JSON value against a field's declared type; lists become tuples."""
    if value is None and "None" in declared:
        return None
    if "tuple" in declared:
        require(isinstance(value, list) and all(_is_int(v) for v in value), key, value,
                "must be a list of integers")  # fmt: skip
        assert isinstance(value, list), "checked above"
        return tuple(value)
    if "float" in declared:
        return _number(key, value)
    require(_is_int(value), key, value, "must be an integer")
    assert isinstance(value, int), "checked above"
    return value


def _number(key: str, value: object) -> float:
    require(_is_int(value) or isinstance(value, float), key, value, "must be a number")
    assert isinstance(value, int | float), "checked above"
    require(abs(value) < math.inf and abs(value) < 10**300, key, value, "must be finite")
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_vision(data: Mapping[str, Any], is_nested: bool) -> VisionConfig | None:
    if not is_nested or _look_up(data, "vision_config") in (_MISSING, None):
        return None
    values: dict[str, Any] = {}
    for field in fields(VisionConfig):
        key = f"vision_config.{field.name}"
        value = _look_up(data, key)
        require(value is not _MISSING, key, None, "is missing")
        values[field.name] = _convert(key, value, str(field.type))
    return VisionConfig(**values)
