"""Latencies, gaps between tokens and goodput against numbers worked out by hand."""

import dataclasses

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mdi_analysis import SLO, Distribution, inter_token_latencies, meets_slo, request_latencies
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import TINY
from mdi_shared.errors import ConfigError, TraceError
from mdi_sim.simulate import simulate
from mdi_traces import Run, generate_workload, spread


def gaps_of(run) -> np.ndarray:
    """Every gap, ascending."""
    return np.repeat(*inter_token_latencies(run))


def test_latencies_of_each_request(run):
    found = request_latencies(run).set_index("req_id")
    r0, r1 = found.loc["r0"], found.loc["r1"]
    assert (r0["ttft_ms"], r0["ttft_engine_ms"], r0["queue_ms"], r0["e2e_ms"]) == (21, 21, 0, 29)
    assert (r1["ttft_ms"], r1["ttft_engine_ms"], r1["queue_ms"], r1["e2e_ms"]) == (16, 15, 6, 28)
    assert r0["tpot_ms"] == pytest.approx((29 - 21) / 2)
    assert r1["tpot_ms"] == pytest.approx((33 - 21) / 3)
    assert r1["tpot_with_first_ms"] == pytest.approx((33 - 5) / 4)
    assert found["outcome"].tolist() == ["completed", "completed", "rejected", "unfinished"]
    assert found.loc[["r2", "r3"], ["ttft_ms", "tpot_ms"]].isna().all(axis=None)


def test_one_token_output_has_no_tpot(run):
    requests = run.requests.assign(output_len=[1, 1, 0, 0])
    found = request_latencies(run.but(requests=requests))
    assert found["tpot_ms"].isna().all()
    assert found["tpot_with_first_ms"].tolist()[:2] == [29, 28]


@pytest.mark.parametrize("dtype", ["category", "object", "str"])
def test_outcomes_do_not_depend_on_the_string_type(run, dtype):
    requests = run.requests.astype({"finish_reason": dtype})
    found = request_latencies(run.but(requests=requests))["outcome"].tolist()
    assert found == ["completed", "completed", "rejected", "unfinished"]


def test_nullable_integer_columns_read_alike(run):
    columns = ["t_submit", "t_first_sched", "t_first_token", "t_last_token", "t_finish"]
    requests = run.requests.astype(dict.fromkeys(columns, "Int64"))
    pd.testing.assert_frame_equal(
        request_latencies(run.but(requests=requests)), request_latencies(run)
    )


def test_unknown_finish_reason_names_row_and_value(run):
    requests = run.requests.assign(finish_reason=["stop", "tired", None, None])
    with pytest.raises(TraceError, match=r"row 2, column 'finish_reason': 'tired' must be"):
        request_latencies(run.but(requests=requests))


def test_missing_column_is_named(run):
    broken = run.but(requests=run.requests.drop(columns="t_submit"))
    with pytest.raises(TraceError, match="requests table, column 't_submit': the column is"):
        request_latencies(broken)


def test_gaps_between_visible_tokens(run):
    # r0 shows tokens at 21, 25, 29 ms and r1 also at 33; the dropped row of r0 shows none.
    assert sorted(gaps_of(run).tolist()) == [4, 4, 4, 4, 4]


def test_tokens_of_one_step_are_one_moment(run):
    items = run.items.assign(emitted=run.items["emitted"] * 3)
    assert gaps_of(run.but(items=items)).tolist() == [4] * 5


def test_steps_that_end_together_are_one_moment(run):
    """Two steps may be seen at once, by a model that charges nothing; that is no gap of zero."""
    steps = run.steps.copy()
    steps.loc[2, "t_done"] = steps.loc[3, "t_done"]
    values, counts = inter_token_latencies(run.but(steps=steps))
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {4: 1, 8: 2}


def test_gaps_do_not_depend_on_row_order(run):
    uneven = run.steps.assign(t_done=np.array([11, 21, 25, 31, 33]) * 1_000_000)
    expected = gaps_of(run.but(steps=uneven))
    assert expected.tolist() == [2, 4, 4, 6, 6]
    shuffled = run.but(steps=uneven.iloc[::-1], items=run.items.iloc[::-1])
    assert sorted(gaps_of(shuffled).tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize(("drafts", "ranks"), [(0, 1), (2, 1), (0, 2), (2, 2)])
def test_gaps_need_no_row_per_token(drafts, ranks):
    """A simulated run has one entry for many tokens; drafts and preemption included."""
    work = generate_workload("azure-conv", num_requests=40, seed=2, rate=40)
    config = SchedulerConfig(max_num_seqs=8, num_draft_tokens=drafts, num_blocks=90,
                             max_model_len=6_000)  # fmt: skip
    found = simulate(work, scheduler=config, shape=TINY, ranks=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "PORTION", 100)
        assert len(list(found.item_pieces())) > 20
        entries = sum(len(spans.step) for spans in found.token_spans())
        assert drafts or ranks > 1 or 3 * entries < len(found.items_table)
        pieces = inter_token_latencies(found)
        assert pa.concat_tables(found.item_pieces()).equals(found.items_table)
    whole = Run(found.steps_table, found.requests_table, found.metadata, found.items_table)
    for each, other in zip(pieces, inter_token_latencies(whole), strict=True):
        assert each.tolist() == other.tolist()
    assert len(pieces[0]) < pieces[1].sum()
    every = Distribution.of(np.repeat(*pieces))
    counted = Distribution.of_counted(*pieces)
    assert dataclasses.astuple(counted) == pytest.approx(dataclasses.astuple(every), rel=1e-12)


def test_gaps_keep_ranks_apart(run):
    second = run.steps.assign(rank=1, t_done=run.steps["t_done"] * 2)
    items = run.items.assign(rank=1, req_id="s" + run.items["req_id"].astype(str))
    both = run.but(
        steps=pd.concat([second, run.steps]),
        items=pd.concat([run.items.astype({"req_id": str}), items]),
    )
    assert sorted(gaps_of(both).tolist()) == [4] * 5 + [8] * 5


def test_item_without_its_step_is_named(run):
    with pytest.raises(TraceError, match="row 8, column 'step': step 4 of rank 0 is not in"):
        gaps_of(run.but(steps=run.steps.iloc[:4]))


def test_time_running_backwards_is_refused(run):
    steps = run.steps.assign(t_done=run.steps["t_done"].to_numpy()[[0, 1, 3, 2, 4]])
    with pytest.raises(TraceError, match="column 't_done': a request's later step"):
        gaps_of(run.but(steps=steps))


def test_gaps_need_items(run):
    with pytest.raises(TraceError, match="items table: absent"):
        gaps_of(run.but(items=None))


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(), [True, True, False, False]),
        (SLO(ttft_ms=16), [False, True, False, False]),
        (SLO(ttft_ms=21, tpot_ms=3.9), [False, False, False, False]),
        (SLO(e2e_ms=28), [False, True, False, False]),
        (SLO(ttft_ms=30, tpot_ms=4, e2e_ms=30), [True, True, False, False]),
    ],
)
def test_slo_needs_every_bound_and_an_end(run, slo, met):
    assert meets_slo(request_latencies(run), slo).tolist() == met


def test_one_token_output_meets_any_tpot_bound(run):
    requests = run.requests.assign(output_len=[1, 4, 0, 0])
    latencies = request_latencies(run.but(requests=requests))
    assert meets_slo(latencies, SLO(tpot_ms=0.1)).tolist() == [True, False, False, False]


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), "fast", True])
def test_slo_bound_must_be_a_positive_number(bound):
    with pytest.raises(ConfigError, match=r"ttft_ms = .*: must be a number of ms above 0"):
        SLO(ttft_ms=bound)


def test_distribution_counts_known_values_only():
    found = Distribution.of(np.array([1.0, np.nan, 3.0, 2.0]))
    assert (found.n, found.mean, found.p50, found.max) == (3, 2.0, 2.0, 3.0)
    assert found.p90 == pytest.approx(np.percentile([1, 2, 3], 90))


@pytest.mark.parametrize("values", [[], [np.nan]])
def test_distribution_of_nothing_is_none_without_a_warning(values):
    found = Distribution.of(np.array(values, dtype=float))
    assert dataclasses.astuple(found) == (0, None, None, None, None, None)
