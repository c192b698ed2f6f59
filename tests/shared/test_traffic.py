"""FLOPs and bytes by component, against hand counts of the real model."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.traffic import distinct_experts, step_bytes, step_flops
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.errors import ConfigError

REPLAY = replace(V41_FLASH, replay_keep_tokens=140)
TINY_REPLAY = replace(TINY, replay_keep_tokens=140)

few = settings(max_examples=60, deadline=None)
chunk = st.tuples(st.integers(1, 40), st.integers(0, 300), st.integers(0, 300)).map(
    lambda t: (t[0], t[0] + t[1], t[0] + t[1] + t[2])
)  # q, k, prompt length


@few
@given(st.lists(chunk, max_size=3), st.sampled_from([TINY, TINY_REPLAY, V41_FLASH, REPLAY]))
def test_components_add_up_to_all_flops(rows, shape):
    for work in (prefill_work(shape, rows), decode_work(shape, [k for _, k, _ in rows])):
        assert sum(step_flops(shape, work)) == work.flops_total


def test_bytes_of_one_decoded_token():
    moved = step_bytes(V41_FLASH, decode_work(V41_FLASH, [100_000]))
    layers, expert = 40, 35_389_440
    assert moved.experts == pytest.approx(layers * 6 * (expert // 2 + expert // 32))
    assert moved.exchange == 0
    assert moved.index_scores == 68 * (3 * 50_000 + 100_000 + 4 * 16_384)
    assert moved.attention == 288 * 38 * 512 + 528 * 40 * (128 + 1)
    assert moved.head == 2 * 5_120 * 129_280 + 4 * 129_280
    assert moved.engram == 2 * (25_600 * 6_144 + 800 * 192) + 2 * 24 * 264
    kv = 890
    dense = 4.72 + 1.32 + 0.15 + 0.08  # GiB: projections, shared experts, router, indexers
    assert moved.dense - kv - 2 * 5_120 == pytest.approx(dense * 2**30, rel=5e-3)


def test_prefill_reads_a_cache_entry_once_per_layer():
    moved = step_bytes(V41_FLASH, prefill_work(V41_FLASH, [(4_096, 131_072, 131_072)]))
    assert moved.index_scores == 68 * (3 * 65_536 + 5 * 131_072)
    window = 40 * (4_096 + 127) + 40 * 4_096
    assert moved.attention == 288 * (18 * 65_536 + 20 * 131_072) + 528 * window


def test_no_sequence_moves_nothing():
    assert set(step_bytes(TINY, prefill_work(TINY, []))) == {0}


def test_experts_over_ranks():
    work = decode_work(V41_FLASH, [1_000] * 64)
    one, four = step_bytes(V41_FLASH, work), step_bytes(V41_FLASH, work, ep=4)
    assert four.experts < one.experts < 4 * four.experts
    remote = 3 * (1 - 0.75**6)
    assert four.exchange == pytest.approx(2 * 64 * 40 * remote * (5_120 + 160 + 10_240), abs=1)
    assert four._replace(experts=0, exchange=0) == one._replace(experts=0)
    with pytest.raises(ConfigError, match="ep = 7"):
        step_bytes(V41_FLASH, work, ep=7)


def test_distinct_experts_grow_to_all():
    assert distinct_experts(V41_FLASH, 1) == pytest.approx(6)
    assert distinct_experts(V41_FLASH, 2) == pytest.approx(12 - 6 * 6 / 384)
    assert distinct_experts(V41_FLASH, 10_000) == pytest.approx(384)
