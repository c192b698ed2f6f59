"""Chunk policies: a worked example (docs/rules.md, R33), and the splitter's promises."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mdi_shared.chunking import CostTarget, TokenBudget, fallback_note, make_policy
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.linear import PREFILL_TERMS, DecodeTerms, LinearCost, PrefillTerms
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.step_cost import NO_HOST_COST, ConstantCost, HostCost
from mdi_shared.cost.work import prefill_work
from mdi_shared.errors import ConfigError


class ToyCost:
    """T = 6 + .004 c + 2e-8 P(k, k + c, 2) + 2e-5 k ms; V4.1 has three ratio-2 index layers."""

    host = NO_HOST_COST

    def __init__(self):
        self.probes = 0

    def device_ns(self, work):
        self.probes += 1
        pairs, cached = work.idx_pairs_r2 // 3, work.sum_k - work.rows
        return 6_000_000 + 4_000 * work.rows + pairs // 50 + 20 * cached


class RowCost:
    """1 ms per sequence and 1,000 ns per row."""

    host = NO_HOST_COST

    def device_ns(self, work):
        return max(1, 1_000_000 * work.n_seqs + 1_000 * work.rows)


def split(policy, prompt_len, room):
    """Return the chunks of one prompt that is alone in every step."""
    chunks, cached = [], 0
    while cached < prompt_len:
        chunks.append(policy.chunk_tokens([], cached, prompt_len - cached, room, prompt_len))
        assert chunks[-1] >= 1
        cached += chunks[-1]
    return chunks


def toy_ms(tokens, cached):
    return ToyCost().device_ns(prefill_work(V41_FLASH, [(tokens, cached + tokens, 65_536)])) / 1e6


def test_worked_example():
    chunks = split(CostTarget(V41_FLASH, ToyCost(), 32_000_000), 65_536, 8_192)
    assert chunks == [6400, 6272, 6144, 6016, 5888, 5760, 5632, 5632, 5504, 5376, 5376, 1536]
    assert [round(toy_ms(c, k), 2) for c, k in [(6400, 0), (6272, 6400), (6144, 12_672)]] == [
        31.80, 31.81, 31.80,
    ]  # fmt: skip
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    times = [toy_ms(c, k) for c, k in zip(chunks, starts, strict=True)]
    assert all(31.4 < t <= 32.0 for t in times[:-1])
    assert sum(times) == pytest.approx(363.5, abs=0.05)


def test_fixed_chunks_of_the_worked_example():
    chunks = split(TokenBudget(), 65_536, 4_096)
    assert chunks == [4_096] * 16
    assert sum(toy_ms(4_096, 4_096 * i) for i in range(16)) == pytest.approx(389.45, abs=0.005)


def test_at_most_twenty_probes_a_chunk():
    cost = ToyCost()
    CostTarget(V41_FLASH, cost, 32_000_000).chunk_tokens([], 0, 200_000, 131_072, 200_000)
    assert cost.probes <= 20


def test_token_budget_fills_the_room():
    policy = TokenBudget()
    assert policy.target_ns == 0
    assert policy.chunk_tokens([(5, 5, 5)], 0, 100, 64, 100) == 64
    assert policy.chunk_tokens([], 90, 10, 64, 100) == 10
    assert policy.chunk_tokens([(64, 64, 64)], 0, 10, 0, 10) == 0


def target(ms, **options):
    return CostTarget(TINY, RowCost(), int(ms * 1e6), **options)


def test_a_prompt_that_fits_is_finished():
    assert target(3).chunk_tokens([], 0, 1_999, 8_192, 1_999) == 1_999
    assert target(3).chunk_tokens([], 0, 2_000, 8_192, 2_000) == 2_000


def test_a_chunk_that_is_not_the_last_is_aligned():
    assert target(3).chunk_tokens([], 0, 5_000, 8_192, 5_000) == 15 * 128
    assert target(3, cp_align=12).chunk_tokens([], 0, 5_000, 8_184, 5_000) == 5 * 384
    assert target(30).chunk_tokens([], 0, 5_000, 1_000, 5_000) == 896  # by the room


def test_a_small_rest_joins_the_chunk_before_it():
    assert target(3).chunk_tokens([], 0, 2_255, 8_192, 2_255) == 2_255  # 3.255 ms <= 3.3 ms
    assert target(3).chunk_tokens([], 0, 2_256, 8_192, 2_256) == 1_920  # a rest of 256 is not small
    assert target(2).chunk_tokens([], 0, 1_201, 8_192, 1_201) == 896  # 2.201 ms > 2.2 ms
    assert target(3).chunk_tokens([], 0, 2_255, 2_200, 2_255) == 1_920  # no room for it


def test_every_prompt_proceeds():
    hopeless = target(0.5)
    assert hopeless.chunk_tokens([], 700, 5_000, 8_192, 5_700) == 256
    assert hopeless.chunk_tokens([], 700, 90, 8_192, 790) == 90
    assert hopeless.chunk_tokens([], 700, 5_000, 64, 5_700) == 64
    assert target(0.5, cp_align=24).chunk_tokens([], 0, 5_000, 8_184, 5_000) == 264


def test_a_second_sequence_waits_rather_than_run_a_tiny_chunk():
    first = [(500, 500, 500)]
    assert target(3).chunk_tokens(first, 0, 5_000, 8_192, 5_000) == 384
    assert target(2.8).chunk_tokens(first, 0, 5_000, 8_192, 5_000) == 256
    assert target(2.7).chunk_tokens(first, 0, 5_000, 8_192, 5_000) == 0
    assert target(2.7).chunk_tokens(first, 0, 100, 8_192, 100) == 100  # a whole prompt may be short
    assert target(3).chunk_tokens(first, 0, 5_000, 0, 5_000) == 0


prompts = st.integers(1, 20_000)


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(1, 60), st.integers(1, 3_000), st.sampled_from([1, 4, 12]))
def test_promises_of_the_splitter(prompt_len, ms, room, cp_align):
    room = max(room // cp_align, 1) * cp_align
    cost = ToyCost()
    policy = CostTarget(V41_FLASH, cost, ms * 1_000_000, cp_align=cp_align)
    chunks, cached = split(policy, prompt_len, room), 0
    assert sum(chunks) == prompt_len
    assert max(chunks) <= room
    for i, tokens in enumerate(chunks):
        is_last = i == len(chunks) - 1
        ns = cost.device_ns(prefill_work(V41_FLASH, [(tokens, cached + tokens, prompt_len)]))
        if ns > policy.target_ns:
            assert tokens <= policy.min_chunk or (is_last and 10 * ns <= 11 * policy.target_ns)
        if not is_last:
            assert tokens % cp_align == 0
            assert tokens % policy.align == 0 or tokens == min(policy.min_chunk, room)
        cached += tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=4), prompts, st.integers(7, 30))
def test_a_shared_step_stays_near_its_target(picked_q, remaining, ms):
    cost, picked = ToyCost(), [(q, q, q) for q in picked_q]
    policy = CostTarget(V41_FLASH, cost, ms * 1_000_000)
    assume(cost.device_ns(prefill_work(V41_FLASH, picked)) <= policy.target_ns)
    tokens = policy.chunk_tokens(picked, 0, remaining, 8_192, remaining)
    if tokens == 0:
        return
    ns = cost.device_ns(prefill_work(V41_FLASH, [*picked, (tokens, tokens, remaining)]))
    assert ns <= policy.target_ns or (tokens == remaining and 10 * ns <= 11 * policy.target_ns)
    assert tokens == remaining or tokens >= policy.min_chunk


def test_a_longer_context_never_gets_a_longer_chunk():
    policy = CostTarget(V41_FLASH, ToyCost(), 32_000_000)
    contexts = range(0, 1_400_000, 40_000)
    chunks = [policy.chunk_tokens([], k, 10**6, 8_192, 10**7) for k in contexts]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] == 256


def test_make_policy():
    cost = ConstantCost(5, 5)
    assert isinstance(make_policy(SchedulerConfig(), TINY, cost), TokenBudget)
    config = SchedulerConfig(
        chunk_policy="cost_target", prefill_target_ms=12.5, context_parallel_size=3
    )
    policy = make_policy(config, TINY, cost)
    assert isinstance(policy, CostTarget)
    assert policy.target_ns == 12_500_000
    assert policy.align == 384


@pytest.mark.parametrize(
    "wrong", [{"align": 0}, {"cp_align": 0}, {"tail_min": -1}, {"min_chunk": 0}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CostTarget(TINY, RowCost(), 1, **wrong)
    with pytest.raises(ConfigError, match="target_ns"):
        CostTarget(TINY, RowCost(), 0)


class Fitted(LinearCost):
    """A fitted model of one term: 1 ms per 1,000 rows; its file names an error."""

    @classmethod
    def with_error(cls, usable, mape=0.2):
        terms = dict.fromkeys(PREFILL_TERMS, 0.0) | {"rows": 1_000.0}
        decode = DecodeTerms(const=2e6, rows=0.0, sum_k=0.0, n_seqs=0.0)
        fit = {"prefill": {"usable_for_control": usable, "held_out_mape": mape}}
        return cls(prefill=PrefillTerms(**terms), decode=decode, host=NO_HOST_COST, fit=fit)


TARGET = {"chunk_policy": "cost_target", "prefill_target_ms": 3.0}


def test_a_model_too_uncertain_for_control_falls_back_to_the_token_budget_and_says_so():
    config = SchedulerConfig(**TARGET, max_num_batched_tokens=2_048)
    assert isinstance(make_policy(config, TINY, Fitted.with_error(True)), CostTarget)
    assert fallback_note(config, Fitted.with_error(True)) is None
    for mape, text in ((0.2, "is 20.0%"), (None, "is not known")):
        bad = Fitted.with_error(False, mape)
        assert isinstance(make_policy(config, TINY, bad), TokenBudget)
        note = fallback_note(config, bad)
        assert "token budget, 2,048" in note
        assert text in note
    assert fallback_note(SchedulerConfig(), bad) is None, "nobody asked for a target"


def test_a_model_that_was_not_fitted_is_taken_at_its_word():
    assert isinstance(make_policy(SchedulerConfig(**TARGET), TINY, RowCost()), CostTarget)


def test_a_bound_on_gaps_leaves_the_host_and_one_decode_step_their_time():
    host = HostCost(schedule_ns=500_000, schedule_ns_per_seq=0, launch_ns=300_000,
                    process_ns=200_000, process_ns_per_seq=0)  # fmt: skip
    cost = replace(Fitted.with_error(True), host=host)
    config = SchedulerConfig(chunk_policy="cost_target", slo_itl_ms=10.0)
    policy = make_policy(config, TINY, cost)
    assert policy.target_ns == 10_000_000 - 1_000_000 - 2_000_000
    assert policy.chunk_tokens([], 0, 50_000, 8_192, 50_000) == 7_000 // 128 * 128
    tight = SchedulerConfig(chunk_policy="cost_target", slo_itl_ms=3.0)
    with pytest.raises(ConfigError, match=r"slo_itl_ms = 3\.0: must be above the 3\.000 ms"):
        make_policy(tight, TINY, cost)
