"""What a simulated run promises: determinism, limits, ranks, sessions, drafts, refusals."""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from mdi_analysis import SLO, summarize
from mdi_analysis.summary import describe_counts
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.errors import ConfigError, DeadlockError
from mdi_shared.placement import LeastTokens
from mdi_sim.simulate import simulate
from mdi_traces.check import check_run
from mdi_traces.generate import generate_workload
from mdi_traces.requests import LATEST_NS, build_requests
from mdi_traces.schema import Metadata

MS = 1_000_000
COST = ConstantCost(prefill_ns=20 * MS, decode_ns=5 * MS)


def trace_of(arrivals, prompts, outputs, **columns):
    return build_requests(
        {
            "arrival_ns": pa.array(arrivals, type=pa.int64()),
            "prompt_len": pa.array(prompts, type=pa.int32()),
            "output_len": pa.array(outputs, type=pa.int32()),
            **columns,
        },
        Metadata(table="requests", source="generator"),
    )


def test_same_seed_same_bytes(tmp_path):
    for name in ("a", "b"):
        trace = generate_workload("azure-conv", num_requests=60, seed=3)
        simulate(trace, seed=5).save(tmp_path / name)
    for table in ("steps", "items", "requests"):
        a, b = (tmp_path / f"{name}.{table}.parquet" for name in ("a", "b"))
        assert a.read_bytes() == b.read_bytes()


def test_a_time_limit_leaves_unfinished_requests_with_a_reason():
    trace = trace_of([0, 10 * MS, 900 * MS], [100] * 3, [400, 3, 3])
    run = simulate(trace, cost=COST, until_s=0.5)
    reasons = run.requests["unfinished_reason"]
    assert reasons.iloc[0] == "time limit of 0.5 s"
    assert reasons.iloc[2] == "had not arrived"
    assert run.requests["finish_reason"].notna().tolist() == [False, True, False]
    assert 0 < run.requests["output_len"].iloc[0] < 400
    assert run.requests["t_last_token"].iloc[0] <= run.steps["t_done"].max()
    assert run.requests["t_submit"].isna().tolist() == [False, False, True]
    assert run.steps["t_done"].max() < 510 * MS


def test_the_latest_arrival_allowed_can_be_served():
    run = simulate(trace_of([0, LATEST_NS], [10, 10], [2, 2]), cost=COST)
    assert run.requests["finish_reason"].tolist() == ["length", "length"]
    assert run.requests["ttft_ms"].iloc[1] < 1_000


def test_refused_requests_are_counted_with_a_reason():
    config = SchedulerConfig(max_model_len=1_000, num_blocks=20)
    run = simulate(trace_of([0, 0], [1_001, 20], [5, 5]), scheduler=config, cost=COST)
    assert run.requests["finish_reason"].tolist() == ["prompt_length_exceeded", "length"]
    assert run.requests["t_first_sched"].isna().tolist() == [True, False]


def test_a_pool_too_small_for_any_request_is_refused_before_the_run():
    config = SchedulerConfig(max_model_len=1_000, num_blocks=4)
    with pytest.raises(ConfigError, match=r"num_blocks = 4: the KV pool is too small"):
        simulate(trace_of([0], [10], [5]), scheduler=config, cost=COST)


def test_upstream_rules_can_deadlock_and_say_so():
    """Two long prompts fill the pool; both chunks are held and nobody may go on (R22)."""
    config = SchedulerConfig(
        block_size=4, num_blocks=14, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40,
        prefill_attempt_interval=1, prefill_any_attempt_interval=1, strict_upstream=True,
    )  # fmt: skip
    trace = trace_of([0, 0], [24, 22], [16, 16])
    with pytest.raises(DeadlockError, match=r"held by: 0 \(7 blocks\), 1 \(6 blocks\)"):
        simulate(trace, scheduler=config, cost=COST)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_step_kind_and_wait_for_the_slowest(ranks):
    trace = generate_workload("azure-conv", num_requests=40, seed=1)
    run = simulate(trace, ranks=ranks)
    steps = run.steps
    is_prefill = steps["kind"].isin(["prefill", "idle_prefill"])
    assert (is_prefill.groupby(steps["step"]).nunique() == 1).all()
    for time in ("t_dev_start", "t_dev_end"):
        assert (steps.groupby("step")[time].nunique() == 1).all()
    assert sorted(run.requests["rank"].unique()) == list(range(ranks))
    assert [f for f in check_run(run) if not f.skipped] == []


def test_requests_keep_the_rank_the_trace_names_and_placement_fills_the_rest():
    ranks = pa.array([1, None, None, None], type=pa.int16())
    trace = trace_of([0] * 4, [10, 500, 10, 10], [2] * 4, rank=ranks)
    run = simulate(trace, cost=COST, ranks=2, placement=LeastTokens())
    assert run.requests["rank"].tolist() == [1, 0, 1, 1]
    with pytest.raises(ConfigError, match="rank = 1: request '0'"):
        simulate(trace, cost=COST, ranks=1)


def test_a_closed_loop_turn_arrives_a_think_time_after_the_one_before_ended():
    trace = trace_of(
        [0, 1 * MS, 2 * MS], [50] * 3, [10, 10, 10],
        session_id=pa.array(["s", "s", "s"]), turn=pa.array([0, 1, 2], type=pa.int32()),
        think_ns=pa.array([None, 70 * MS, 0], type=pa.int64()),
    )  # fmt: skip
    run = simulate(trace, cost=COST)
    requests = run.requests
    arrival, finish = requests["arrival_ns"].tolist(), requests["t_finish"].tolist()
    assert arrival == [0, finish[0] + 70 * MS, finish[1]]
    assert (requests["ttft_ms"] > 0).all()
    opened = simulate(trace.to_open_loop(), cost=COST)
    assert opened.requests["arrival_ns"].tolist() == [0, 1 * MS, 2 * MS]


def test_requests_that_never_arrived_count_nowhere():
    """A closed-loop turn whose predecessor still runs has not arrived either."""
    trace = trace_of(
        [0, 10 * MS, 20 * MS, 900 * MS], [100] * 4, [400, 3, 3, 3],
        session_id=pa.array(["s", None, "s", None]),
        think_ns=pa.array([None, None, 0, None], type=pa.int64()),
    )  # fmt: skip
    run = simulate(trace, cost=COST, until_s=0.5)
    summary = summarize(run, SLO(ttft_ms=10_000))
    assert (summary.requests.total, summary.requests.never_arrived) == (2, 2)
    assert (summary.requests.completed, summary.requests.unfinished) == (1, 1)
    assert summary.requests.by_unfinished_reason == {"time limit of 0.5 s": 1}
    assert summary.throughput.span_s < 0.51
    assert summary.goodput.goodput_share == 0.5
    assert describe_counts(summary.requests).endswith("1 unfinished; 2 more never arrived")
    assert [f for f in check_run(run) if not f.skipped] == []


@pytest.mark.parametrize("think", [0, 70 * MS])
def test_a_closed_loop_turn_on_another_rank_waits_for_its_predecessor(think):
    """Rank 1 sleeps or serves others meanwhile; the last turn comes back to rank 0."""
    trace = trace_of(
        [0, 1 * MS, 2 * MS, 3 * MS], [50] * 4, [10, 10, 10, 90],
        session_id=pa.array(["s", "s", "s", "t"]), turn=pa.array([0, 1, 2, 0], type=pa.int32()),
        think_ns=pa.array([None, think, think, None], type=pa.int64()),
        rank=pa.array([0, 1, 0, 1], type=pa.int16()),
    )  # fmt: skip
    run = simulate(trace, cost=COST, ranks=2)
    arrival, finish = (run.requests[name].tolist() for name in ("arrival_ns", "t_finish"))
    assert arrival[:3] == [0, finish[0] + think, finish[1] + think]
    assert run.requests["rank"].tolist() == [0, 1, 0, 1]
    assert (run.requests["ttft_ms"] > 0).all()
    assert [f for f in check_run(run) if not f.skipped] == []
    again = simulate(trace, cost=COST, ranks=2)
    assert again.requests.equals(run.requests)


def test_a_model_that_stops_early_ends_with_stop():
    trace = trace_of([0, 0], [20, 20], [30, 7], max_tokens=pa.array([30, 99], type=pa.int32()))
    for fast_forward in (True, False):
        run = simulate(trace, cost=COST, fast_forward=fast_forward)
        assert run.requests["finish_reason"].tolist() == ["length", "stop"]
        assert run.requests["output_len"].tolist() == [30, 7]


def test_drafts_shorten_a_run_and_leave_the_tokens_alone():
    trace = trace_of([0] * 3, [20, 40, 60], [60, 50, 41])
    steps = {}
    for drafts in (0, 3):
        config = SchedulerConfig(num_draft_tokens=drafts, max_num_seqs=8)
        run = simulate(trace, scheduler=config, cost=COST, draft_accept_rate=0.8)
        assert run.requests["output_len"].tolist() == [60, 50, 41]
        assert [f for f in check_run(run) if not f.skipped] == []
        steps[drafts] = (run.steps["kind"] == "decode").sum()
    assert steps[3] < 0.6 * steps[0]
    firsts = run.items.query("q == 4").groupby("req_id").first()
    assert firsts["accepted"].tolist() == [0, 0, 0], "placeholders behind a prompt"
    assert run.steps["n_accepted"].sum() > 0
    assert run.steps["n_draft_rows"].sum() == 3 * run.items.query("k > 61 or q == 4").shape[0] > 0


def test_cached_prefixes_are_not_computed_again():
    cached = pa.array([0, 90], type=pa.int32())
    run = simulate(trace_of([0, 0], [100, 100], [2, 2], cached_len=cached), cost=COST)
    first = run.items.query("step == 1").set_index("req_id")
    assert first["q"].to_dict() == {"0": 100, "1": 10}
    assert first["cached"].to_dict() == {"0": 0, "1": 90}
    assert run.steps["n_cached"].iloc[0] == 90


def test_progress_counts_every_ending():
    seen = []
    trace = trace_of([0, 5 * MS, 9 * MS], [10, 10, 10], [5, 6, 7])
    simulate(trace, cost=COST, on_progress=seen.append)
    assert sum(seen) == 3


def test_options_out_of_range_are_refused():
    run = partial(simulate, trace_of([0], [10], [5]), cost=COST)
    for options, field in (
        ({"ranks": 0}, "ranks"), ({"until_s": 0.0}, "until_s"),
        ({"draft_accept_rate": 1.5}, "draft_accept_rate"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=field):
            run(**options)


def test_many_votes_and_no_arrivals_change_nothing_in_a_long_tail():
    """A lone long output is almost entirely fast-forwarded, votes included."""
    config = SchedulerConfig(prefill_attempt_interval=1, prefill_any_attempt_interval=1)
    run = simulate(trace_of([0], [100], [3_000]), scheduler=config, cost=COST)
    decodes = run.steps.query("kind == 'decode'")
    assert len(decodes) == 3_000
    assert np.all(np.diff(decodes["max_k"]) == 1)
    assert set(decodes["vote"].iloc[1:]) == {"any"}
