"""The config in both forms, the layer plan of the released model, and what is refused."""

import dataclasses
import json
import os

import pytest

from mdi_exec.model.config_reader import read_config, read_config_file
from mdi_shared.errors import ConfigError


@pytest.fixture
def nested(golden_path) -> dict:
    return json.loads((golden_path / "tiny" / "config.json").read_text(encoding="utf-8"))


def test_flat_form_of_the_released_model(released):
    assert released.hidden_size == 5120
    assert released.num_experts_per_tok == 6
    assert released.max_position_embeddings == 1_048_576
    assert released.image_token_id == 129_264
    assert released.n_prefill_layer == 20


def test_nested_form(tiny_config):
    assert tiny_config.hidden_size == 128
    assert tiny_config.rope_factor == 4.0
    assert tiny_config.image_token_id == 1022
    assert tiny_config.vision.patch_size == 14
    assert tiny_config.n_prefill_layer == 6


def test_layer_plan_of_the_released_model(released):
    plans = [released.layer_plan(i) for i in range(43)]
    assert [p.index for p in plans if p.owns_compressor] == [2, 8, 14, 20]
    assert [p.index for p in plans if p.owns_index_keys] == [2, 8, 14, 20]
    assert [p.index for p in plans if p.is_index_source] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [p.index for p in plans if p.is_candidate_source] == [20]
    assert [p.index for p in plans if p.uses_candidates] == [24, 28, 32, 36]
    assert [p.index for p in plans if p.is_consumer] == list(range(20, 40))
    assert [p.index for p in plans if p.is_draft] == [40, 41, 42]
    assert [(p.index, p.engram_index) for p in plans if p.engram_index is not None] == [
        (1, 0),
        (14, 1),
    ]
    assert (plans[0].kv_source, plans[1].index_source, plans[0].ratio) == (None, None, 0)
    assert (plans[13].kv_source, plans[13].index_source, plans[13].ratio) == (8, 8, 2)
    assert (plans[35].kv_source, plans[35].index_source, plans[35].ratio) == (20, 32, 1)
    assert (plans[41].kv_source, plans[41].ratio) == (None, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 500}, "head_dim = 500: must be a multiple of 32"),
        ({"o_groups": 7}, "o_groups = 7: must divide num_attention_heads = 64"),
        ({"compress_ratios": [0] * 43}, "index_source_layer_ids .* ratio above 0"),
        ({"compress_ratios": [0, 0, 3] + [2] * 17 + [1] * 20 + [0] * 3}, "each must be 0, 1 or 2"),
        (
            {"compress_ratios": [0] * 2 + [2] * 10 + [1] * 28 + [0] * 3},
            r"compress_ratios\[12\] = 1: must be 2",
        ),
        ({"compress_ratios": [0] * 40}, "must have .* = 43 entries"),
        ({"kv_source_layers": [2, 9, 14, 20]}, "kv_source_layer_ids .* must be among"),
        ({"kv_source_layers": [8, 2, 14, 20]}, "kv_source_layer_ids .* must ascend"),
        ({"candidate_source_layer": 21}, "candidate_source_layer_id = 21: must be among"),
        ({"candidate_source_layer": 14}, "KV sources \\[20\\] lie behind it"),
        ({"candidate_topk_blocks": 32}, "candidate_topk_blocks = 32: .* at least index_topk = 512"),
        ({"engram_layer_ids": [1, 24]}, "engram_layer_ids .* below 20"),
        ({"engram_num_embeddings": [1]}, "engram_num_embeddings .* one entry per Engram layer"),
        ({"dspark_target_layer_ids": [19, 38, 39]}, "must all be below, or all from"),
        ({"n_activated_experts": 400}, "num_experts_per_tok = 400: must be at most"),
        ({"score_func": "sigmoid"}, "score_func = 'sigmoid': only 'sqrtsoftplus'"),
        ({"expert_dtype": "fp8"}, "expert_dtype = 'fp8': only 'fp4'"),
        ({"n_layers": "40"}, "n_layers = '40': must be an integer"),
        ({"n_layers": True}, "n_layers = True: must be an integer"),
        ({"norm_eps": None}, "norm_eps = None: must be a number"),
        ({"kv_source_layers": 2}, "kv_source_layers = 2: must be a list of integers"),
        ({"index_k_source_layers": [2]}, "index_k_source_layers = .* must equal the KV sources"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(flat_config, change, message):
    with pytest.raises(ConfigError, match=message):
        read_config(flat_config | change)


@pytest.mark.parametrize("key", ["dim", "q_lora_rank", "beta_fast", "engram_pad_id"])
def test_missing_flat_keys_are_named(flat_config, key):
    flat = {k: v for k, v in flat_config.items() if k != key}
    expected = "config = .* must have text_config" if key == "dim" else f"{key} = None: is missing"
    with pytest.raises(ConfigError, match=expected):
        read_config(flat)


def test_missing_nested_keys_are_named(nested):
    del nested["text_config"]["rope_scaling"]["factor"]
    with pytest.raises(ConfigError, match=r"text_config\.rope_scaling\.factor = None: is missing"):
        read_config(nested)


def test_optional_later_keys_must_agree(nested):
    nested["text_config"] |= {"hc_shifted": True, "index_k_source_layer_ids": [2, 4, 6]}
    read_config(nested)
    nested["text_config"]["use_fp4_sparse_kv"] = False
    with pytest.raises(ConfigError, match="use_fp4_sparse_kv = False: only True is implemented"):
        read_config(nested)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("n_routed_experts", 10**7, "16,384"),
        ("candidate_block_size", 10**9, "4,096"),
        ("hc_sinkhorn_iters", 10**7, "1,000"),
        ("num_hidden_layers", 10**6, "1,024"),
        ("index_topk", 2**40, "1,048,576"),
        ("engram_vocab_size", 10**12, "4,294,967,296"),
        ("rms_norm_eps", 1e12, "0.1"),
        ("swiglu_limit", 1e7, "1,000,000"),
        ("rope_theta", 1e10, "1,000,000,000"),
        ("vocab_size", 10**400, "16,777,216"),
        ("hidden_size", -128, "above 0"),
    ],
)
def test_dimensions_that_no_model_has_are_refused(nested, key, value, allowed):
    nested["text_config"][key] = value
    with pytest.raises(ConfigError) as refused:
        read_config(nested)
    assert str(refused.value).startswith(f"{key} = {value!r}"[:300])
    assert ": must be " in str(refused.value)
    assert allowed in str(refused.value)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, -(10**400)])
def test_numbers_that_are_not_finite_are_refused(nested, flat_config, value):
    nested["text_config"]["swiglu_limit"] = value
    for config in (nested, {**flat_config, "rope_factor": value}):
        with pytest.raises(ConfigError, match=r"(swiglu_limit|rope_factor) = .*: must be finite"):
            read_config(config)


def test_another_activation_dtype_is_refused(nested):
    for value in ({}, "float16", None):
        with pytest.raises(ConfigError, match=r"dtype = .*: only 'bfloat16' is implemented"):
            read_config({**nested, "dtype": value})


def test_files_that_are_no_descriptions_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match=r"pipe\.json.* must be a regular file"):
        read_config_file(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text('{"a":' * 10**5, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"deep\.json.* nested too deeply"):
        read_config_file(tmp_path / "deep.json")
    with (tmp_path / "large.json").open("wb") as large:
        large.truncate(2**26 + 1)
    with pytest.raises(ConfigError, match=r"large\.json.* must be at most 67,108,864"):
        read_config_file(tmp_path / "large.json")


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json.* cannot be read"):
        read_config_file(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.json.* is not JSON"):
        read_config_file(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"list\.json.* must hold a JSON object"):
        read_config_file(tmp_path / "list.json")


def test_a_config_is_immutable(tiny_config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config.hidden_size = 256
