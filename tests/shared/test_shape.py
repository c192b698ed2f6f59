"""Layer plan, state bytes and weights, against the published audit of the released checkpoint."""

from dataclasses import replace

import pytest

from mdi_shared.cost.footprint import (
    attention_matrices,
    expert_bytes,
    fp8_bytes,
    weight_bytes,
    weight_params,
)
from mdi_shared.cost.shape import TINY, V41_FLASH, shape_by_name
from mdi_shared.errors import ConfigError

CHECKPOINT_BYTES = 510_286_023_000  # reported total of the 48 released shards


def layer_counts(shape):
    return {
        "producer": shape.num_producer_layers,
        "consumer": shape.num_consumer_layers,
        "core r2, r1": (shape.num_core_r2_layers, shape.num_core_r1_layers),
        "index r2": shape.num_index_r2_layers,
        "index r1": shape.num_index_r1_layers,
        "candidate": shape.num_candidate_layers,
        "sources": (shape.num_kv_source_r2_layers, shape.num_kv_source_r1_layers),
        "engram": shape.num_engram_layers,
    }


def test_layer_plan_of_both_models():
    assert V41_FLASH.n_prefill_layer == 20
    assert layer_counts(V41_FLASH) == {
        "producer": 20, "consumer": 20, "core r2, r1": (18, 20), "index r2": 3, "index r1": 1,
        "candidate": 4, "sources": (3, 1), "engram": 2,
    }  # fmt: skip
    assert TINY.n_prefill_layer == 6
    assert layer_counts(TINY) == {
        "producer": 6, "consumer": 6, "core r2, r1": (4, 6), "index r2": 2, "index r1": 1,
        "candidate": 2, "sources": (2, 1), "engram": 2,
    }  # fmt: skip


def test_state_bytes():
    assert V41_FLASH.entry_bytes == 288
    assert V41_FLASH.index_key_bytes == 68
    assert V41_FLASH.window_bytes == 528
    assert V41_FLASH.kv_bytes_per_token == 890
    assert V41_FLASH.kv_bytes_per_block(128) == 113_920
    assert V41_FLASH.ring_bytes_per_slot == 2_703_360
    assert V41_FLASH.tail_bytes_per_slot == 12_288
    assert V41_FLASH.state_bytes_per_slot == 2_715_648


def test_a_block_must_hold_whole_compressed_entries():
    odd_sources = replace(TINY, kv_source_layer_ids=(2, 6))  # one and a half entries of 53 bytes
    assert odd_sources.kv_bytes_per_block(2) == 159
    with pytest.raises(ConfigError, match="block_size = 3"):
        odd_sources.kv_bytes_per_block(3)


@pytest.mark.parametrize(
    ("part", "billions", "gib"),
    [
        ("routed_experts", 543.582, 268.9),
        ("engram_tables", 196.614, 188.8),
        ("attention", 5.065, 4.72),
        ("shared_experts", 1.416, 1.32),
        ("embed_head", 1.324, 2.47),
        ("engram_projections", 0.315, 0.29),
        ("router", 0.079, 0.15),
        ("index_compress", 0.062, 0.08),
        ("hyper_connections", 0.039, 0.15),
    ],
)
def test_weights_by_part(part, billions, gib):
    assert round(weight_params(V41_FLASH)[part] / 1e9, 3) == billions
    assert weight_bytes(V41_FLASH)[part] / 2**30 == pytest.approx(
        gib, abs=0.05 if gib > 9 else 5e-3
    )


def test_backbone_and_active_parameters():
    params = weight_params(V41_FLASH)
    assert sum(params.values()) - params["engram_tables"] == pytest.approx(551.88e9, rel=1e-5)
    routed = params["routed_experts"] * 6 // 384
    idle = params["engram_tables"] + params["embed_head"] // 2 + params["routed_experts"] - routed
    assert sum(params.values()) - idle == pytest.approx(16.13e9, rel=1e-3)


def draft_bytes():
    """Three window-only layers with 128 experts, the projection of targets, and two small heads."""
    hidden, inter, experts = 5120, 2304, 128
    bf16 = 2 * hidden + 1280 + 512 + experts * hidden
    f32 = 64 + 2 * experts + 2 * (24 * 20480 + 24 + 3)
    shared = 2 * fp8_bytes(inter, hidden) + fp8_bytes(hidden, inter)
    attention = sum(fp8_bytes(*matrix) for matrix in attention_matrices(V41_FLASH))
    layer = attention + shared + experts * expert_bytes(V41_FLASH) + 2 * bf16 + 4 * f32
    heads = 2 * hidden + 2 * 129_280 * 256 + 5376
    return 3 * layer + fp8_bytes(hidden, 15_360) + 2 * heads


def vision_bytes():
    width, hidden = 1024, 5120
    block = 3 * width * (width + 1) + width * (width + 1) + 5632 * width + width * 2816 + 2 * width
    tower = width * (588 + 1) + 32 * block + width
    aligner = hidden * (9216 + 1) + hidden * (hidden + 1)
    return 2 * (tower + aligner + 3 * hidden)


def test_weights_add_up_to_the_released_checkpoint():
    total = sum(weight_bytes(V41_FLASH).values()) + draft_bytes() + vision_bytes()
    assert total == CHECKPOINT_BYTES


def test_shape_by_name():
    assert shape_by_name("tiny") is TINY
    with pytest.raises(ConfigError, match=r"model = 'v3'.*v41-flash, tiny"):
        shape_by_name("v3")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compress_ratios", (0, 0, 4, 2, 2, 2, 1, 1, 1, 1, 1, 1)),
        ("compress_ratios", (0, 0, 2, 2, 2, 2, 1, 1, 1, 2, 1, 1)),
        ("kv_source_layer_ids", (2, 3, 6)),
        ("kv_source_layer_ids", (4, 2, 6)),
        ("index_source_layer_ids", (1, 2, 4, 6)),
        ("candidate_source_layer_id", 4),
        ("engram_layer_ids", (1, 7)),
        ("engram_num_embeddings", (3_144,)),
        ("replay_keep_tokens", 100),
    ],
)
def test_impossible_shapes_are_refused(field, value):
    with pytest.raises(ConfigError) as caught:
        replace(TINY, **{field: value})
    assert caught.value.field == field
