"""What crosses the seam is plain data, and errors survive the trip too."""

import json
import pickle

import pytest

from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError, DeadlockError, TraceError
from mdi_shared.plan import StepPlan
from mdi_shared.request import TRANSITIONS, Request, Sequence, State
from tests.shared.script import play, request, toy


def test_plans_survive_json():
    script = {
        1: [request("A", 20), request("B", 30), request("C", 61)],
        3: [request("D", 9)],
        5: ["A"],
    }
    turns = play(toy(num_blocks=14, max_model_len=60), script, steps=40)
    plans = [turn.plan for turn in turns]
    assert any(plan.is_partial for plan in plans)
    assert any(plan.ignored for plan in plans)
    assert any(plan.finished for plan in plans)
    for plan in plans:
        again = StepPlan.from_json(json.loads(json.dumps(plan.to_json())))
        assert again == plan
        assert again.items == plan.items


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("ranks", 0, "must be at least 1"),
        TraceError("a.csv", "is empty", row=3, column="x"),
        DeadlockError("nothing runs", [("A", 3)]),
    ],
)
def test_errors_survive_pickling_and_rebuilding(error):
    for again in (pickle.loads(pickle.dumps(error)), type(error)(*error.args)):
        assert str(again) == str(error)
        assert "\n" not in str(again)


def test_the_life_cycle_is_a_table():
    for state, successors in TRANSITIONS.items():
        assert (state >= State.STOPPED) == (not successors), "terminal states lead nowhere"
    seq = Sequence(0, Request(req_id="A", prompt_len=3), eos_token_id=1, max_model_len=9)
    with pytest.raises(AssertionError, match="'A' cannot go from WAITING to STOPPED"):
        seq.become(State.STOPPED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0: must be at least 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs = '4': must be int"),
        ({"enable_zos": 1}, "enable_zos = 1: must be bool"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "the rows of a full decode step"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 512}, "max_model_len = 131072"),
        ({"chunk_policy": "magic"}, "must be one of token_budget, cost_target"),
        ({"chunk_policy": "cost_target"}, "prefill_target_ms = None"),
        ({"prefill_target_ms": 5.0}, "is used by chunk_policy = 'cost_target' only"),
        ({"slo_itl_ms": 5.0}, "slo_itl_ms = 5.0: is used by chunk_policy"),
        ({"chunk_policy": "cost_target", "prefill_target_ms": 5.0, "slo_itl_ms": 5.0},
         "contradicts prefill_target_ms = 5.0"),
        ({"chunk_policy": "cost_target", "slo_itl_ms": float("inf")}, "slo_itl_ms = inf"),
        ({"prefill_max_sum_seqlen_k": 5}, "the longest prompt admitted, 131072"),
        ({"block_size": 2, "num_draft_tokens": 5}, "block_size = 2"),
        ({"num_blocks": 1}, "block 0 is reserved"),
        ({"context_parallel_size": 8, "max_num_batched_tokens": 9, "max_num_seqs": 1},
         "2 * context_parallel_size = 16"),
    ],
)  # fmt: skip
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**options)
    assert message in str(caught.value)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"max_seqs = 3: unknown option; known: max_num_seqs"):
        SchedulerConfig.from_mapping({"max_seqs": 3})


def test_a_retired_option_is_read_where_it_was_off():
    """Records of earlier versions hold it."""
    assert SchedulerConfig.from_mapping({"balance_target": False}) == SchedulerConfig()
    with pytest.raises(ConfigError, match="balance_target = True: this option was removed"):
        SchedulerConfig.from_mapping({"balance_target": True})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 4, "max_tokens": 0}, "max_tokens"),
        ({"prompt_len": 4, "cached_len": 4}, "cached_len"),
        ({"prompt_len": 4, "chunk_checkpoints": (3, 2)}, "chunk_checkpoints"),
        ({"prompt_len": 4, "chunk_checkpoints": (0,)}, "chunk_checkpoints"),
        ({"prompt_len": 4, "chunk_checkpoints": (2, 5)}, "chunk_checkpoints"),
    ],
)
def test_impossible_requests_are_refused(options, field):
    with pytest.raises(ConfigError, match=field):
        Request(req_id="A", **options)


def test_derived_defaults():
    assert SchedulerConfig().token_budget == 8_192
    upstream = SchedulerConfig(strict_upstream=True, max_model_len=50_000)
    assert upstream.token_budget == 50_000
    assert SchedulerConfig(max_num_seqs=4_000, num_draft_tokens=5).token_budget == 24_000
    assert SchedulerConfig(chunked_prefill=False, max_model_len=9_000).prompt_limit == 9_000
    assert SchedulerConfig(max_num_seqs=10).num_slots == 13
    assert SchedulerConfig(max_model_len=100, num_draft_tokens=5).runtime_max_model_len == 116


def test_a_live_request_id_cannot_be_used_twice():
    with pytest.raises(ConfigError, match="req_id = 'A': is in use"):
        play(toy(), {1: [request("A", 5), request("A", 5)]}, steps=2)
