"""Step frames, roofline position and reasons, on recordings of an H200 and on made-up tables."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mdi_analysis import (
    per_kind_summary,
    roofline_position,
    run_shape,
    slowest_steps,
    step_items_frame,
    steps_frame,
)
from mdi_analysis.step_frames import ITEM_COLUMNS, STEP_COLUMNS, columns_markdown
from mdi_analysis.step_roofline import step_works
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.linear import PREFILL_FEATURES, LinearCost, features
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.errors import ConfigError, TraceError
from mdi_traces import load_run
from mdi_traces.run import Run
from tests.sim.recorded import with_columns

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "traces" / "recorded"


@pytest.fixture(scope="module")
def preempted():
    return load_run(RECORDED / "h200-tiny" / "preemption")


@pytest.fixture(scope="module")
def frame(preempted):
    return steps_frame(preempted, cost=ConstantCost(20_000_000, 2_000_000))


@pytest.fixture(scope="module")
def online():
    return load_run(RECORDED / "h200-flash-slice" / "online_high")


@pytest.fixture(scope="module")
def compiled(online):
    """`online` as if the launch of step 512, a prefill behind a decode step, compiled for 12 s.

    The host reads the step before only then, and all that follows is later.
    """
    table, steps, late_ns = online.steps_table, online.steps, 12_000_000_000
    at = steps["step"].to_numpy() - 512
    assert steps["kind"][at == 0].tolist() == ["prefill"]
    first_late = {"t_sched": 1, "t_launch": 1, "t_dev_start": 1, "t_dev_end": 0, "t_done": -1}
    late = {mark: steps[mark] + late_ns * (at >= first) for mark, first in first_late.items()}
    launch_ms = steps["cpu_launch_ms"] + late_ns / 1e6 * (at == 0)
    table = with_columns(table, **late, cpu_launch_ms=launch_ms)
    return Run(table, online.requests_table, online.metadata, online.items_table)


def test_frame_adds_the_documented_columns(preempted, frame):
    added = [name for name in frame.columns if name not in preempted.steps.columns]
    assert [name for name in STEP_COLUMNS if name not in preempted.steps.columns] == added
    without = steps_frame(preempted, items=False)
    assert set(frame.columns) - set(without.columns) == {
        "max_q", "first_chunks", "recomputed_rows", "longest_req", "oldest_wait_ms",
    }  # fmt: skip
    items = step_items_frame(preempted)
    assert set(items.columns) - set(preempted.items.columns) == set(ITEM_COLUMNS)


def test_documented_columns_are_the_ones_in_the_guide():
    guide = (ROOT / "docs" / "step-timings.md").read_text(encoding="utf-8")
    assert columns_markdown(STEP_COLUMNS) in guide
    assert columns_markdown(ITEM_COLUMNS) in guide


def test_times_of_a_step_worked_out_by_hand(run):
    steps = run.steps.assign(
        graph_size=0, cpu_launch_ms=[101, 1, 0.5, 0.5, 0.5], n_waiting=[1, 0, 0, 0, 0]
    )
    found = steps_frame(run.but(steps=steps.iloc[::-1]), items=False)
    assert found["step"].tolist() == [0, 1, 2, 3, 4]
    assert found["device_ms"].tolist() == [8, 8, 2, 2, 2]
    assert found["gap_ms"].tolist()[1:] == [2, 2, 2, 2]
    assert found["host_ms"].tolist() == [102.25, 2.25, 1.75, 1.75, 1.75]
    assert found["turn_ms"].tolist()[1:] == [10, 4, 4, 4]
    assert found["had_requests"].tolist() == [False, True, True, True, True]
    assert found["emitted"].tolist() == [0, 2, 2, 2, 1]
    assert found["is_first"].tolist() == [True, False, True, False, False]
    assert found["is_compile"].tolist() == [True, False, False, False, False]
    assert np.isnan(found["predicted_ms"]).all()


def test_a_gap_without_requests_is_told_apart(run):
    later = [0, 0, 5_000_000_000, 0, 0]
    steps = run.steps.assign(n_running=[1, 0, 1, 1, 0], n_waiting=0)
    for mark in ("t_sched", "t_launch", "t_dev_start", "t_dev_end", "t_done"):
        steps[mark] += np.cumsum(later)
    found = steps_frame(run.but(steps=steps), items=False)
    assert (found["gap_ms"][2], found["had_requests"][2]) == (5_002, False)
    assert slowest_steps(found, 5, by="gap_ms")["gap_ms"].tolist() == [2, 2, 2]


def test_items_tell_recomputed_rows_first_chunks_and_waits(preempted, frame):
    items = step_items_frame(preempted)
    requests = preempted.requests.set_index("req_id")
    recomputed = items.groupby("req_id")["recomputed_rows"].sum()
    stated = requests["n_recomputed_tokens"].loc[recomputed.index]
    assert stated.sum() > 0
    assert recomputed.tolist() == stated.tolist()
    assert items["is_first_chunk"].sum() == frame["first_chunks"].sum() == len(requests)
    waits = (requests["t_first_sched"] - requests["arrival_ns"]) / 1e6
    assert frame["oldest_wait_ms"].max() == pytest.approx(float(waits.max()))
    shares = items.groupby("step")["share_ms"].sum()
    device = frame.set_index("step")["device_ms"]
    assert shares.to_numpy() == pytest.approx(device.loc[shares.index].to_numpy())


def test_work_is_read_back_to_the_last_pair(preempted):
    shape, steps = run_shape(preempted), preempted.steps
    prompts = preempted.requests.set_index("req_id")["prompt_len"]
    works = dict(zip(steps["step"], step_works(steps, shape), strict=True))
    kinds = steps.set_index("step")["kind"]
    items = preempted.items.assign(prompt=preempted.items["req_id"].astype(str).map(prompts))
    for step, mine in items.groupby("step"):
        if kinds[step] == "prefill":
            rows = mine[["q", "k", "prompt"]].itertuples(index=False, name=None)
            assert works[step] == prefill_work(shape, rows)
        else:
            assert works[step] == decode_work(shape, mine["k"].tolist())


def test_features_are_those_of_the_cost_model(preempted, frame):
    prefill = frame[frame["kind"] == "prefill"]
    works = step_works(prefill, run_shape(preempted))
    assert prefill[list(PREFILL_FEATURES)].to_numpy().tolist() == [
        list(features(work)) for work in works
    ]


def test_predictions_and_errors(frame):
    decode = frame[frame["kind"] == "decode"]
    assert set(decode["predicted_ms"]) == {2.0}
    assert decode["error"].to_numpy() == pytest.approx(2 / decode["device_ms"].to_numpy() - 1)
    assert frame.loc[frame["rows"] == 0, "predicted_ms"].isna().all()


def test_a_fitted_model_names_what_it_has_not_seen(online):
    tiny = LinearCost.from_json(ROOT / "traces" / "models" / "h200-tiny.json")
    found = steps_frame(online, cost=tiny, items=False)
    assert "rows" in found.loc[found["kind"] == "prefill", "extrapolated"].iloc[0].split()
    own = LinearCost.from_json(ROOT / "traces" / "models" / "h200-flash-slice.json")
    assert (steps_frame(online, cost=own, items=False)["extrapolated"] == "").all()


def test_summary_by_kind(frame):
    found = per_kind_summary(frame)
    assert found.index.tolist() == ["prefill", "decode", "idle_decode"]
    decode = frame[frame["kind"] == "decode"]
    assert found.loc["decode", "steps"] == len(decode)
    assert found.loc["decode", "device_p90"] == pytest.approx(decode["device_ms"].quantile(0.9))
    assert found["device_share"].sum() == pytest.approx(1)
    assert found.loc["decode", "error_p50"] == pytest.approx(decode["error"].abs().median())


def test_roofline_position_agrees_with_the_roofline(preempted, frame):
    shape = run_shape(preempted)
    found = roofline_position(frame, shape, "h200")
    assert found["flops"].dropna().tolist() == frame["flops_total"][frame["rows"] > 0].tolist()
    assert found["intensity"].equals(found["flops"] / found["moved_bytes"])
    busy = found.dropna()
    assert (busy["floor_ms"] <= busy["compute_ms"] + busy["memory_ms"] + 1e-12).all()
    assert (busy["floor_ms"] >= busy[["compute_ms", "memory_ms"]].max(axis=1) - 1e-12).all()
    assert busy["roofline_share"].between(0, 1).all()
    assert set(busy["bound"]) == {"memory"}
    half = RooflineCost(H200, shape)  # overheads and shares of peak only add to a floor
    works = [work for work in step_works(frame, shape) if work is not None]
    assert (busy["floor_ms"] * 1e6 <= [half.device_ns(work) for work in works]).all()


def test_large_chunks_of_true_dimensions_are_bound_by_arithmetic_decode_by_traffic():
    run = load_run(RECORDED / "h200-flash-slice" / "decode")
    found = roofline_position(run.steps, run_shape(run), H200)["bound"]
    assert set(found[run.steps["n_tokens"] == 8_192]) == {"compute"}
    assert set(found[run.steps["kind"] == "decode"]) == {"memory"}


def test_dimensions_that_are_not_the_runs_are_refused(online, run):
    with pytest.raises(ConfigError, match=r"shape = 'tiny': is not what the run was made with: "
                       r"step 1 of rank 0 has flops_total = \d+"):  # fmt: skip
        roofline_position(online.steps, TINY, "h200")
    with pytest.raises(ConfigError, match=r"hardware = 'abacus': must be one of h100"):
        roofline_position(online.steps, run_shape(online), "abacus")
    unknown = run.but(metadata=type(run.metadata)(model="other"))
    with pytest.raises(ConfigError, match="shape = None: the metadata of the run have no dim"):
        run_shape(unknown)


def test_items_are_needed_only_where_they_are_asked_for(run):
    bare = run.but(items=None)
    assert "max_q" not in steps_frame(bare)
    with pytest.raises(TraceError, match="absent"):
        step_items_frame(bare)


def test_the_compiling_step_is_told_and_does_not_count_as_usual(compiled):
    own = LinearCost.from_json(ROOT / "traces" / "models" / "h200-flash-slice.json")
    frame = steps_frame(compiled, cost=own)
    found = slowest_steps(frame, 1)
    assert frame["step"][frame["is_compile"]].tolist() == found["step"].tolist() == [512]
    assert found["why"][0].startswith("kernels compiled during its launch: 12,014 ms, 13.9 ms is")
    assert re.search(r"against the model's 1\d\d ms$", found["why"][0])
    late = slowest_steps(frame, 1, by="turn_ms")
    assert late["step"].tolist() == [511]
    assert re.search(r"its results were read 12,00\d ms later than usual", late["why"][0])


def test_first_use_of_a_graph_is_told_of_a_recording(online):
    frame = steps_frame(online)
    first = frame["step"][frame["is_first"] & (frame["graph_size"] > 0)]
    found = slowest_steps(frame, len(frame), kind="decode")
    told = found["step"][found["why"].str.contains("first use of the graph for")]
    assert len(told) > 0
    assert set(told) <= set(first)


def made(n=40, **changes):
    """A frame of decode steps that take 1 ms, 0.01 per row and 0.0001 per context token."""
    rows = np.tile([8, 16, 24, 32], n // 4)
    context = np.repeat([1_000, 2_000], n // 2)
    steps = pd.DataFrame({
        "step": np.arange(n), "rank": 0, "kind": "decode", "n_seqs": rows, "rows": rows,
        "n_tokens": rows, "max_k": context, "cached_rows": context, "n_waiting": 0,
        "device_ms": 1 + 0.01 * rows + 0.0001 * context, "gap_ms": 0.0, "host_ms": 0.5,
        "turn_ms": 2.0, "plan_ms": 0.1, "visible_ms": 0.1, "predicted_ms": np.nan,
        "extrapolated": "", "had_requests": True, "is_first": False, "is_compile": False,
        "graph_size": 32, "cpu_launch_ms": 0.2, "moe_imbalance": 2.0, "wait_ms": np.nan,
        "n_preempted": 0, "recomputed_rows": 0.0,
    })  # fmt: skip
    for name, value in changes.items():
        if isinstance(value, float):
            steps[name] = steps[name].astype(float)
        steps.loc[n - 1, name] = value
    return steps


def why(**changes):
    return slowest_steps(made(**changes), 1)["why"][0]


def test_rows_and_context_are_priced_by_the_runs_own_steps():
    text = why(device_ms=9.0, rows=500, cached_rows=30_000, max_k=4_000, is_first=True)
    assert "500 rows, the median is 16: about 4.84 ms" in text
    assert "30,000 tokens of context, the longest 4,000" in text
    assert text.index("500 rows") < text.index("30,000 tokens")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"graph_size": 0}, "no captured graph holds its rows"),
        ({"moe_imbalance": 7.0}, "busiest expert at 7.00 times the mean, 2.00 is usual"),
        ({"gap_ms": 3.0}, "the device had been idle for 3.00 ms, 0 ms is usual"),
        ({"cpu_launch_ms": 8.0}, "bound by its launch: the host took 8.00 ms"),
        ({"n_preempted": 2}, "2 preempted while it was planned"),
        ({"recomputed_rows": 16.0}, "16 of its rows recomputed after a preemption"),
        ({"wait_ms": 2.0}, "2.00 ms at barriers"),
        ({"visible_ms": 4.0}, "its results were read 3.90 ms later than usual"),
        ({"predicted_ms": 4.0}, "no reason in the trace; +100% against the model's 4.00 ms"),
        ({"predicted_ms": 4.0, "extrapolated": "sum_k"}, ", outside its range in sum_k"),
    ],
)
def test_each_reason_is_told_alone(changes, says):
    base = {"device_ms": 8.0, "rows": 16.0, "cached_rows": 1_000.0}
    text = why(**base, **changes)
    assert says in text
    assert text.count(";") == ("no reason" in says) + ("outside" in says)


def test_a_step_like_the_others_is_called_ordinary():
    assert (
        why(device_ms=1.6, rows=16, cached_rows=1_000)
        == "nothing unusual: an ordinary step of its size"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": "rows"}, "by = 'rows': must be one of device_ms"),
        ({"kind": "flush"}, "kind = 'flush': must be None or one of prefill, decode"),
        ({"n": 0}, "n = 0: must be at least 1"),
    ],
)
def test_wrong_questions(options, says):
    with pytest.raises(ConfigError, match=says):
        slowest_steps(made(), **options)


def test_ranks_of_one_step_count_once():
    both = pd.concat([made(), made().assign(rank=1, rows=made()["rows"] + 1)])
    found = slowest_steps(both, 5)
    assert found["step"].is_unique
    assert set(found["rank"]) == {1}


def test_a_run_without_steps_gives_empty_frames(nothing):
    found = steps_frame(nothing)
    assert len(found) == 0
    assert slowest_steps(found).empty
    assert per_kind_summary(found).empty
