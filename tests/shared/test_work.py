"""Rows, pairs and FLOPs: check values (docs/rules.md, R31), and brute force."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.cost.flops import coefficients
from mdi_shared.cost.pairs import (
    candidate_pairs,
    capped_sum,
    consumer_start,
    floor_sum,
    pairs,
    window_pairs,
)
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.work import (
    DecodeWork,
    StepWork,
    add_work,
    decode_work,
    prefill_work,
    step_work,
)
from mdi_shared.plan import DECODE, IDLE_DECODE, IDLE_PREFILL, PREFILL, Batch, Member, StepPlan

REPLAY = replace(V41_FLASH, replay_keep_tokens=140)
TINY_REPLAY = replace(TINY, replay_keep_tokens=140)

few = settings(max_examples=60, deadline=None)
chunk = st.tuples(st.integers(1, 40), st.integers(0, 300), st.integers(0, 300)).map(
    lambda t: (t[0], t[0] + t[1], t[0] + t[1] + t[2])
)  # q, k, prompt length


# ---- sums --------------------------------------------------------------------------------------


def test_check_values_of_the_sums():
    assert floor_sum(10, 2) == 25
    assert capped_sum(10, 2, 3) == 21
    assert pairs(4, 10, 2) == 21
    assert pairs(4, 10, 2, 3) == 17
    assert pairs(0, 7, 1, 4) == 22
    assert pairs(126_976, 131_072, 2) == 264_241_152
    assert pairs(126_976, 131_072, 1) == 528_484_352
    assert pairs(126_976, 131_072, 2, 1024) == 4_194_304
    assert pairs(126_976, 131_072, 1, 1024) == 4_194_304


@pytest.mark.parametrize(
    ("q", "k", "prompt_len", "rows", "window"),
    [
        (4_096, 4_096, 131_072, 1, 0),
        (4_096, 131_072, 131_072, 140, 9_792),
        (100, 100, 100, 100, 5_050),
    ],
)
def test_check_values_of_bounded_replay(q, k, prompt_len, rows, window):
    start = consumer_start(q, k, prompt_len, 140)
    assert k - start == rows
    assert window_pairs(start, k, 128, max(prompt_len - 140, 0)) == window


@few
@given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 9), st.integers(1, 30))
def test_sums_by_brute_force(start, length, ratio, cap):
    stop = start + length
    seen = range(start + 1, stop + 1)
    assert floor_sum(stop, ratio) == sum(t // ratio for t in range(1, stop + 1))
    assert pairs(start, stop, ratio) == sum(t // ratio for t in seen)
    assert pairs(start, stop, ratio, cap) == sum(min(t // ratio, cap) for t in seen)
    blocks = (min(-(-t // ratio), cap) for t in seen)
    assert candidate_pairs(start, stop, ratio, cap) == ratio * sum(blocks)


@few
@given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 50), st.integers(0, 300))
def test_window_pairs_by_brute_force(start, length, window, valid_from):
    met = 0
    for position in range(start, start + length):
        met += len(range(max(position - window + 1, valid_from), position + 1))
    assert window_pairs(start, start + length, window, valid_from) == met


# ---- FLOPs -------------------------------------------------------------------------------------


def layers_of(shape):
    """Yield (ratio, is KV source, index kind or None) of each layer."""
    for layer, ratio in enumerate(shape.compress_ratios):
        index = None
        if layer in shape.index_source_layer_ids:
            index = "candidate" if layer > shape.candidate_source_layer_id else "full"
        yield ratio, layer in shape.kv_source_layer_ids, index


def reference_flops(shape, t, fp8, fp4, bf16, f32):
    """FLOPs of decoding token `t`, layer by layer; weights are per multiply-add."""
    s, h = shape, shape.hidden_size
    n, d, rq = s.num_attention_heads, s.head_dim, s.q_lora_rank
    ih, ie = s.index_n_heads, s.index_head_dim
    out = s.o_groups * s.o_lora_rank
    expert = 3 * h * s.moe_intermediate_size
    copies = s.hc_mult
    total = 0
    for ratio, is_source, index in layers_of(shape):
        total += fp8 * (h * rq + h * d + rq * n * d + n * d * s.o_lora_rank + out * h)
        total += fp8 * (s.num_experts_per_tok + s.n_shared_experts) * expert
        total += bf16 * s.n_routed_experts * h
        total += f32 * 2 * h * (copies * copies * (copies + 2) + copies + copies * (copies + 1))
        selected = min(t // ratio, s.index_topk) if ratio else 0
        total += 2 * bf16 * n * d * (min(t, s.sliding_window) + selected)
        if is_source:
            total += bf16 * (h * d * ratio + d * ie)
        if index is not None:
            total += fp8 * rq * ih * ie + bf16 * h * ih
            visible = t // ratio
            if index == "candidate":
                size = s.candidate_block_size
                visible = size * min(-(-t // size), s.candidate_topk_blocks)
            total += fp4 * ih * ie * visible
    columns = (s.engram_max_ngram_size - 1) * s.engram_n_heads * s.engram_head_dim
    engram = fp8 * columns * h * (copies + 1) + f32 * copies * h
    return total + len(s.engram_layer_ids) * engram + bf16 * h * s.vocab_size


@pytest.mark.parametrize(
    ("t", "gflop"), [(1024, 35.6), (8192, 35.9), (65_536, 37.4), (2**20, 57.5)]
)
def test_reference_matches_the_published_table_in_plain_flops(t, gflop):
    plain = reference_flops(V41_FLASH, t, fp8=2, fp4=2, bf16=2, f32=2)
    assert round(plain / 1e9, 1) == gflop


@pytest.mark.parametrize("shape", [V41_FLASH, TINY, REPLAY], ids=["flash", "tiny", "replay"])
@pytest.mark.parametrize("t", [1, 63, 64, 127, 128, 1000, 8192, 16_385, 65_536, 1_048_575])
def test_decode_flops_equal_the_reference(shape, t):
    expected = reference_flops(shape, t, fp8=2, fp4=1, bf16=4, f32=8)
    assert decode_work(shape, [t]).flops_total == expected


def test_decode_flops_at_8192():
    assert decode_work(V41_FLASH, [8192]).flops_total == pytest.approx(40.76e9, abs=5e6)


def test_a_prompt_costs_its_tokens_decoded_less_their_heads_and_uneven_keys():
    t, shape = 300, V41_FLASH
    prompt = prefill_work(shape, [(t, t, t)])
    alone = [decode_work(shape, [k]) for k in range(1, t + 1)]
    logits = 4 * shape.hidden_size * shape.vocab_size
    key = 4 * shape.head_dim * shape.index_head_dim
    spared_keys = shape.num_kv_source_r2_layers * (t - t // 2)
    expected = sum(w.flops_total for w in alone) - (t - 1) * logits - spared_keys * key
    assert prompt.flops_total == expected
    assert prompt.core_pairs == sum(w.core_pairs for w in alone)
    assert prompt.swa_pairs == sum(w.swa_pairs for w in alone)
    assert prompt.idx_pairs_r2 == sum(w.idx_pairs_r2 for w in alone)
    assert prompt.idx_pairs_r1 == sum(w.idx_pairs_r1 for w in alone)


# ---- steps -------------------------------------------------------------------------------------


def test_full_replay_prefill_at_long_context():
    work = prefill_work(V41_FLASH, [(4_096, 131_072, 131_072)])
    assert (work.n_seqs, work.rows, work.consumer_rows, work.logit_rows) == (1, 4096, 4096, 1)
    assert work.sum_qk == 536_870_912
    assert (work.sum_k, work.cached_rows, work.max_k, work.min_k) == (131_072,) * 4
    assert work.idx_pairs_r2 == 3 * 264_241_152
    assert work.idx_pairs_r1 == 528_484_352 + 4 * 4_096 * 16_384
    assert work.core_pairs == 38 * 4_096 * 512
    assert work.swa_pairs == 40 * 4_096 * 128
    assert work.key_rows == 3 * 2_048 + 4_096


def test_bounded_replay_spares_consumer_layers_in_prefill_only():
    rows = [(4_096, 4_096, 131_072), (4_096, 131_072, 131_072)]
    full, short = prefill_work(V41_FLASH, rows), prefill_work(REPLAY, rows)
    assert short.consumer_rows == 141
    assert short.swa_pairs - 20 * 9_792 == full.swa_pairs // 2
    assert short.idx_pairs_r2 == full.idx_pairs_r2
    assert short.key_rows == full.key_rows
    last = pairs(131_072 - 140, 131_072, 1)
    assert short.idx_pairs_r1 == 4_096 + last + 4 * (4_096 + 140 * 16_384)
    assert short.flops_total < 0.6 * full.flops_total
    assert decode_work(REPLAY, [5_000, 7]) == decode_work(V41_FLASH, [5_000, 7])


def test_rows_that_end_at_the_boundary_are_mixed_there():
    """The layer behind the producers mixes their streams once more: 8 C H * C (C + 2) a row."""
    work, c = prefill_work(REPLAY, [(4_096, 8_192, 131_072)]), coefficients(REPLAY)
    assert work.consumer_rows == 1
    layers = c.other_row * 4_096 + c.other_consumer_row + c.logit_row
    mixed = work.flops_total - work.flops_attn - layers
    copies, hidden = REPLAY.hc_mult, REPLAY.hidden_size
    assert mixed == 4_095 * 8 * copies * hidden * copies * (copies + 2)


def brute_prefill(shape, rows):
    """Pairs of a prefill step, key by key and layer by layer."""
    keep, size = shape.replay_keep_tokens, shape.candidate_block_size
    idx = {2: 0, 1: 0}
    core = swa = consumers = 0
    for q, k, prompt_len in rows:
        cut = prompt_len - keep if keep else 0
        kept = [p for p in range(k - q, k) if p >= cut or p == k - 1]
        consumers += len(kept)
        for ratio, _, index in layers_of(shape):
            positions = kept if ratio == 1 else range(k - q, k)
            oldest = max(cut, 0) if ratio == 1 else 0
            for p in positions:
                swa += sum(p - shape.sliding_window < j for j in range(oldest, p + 1))
                visible = (p + 1) // ratio if ratio else 0
                core += min(visible, shape.index_topk)
                if index == "candidate":
                    visible = size * min(-(-visible // size), shape.candidate_topk_blocks)
                if index is not None:
                    idx[ratio] += visible
    return consumers, idx[2], idx[1], core, swa


@settings(max_examples=25, deadline=None)
@given(st.lists(chunk, min_size=1, max_size=3), st.sampled_from([TINY, TINY_REPLAY]))
def test_prefill_pairs_by_brute_force(rows, shape):
    w = prefill_work(shape, rows)
    got = (w.consumer_rows, w.idx_pairs_r2, w.idx_pairs_r1, w.core_pairs, w.swa_pairs)
    assert got == brute_prefill(shape, rows)
    assert w.rows == sum(q for q, _, _ in rows)
    assert w.sum_qk == sum(q * k for q, k, _ in rows)
    assert (w.sum_k, w.max_k, w.min_k) == (
        sum(k for _, k, _ in rows), max(k for _, k, _ in rows), min(k for _, k, _ in rows),
    )  # fmt: skip


@few
@given(st.lists(chunk, max_size=3), st.lists(chunk, max_size=3))
def test_works_of_two_batches_add_up(left, right):
    both = prefill_work(TINY_REPLAY, left + right)
    assert add_work(prefill_work(TINY_REPLAY, left), prefill_work(TINY_REPLAY, right)) == both


def test_decode_with_drafts_scores_every_row():
    drafted = decode_work(TINY, [40, 200], q=3)
    rows = [38, 39, 40, 198, 199, 200]
    alone = decode_work(TINY, rows)
    assert drafted.rows == drafted.logit_rows == 6
    assert (drafted.n_seqs, drafted.sum_k, drafted.sum_qk) == (2, 240, 720)
    assert drafted[9:] == alone[9:]


contexts_and_steps = st.tuples(
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.lists(st.integers(0, 150), min_size=1, max_size=8),
)


def growing(shape, contexts, shift=3):
    members = sorted(Member(shift - k, 0, i, 0) for i, k in enumerate(contexts))
    return DecodeWork(shape, Batch(tuple(members)), shift)


@few
@given(contexts_and_steps, st.sampled_from([TINY, TINY_REPLAY]))
def test_a_growing_batch_equals_counting_it_anew(case, shape):
    contexts, steps = case
    batch = growing(shape, contexts)
    for j in steps:
        assert batch.at(j) == decode_work(shape, [k + j for k in contexts])


def test_a_growing_batch_crosses_every_cap_of_the_real_shape():
    contexts = [120, 127, 500, 505, 1_015, 1_016, 16_370, 16_377, 16_384, 900_000]
    batch = growing(V41_FLASH, contexts)
    for j in range(40):
        assert batch.at(j) == decode_work(V41_FLASH, [k + j for k in contexts])


# ---- plans -------------------------------------------------------------------------------------


def plan_of(kind, *rows, full_lens=None):
    """A plan of rows (q, k); those of a decode step have one q."""
    members = tuple(Member(-k, 0, i, 0) for i, (_, k) in enumerate(rows))
    if kind not in (PREFILL, IDLE_PREFILL):
        each = rows[0][0] if rows else 1
        return StepPlan(1, kind, is_prefill=False, batch=Batch(members), rows_each=each)
    full_lens = [k for _, k in rows] if full_lens is None else full_lens
    prompts = tuple((q, k, full) for (q, k), full in zip(rows, full_lens, strict=True))
    return StepPlan(1, kind, is_prefill=True, batch=Batch(members), prompts=prompts)


def test_plans_by_kind():
    rows = [(5, 9), (7, 7)]
    assert step_work(TINY, plan_of(PREFILL, *rows)) == prefill_work(TINY, [(5, 9, 9), (7, 7, 7)])
    assert step_work(TINY, plan_of(DECODE, (1, 9), (1, 4))) == decode_work(TINY, [9, 4])
    verified = step_work(TINY, plan_of(DECODE, (3, 9), (3, 4)))
    assert verified == decode_work(TINY, [9, 4], q=3)


def test_an_idle_rank_runs_one_placeholder_row():
    assert step_work(TINY, plan_of(IDLE_PREFILL)) == prefill_work(TINY, [(1, 1, 1)])
    assert step_work(TINY, plan_of(IDLE_DECODE)) == decode_work(TINY, [1])


def test_bounded_replay_counts_from_the_end_of_the_whole_prompt():
    plan = plan_of(PREFILL, (64, 64), (200, 300), full_lens=(500, 300))
    expected = prefill_work(TINY_REPLAY, [(64, 64, 500), (200, 300, 300)])
    assert step_work(TINY_REPLAY, plan) == expected


def test_step_work_is_a_flat_tuple_of_ints():
    work = prefill_work(V41_FLASH, [(4_096, 1_048_576, 1_048_576)])
    assert all(isinstance(value, int) for value in work)
    assert max(work) < 2**63
    assert StepWork._fields[:5] == ("is_prefill", "n_seqs", "rows", "consumer_rows", "logit_rows")
