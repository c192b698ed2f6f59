"""Calibration: known models are found again, errors are honest, unusable runs are refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.cost.hardware import H200
from mdi_shared.cost.linear import (
    DECODE_TERMS,
    PREFILL_FEATURES,
    PREFILL_TERMS,
    DecodeTerms,
    LinearCost,
    PrefillTerms,
    features,
)
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.work import StepWork, decode_work, prefill_work
from mdi_shared.errors import ConfigError, TraceError
from mdi_sim.fit.calibrate import (
    calibrate,
    fit_runs,
    number_of_fits,
    read_recorded,
    recordings,
)
from mdi_sim.fit.diagnostics import diagnose, errors, folds
from mdi_sim.fit.features import (
    DECODE,
    FEATURES,
    PREFILL,
    Steps,
    ends_with_its_launch,
    extrapolated_steps,
    gather_steps,
    queued_ns,
    step_features,
)
from mdi_sim.fit.host import fit_host, host_times
from mdi_sim.fit.robust import choose_columns, fit_nonnegative
from mdi_sim.fit.steps import fit_decode, fit_steps, predict
from mdi_sim.simulate import simulate
from mdi_traces.requests import build_requests
from mdi_traces.run import Run
from mdi_traces.schema import METADATA_KEY, Metadata
from tests.sim.recorded import CONFIG, HOST, TRUTH, noisy_run, requests, step_table, with_columns

PREFILLS = [
    prefill_work(V41_FLASH, rows)
    for rows in ([(4_096, 4_096, 40_000)], [(4_096, 30_000, 40_000)], [(512, 512, 512)] * 4)
]
DECODES = [decode_work(V41_FLASH, [k] * n) for n, k in ((1, 100), (8, 4_000), (20, 20_000))]


@pytest.fixture(scope="module")
def run():
    return noisy_run()


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("runs") / "known"
    run.save(prefix)
    return prefix


@pytest.fixture(scope="module")
def small_chunks(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("runs") / "small_chunks"
    config = replace(CONFIG, max_num_batched_tokens=1_024)
    noisy_run(config=config, trace=requests(seed=7, longest=8_000), seed=7).save(prefix)
    return prefix


@pytest.fixture(scope="module")
def cost(saved, small_chunks):
    return calibrate([saved, small_chunks])


def off(found, truth, works):
    """Greatest relative difference of two models on some steps."""
    return max(abs(found.device_ns(w) / truth.device_ns(w) - 1) for w in works)


# ---- known coefficients ------------------------------------------------------------------------


def test_known_coefficients_are_found_again(cost):
    assert cost.prefill.idx_pairs_r2 == pytest.approx(TRUTH.prefill.idx_pairs_r2, rel=0.1)
    assert cost.prefill.n_seqs == pytest.approx(TRUTH.prefill.n_seqs, rel=0.15)
    line = [TRUTH.prefill.const + TRUTH.prefill.rows * rows for rows, _ in cost.prefill.base]
    assert [ns for _, ns in cost.prefill.base] == pytest.approx(line, rel=0.06)
    assert cost.decode.const == pytest.approx(TRUTH.decode.const, rel=0.02)
    assert cost.decode.sum_k == pytest.approx(TRUTH.decode.sum_k, rel=0.15)
    assert off(cost, TRUTH, PREFILLS + DECODES) < 0.02


def test_the_host_is_found_again(cost):
    expected = asdict(replace(HOST, prefill_launch_ns=HOST.launch_ns))
    assert asdict(cost.host) == pytest.approx(expected, rel=1e-3, abs=1)


def test_errors_on_held_out_shapes_are_those_of_the_noise(cost):
    for kind in (PREFILL, DECODE):
        found = cost.fit[kind]
        # The mean absolute value of a normal variable of standard deviation 2 % is 1.6 %.
        by_shape = found["held_out_shapes"]
        assert by_shape["mape"] == pytest.approx(0.016, abs=0.003)
        assert by_shape["p90"] < 0.045
        assert abs(by_shape["bias"]) < 0.005
        assert len(by_shape["mape_of_folds"]) == 5
        assert found["held_out"]["by"] == "recording"
        assert found["held_out_mape"] == found["held_out"]["mape"] < 0.03
        assert found["extrapolation"]["mape"] < 0.025
        assert found["usable_for_control"]
    assert set(by_shape["by_class"]) == {"short context", "long context"}
    assert set(cost.fit[PREFILL]["held_out"]["by_class"]) == {
        "one sequence", "several sequences", "short context", "long context",
    }  # fmt: skip


def test_outliers_do_not_decide():
    run = noisy_run(outliers=0.03, seed=5)
    tables = [run.steps_table]
    for kind, works in ((PREFILL, PREFILLS), (DECODE, DECODES)):
        terms = fit_steps(gather_steps(tables, kind)).terms
        found = replace(TRUTH, **{kind: terms})
        assert off(found, TRUTH, works) < 0.025


def test_short_chunks_together_are_told_from_a_long_one(cost):
    """With bounded replay they have different rows behind the boundary, sequences in any case."""
    together = prefill_work(V41_FLASH, [(1_024, 1_024, 1_024)] * 4)
    alone = prefill_work(V41_FLASH, [(4_096, 4_096, 4_096)])
    difference = cost.device_ns(together) - cost.device_ns(alone)
    assert difference == pytest.approx(TRUTH.device_ns(together) - TRUTH.device_ns(alone), rel=0.1)


def test_consumer_rows_are_fitted_where_replay_is_bounded():
    shape = replace(V41_FLASH, name="bounded", replay_keep_tokens=140)
    truth = replace(TRUTH, prefill=replace(TRUTH.prefill, rows=2_000.0, consumer_rows=3_000.0))
    run = noisy_run(truth, shape=shape, trace=requests(longest=8_000), sigma=0.01)
    fitted = fit_steps(gather_steps([run.steps_table], PREFILL))
    assert "consumer_rows" not in fitted.dropped
    assert fitted.terms.consumer_rows == pytest.approx(3_000.0, rel=0.1)


# ---- decode graphs and steps that are left out -------------------------------------------------

SIZES = np.array([1, 2, 4, 8, 16, 24, 32])


@pytest.fixture(scope="module")
def graphed():
    """A run whose decode steps ran as graphs, and the model behind it."""
    table = tuple((int(size), int(3e6 + 1e5 * size)) for size in SIZES)
    truth = replace(TRUTH, decode=DecodeTerms(const=9e6, rows=0.0, sum_k=2.0, n_seqs=5_000.0,
                                              graphs=table))  # fmt: skip
    steps = noisy_run(truth, seed=2).steps_table
    rows = steps["n_tokens"].to_numpy()
    is_decode = (np.array(steps["kind"].to_pylist()) == DECODE) & (rows > 0)
    sizes = np.where(is_decode, SIZES[np.searchsorted(SIZES, np.minimum(rows, 32))], 0)
    return truth, with_columns(steps, graph_size=sizes)


def test_graphs_are_a_table(graphed):
    truth, table = graphed
    steps = gather_steps([table], DECODE)
    fitted = fit_decode(steps)
    seen = np.unique(steps.graph).tolist()
    assert [size for size, _ in fitted.terms.graphs] == seen
    found = replace(truth, decode=fitted.terms)
    assert off(found, truth, DECODES) < 0.02
    assert steps.left_out["first of its kind in a run"] == len(seen)


def test_a_graph_never_seen_lies_between_its_neighbours(graphed):
    truth, table = graphed
    steps = gather_steps([table], DECODE)
    fitted = fit_decode(steps.take(steps.graph != 16)).terms
    times = dict(fitted.graphs)
    share = np.log(16 / 8) / np.log(24 / 8)
    assert times[16] == pytest.approx(times[8] * (times[24] / times[8]) ** share, abs=2)
    assert off(replace(truth, decode=fitted), truth, [decode_work(V41_FLASH, [900] * 13)]) < 0.05


def test_steps_whose_device_waited_for_the_host_are_left_out(graphed):
    truth, table = graphed
    starts, ends = (table[name].to_numpy() for name in ("t_dev_start", "t_dev_end"))
    launch = table["t_launch"].to_numpy()
    graph = table["graph_size"].to_numpy()
    starved = (np.arange(len(table)) % 3 == 0) & (graph > 0) & (graph < 32)
    # Starved steps began at once and lasted until the host had queued them, 20 ms later.
    queued_ms = np.where(starved, (starts - launch) / 1e6 + 20.0, 0.0)
    late = with_columns(table, t_dev_end=ends + starved * 20_000_000, cpu_launch_ms=queued_ms)
    steps = gather_steps([late], DECODE)
    assert steps.left_out["the device waited for the host"] > 20
    assert off(replace(truth, decode=fit_decode(steps).terms), truth, DECODES) < 0.02


def test_steps_whose_kernels_were_compiled_are_left_out(run):
    """A prefill of a new size that waits 5 s for a compiler says so in its launch time."""
    ends = run.steps_table["t_dev_end"].to_numpy().copy()
    launch_ms = np.where(run.steps["kind"] == PREFILL, 10.0, 0.3)
    slow = np.flatnonzero(run.steps["kind"] == PREFILL)[[20, 31, 57]]
    ends[slow] += 5_000_000_000
    launch_ms[slow] = 5_000
    table = with_columns(run.steps_table, t_dev_end=ends, cpu_launch_ms=launch_ms)
    steps = gather_steps([table], PREFILL)
    assert steps.left_out["launched in over 10 times the usual time"] == 3
    assert steps.ns.max() < 1e9


def test_graph_times_never_fall_and_larger_steps_have_a_line():
    steps = gather_steps([step_table(
        [DECODE] * 60, n_tokens=[1] * 30 + [2] * 30, n_seqs=[1] * 30 + [2] * 30,
        sum_k=list(range(100, 160)), max_k=list(range(100, 160)), graph_size=[1] * 30 + [2] * 30,
        t_dev_end=[5_000_000] * 30 + [4_000_000] * 30,
    )], DECODE)  # fmt: skip
    terms = fit_decode(steps).terms
    assert terms.graphs[0][1] <= terms.graphs[1][1]
    assert LinearCost(prefill=TRUTH.prefill, decode=terms).device_ns(
        decode_work(TINY, [9] * 3)
    ) >= terms.graphs[1][1]  # fmt: skip


# ---- the table over rows -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def roofline_steps():
    """Prefill steps of a roofline, from one row to 16,384 and alone as well as together."""
    truth = RooflineCost(H200, V41_FLASH, ep=8)
    runs = [
        noisy_run(truth, trace=requests(seed=seed, **what), seed=seed, sigma=0.01,
                  config=replace(CONFIG, max_num_batched_tokens=most))
        for seed, (most, what) in enumerate((
            (1_024, {}), (4_096, {}), (16_384, {}),
            (4_096, {"count": 200, "shortest": 1, "longest": 2_000, "burst": 1, "outputs": 2}),
        ))
    ]  # fmt: skip
    return gather_steps([run.steps_table for run in runs], PREFILL)


def test_a_roofline_is_predicted_nearly_within_its_noise(roofline_steps):
    """Few rows touch few experts, some hundred read all weights, thousands are arithmetic."""
    fitted = fit_steps(roofline_steps)
    found = diagnose(roofline_steps, fitted, roofline_steps.run)
    assert found["held_out_shapes"]["p50"] < 0.02
    assert found["held_out_shapes"]["p90"] < 0.06
    assert found["extrapolation"]["mape"] < 0.03
    rows = [size for size, _ in fitted.terms.base]
    assert rows[0] == roofline_steps.column("rows").min()
    assert rows[-1] == roofline_steps.column("rows").max()
    assert len(rows) > 5


# ---- columns -----------------------------------------------------------------------------------


def test_columns_are_those_of_the_works(run):
    """The step table holds the features of the step's items, and is what the model multiplies."""
    items = run.items
    for kind, make in ((PREFILL, prefill_work), (DECODE, decode_work)):
        found = step_features(run.steps_table, kind)
        rows = np.flatnonzero(run.steps["kind"] == kind)[:40]
        for row in rows.tolist():
            own = items[items["step"] == run.steps["step"][row]]
            if not len(own):
                continue
            lengths = zip(own["q"], own["k"], own["k"], strict=True)
            work = make(V41_FLASH, lengths if kind == PREFILL else own["k"].tolist())
            assert tuple(found[row]) == features(work)


@st.composite
def tables(draw, sizes):
    """Times by size that ascend and do not fall, as a base or a list of graphs."""
    sizes = sorted(draw(st.sets(sizes, max_size=6)))
    more = draw(st.lists(st.integers(0, 5_000_000), min_size=len(sizes), max_size=len(sizes)))
    return tuple(zip(sizes, np.cumsum(more).tolist(), strict=True))


RATES = st.one_of(st.just(0.0), st.floats(1e-3, 1e5))
ROWS = st.integers(1, 5_000)
RENAMED = {"cached_rows": "sum_k"}  # as StepWork has it


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_arrays_are_predicted_as_single_steps_are(data):
    """The fit's formula is the model's: any terms, inside and outside of tables."""
    rates = {kind: st.fixed_dictionaries(dict.fromkeys(terms, RATES))
             for kind, terms in ((PREFILL, PREFILL_TERMS), (DECODE, DECODE_TERMS))}  # fmt: skip
    graphs = data.draw(tables(ROWS))
    slopes = st.lists(st.floats(0, 9e4), min_size=len(graphs), max_size=len(graphs))
    prefill = PrefillTerms(**data.draw(rates[PREFILL]), base=data.draw(tables(ROWS)))
    decode = DecodeTerms(**data.draw(rates[DECODE]), graphs=graphs,
                         graph_slopes=tuple(data.draw(st.one_of(st.just([]), slopes))))  # fmt: skip
    cost = LinearCost(prefill=prefill, decode=decode)
    around = [size + more for size, _ in (*prefill.base, *graphs) for more in (0, 1)]
    for kind, terms in ((PREFILL, prefill), (DECODE, decode)):
        names = [RENAMED.get(name, name) for name in FEATURES[kind]]
        works = [
            StepWork(**dict.fromkeys(StepWork._fields, 0) | {"is_prefill": kind == PREFILL}
                     | {name: data.draw(st.integers(0, 10**6)) for name in names} | {"rows": rows})
            for rows in (*around, data.draw(ROWS))
        ]  # fmt: skip
        none = np.zeros(len(works), dtype=np.int64)
        x = np.array([features(work) for work in works], dtype=np.float64)
        predicted = predict(terms, Steps(kind, x, none, none, none, none, {}))
        expected = [cost.device_ns(work) for work in works]
        np.testing.assert_allclose(np.maximum(predicted, 1), expected, rtol=1e-12, atol=0.51)


def test_collinear_and_constant_columns_are_dropped_and_named(cost, run):
    dropped = cost.fit[PREFILL]["dropped"]
    assert "collinear" in dropped["consumer_rows"]
    assert "collinear" in dropped["swa_pairs"]
    assert "collinear" in cost.fit[DECODE]["dropped"]["n_seqs"]  # one row each: rows alike
    table = with_columns(run.steps_table, swa_pairs=np.full(len(run.steps_table), 7))
    assert fit_steps(gather_steps([table], PREFILL)).dropped["swa_pairs"] == "constant at 7"


def test_the_first_expendable_of_two_like_columns_goes():
    x = np.random.default_rng(0).random((50, 3))
    x[:, 2] = x[:, 1] * 2
    assert choose_columns(x, "abc", "cb") == (
        [0, 1], {"c": "collinear with the others, variance inflation infinite"})  # fmt: skip
    assert choose_columns(x, "abc", "b")[0] == [0, 2]
    assert choose_columns(x, "abc", "a")[0] == [0, 1, 2]


def test_coefficients_are_never_negative():
    x = np.column_stack([np.ones(40), np.arange(40.0)])
    found = fit_nonnegative(x, 100 - np.arange(40.0), np.ones(40))
    assert (found >= 0).all()
    assert found[1] == 0


# ---- diagnostics -------------------------------------------------------------------------------


def test_error_figures():
    found = errors(np.array([100.0, 200.0]), np.array([110.0, 180.0]))
    assert found["n"] == 2
    assert found["mape"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.0)
    assert found["max"] == pytest.approx(0.1)
    assert found["r2"] == pytest.approx(1 - 500 / 5_000)


def test_a_recording_that_runs_slower_is_seen_only_when_it_is_held_out(run):
    """Two like workloads, one on a GPU with 20 % less of everything."""
    ends, starts = (run.steps_table[name].to_numpy() for name in ("t_dev_end", "t_dev_start"))
    slower = with_columns(run.steps_table, t_dev_end=starts + (ends - starts) * 6 // 5)
    steps = gather_steps([run.steps_table, slower], PREFILL)
    found = diagnose(steps, fit_steps(steps), steps.run)
    assert found["held_out_shapes"]["mape"] == pytest.approx(0.1, abs=0.02)
    # Each predicted from the other: a fifth too high, and a sixth too low.
    assert found["held_out_mape"] == pytest.approx((1 / 5 + 1 / 6) / 2, abs=0.02)
    assert [each["runs"] for each in found["held_out"]["recordings"]] == [[0], [1]]
    assert found["held_out"]["recordings"][0]["bias"] == pytest.approx(1 / 5, abs=0.03)
    assert not found["usable_for_control"]


def test_runs_of_the_same_requests_are_held_out_together(run, saved, variant):
    """What one has seen, the other has; nothing is left to fit then, and shapes are held out."""
    again = read_recorded(variant("again", {"gap_ms": np.zeros(len(run.steps))}))
    assert recordings([read_recorded(saved), again]) == [0, 0]
    counted = []
    cost = fit_runs([read_recorded(saved), again], on_fit=counted.append)
    for kind in (PREFILL, DECODE):
        held_out = cost.fit[kind]["held_out"]
        assert held_out["by"] == "shape"
        assert "fewer than 10" in held_out["why_not_recordings"]
        assert held_out["mape"] == cost.fit[kind]["held_out_mape"]
    assert sum(counted) == 2 * (5 + 1) < number_of_fits([read_recorded(saved), again])


def test_a_group_is_never_on_both_sides():
    groups = [(i % 7, i % 3) for i in range(200)]
    fold = folds(groups)
    assert set(fold.tolist()) == set(range(5))
    for group in set(groups):
        assert len({fold[i] for i, other in enumerate(groups) if other == group}) == 1
    assert folds(groups).tolist() == fold.tolist()


def test_what_the_model_cannot_say_shows_in_the_errors(run):
    """A cost that grows with the cube of the context is linear in no feature."""
    k = run.steps_table["max_k"].to_numpy().astype(float)
    ends = run.steps_table["t_dev_start"].to_numpy() + (1e6 + 5e-7 * k**3).astype(int)
    steps = gather_steps([with_columns(run.steps_table, t_dev_end=ends)], PREFILL)
    found = diagnose(steps, fit_steps(steps), steps.run)
    assert found["held_out_mape"] > 0.2
    assert found["extrapolation"]["p50"] > 0.2
    assert not found["usable_for_control"]


def test_extrapolated_steps_agree_with_the_model(cost):
    narrow = replace(cost, decode_ranges={**cost.decode_ranges, "sum_k": (0, 20_000)},
                     prefill_ranges={**cost.prefill_ranges, "n_seqs": (1, 2)})  # fmt: skip
    run = simulate(requests(40, seed=9), cost=narrow)
    found = extrapolated_steps(run.steps_table, narrow)
    assert 0 < found["decode.sum_k"].sum() < len(run.steps)
    over = (run.steps["kind"] == DECODE) & (run.steps["sum_k"] > 20_000)
    assert (found["decode.sum_k"] == over.to_numpy()).all()
    several = (run.steps["kind"] == PREFILL) & (run.steps["n_seqs"] > 2)
    assert (found["prefill.n_seqs"] == several.to_numpy()).all()


# ---- host --------------------------------------------------------------------------------------


def test_a_turn_without_rows_costs_its_own_host_time_and_no_device_time():
    """A request that finds its engine idle waits for a vote while empty steps go by."""
    host = replace(HOST, idle_ns=70_000, ingress_ns_per_token=90, prefill_launch_ns=300_000,
                   prefill_launch_ns_per_token=110, process_ns_per_prompt_token=30)  # fmt: skip
    run = simulate(requests(40, burst=1, longest=200), cost=replace(TRUTH, host=host))
    assert (run.steps.query("kind == 'idle_decode'")["gpu_ms"] == 0).all()
    found, report = fit_host([(run.steps_table, run.requests_table)])
    assert found.idle_ns == 70_000
    assert found.launch(1) == 400_000
    for tokens in (10, 200):
        of_step = found.of_step(1, tokens, is_alone=True)
        assert of_step == pytest.approx(host.of_step(1, tokens, is_alone=True), rel=0.01)
    assert report["turns without rows"]["n"] > 100


def test_what_prompts_cost_the_host_is_found_again():
    host = replace(HOST, ingress_ns_per_token=90, launch_ns_per_seq=7_000,
                   prefill_launch_ns=300_000, prefill_launch_ns_per_token=110,
                   process_ns_per_prompt_token=30)  # fmt: skip
    run = simulate(requests(200, seed=4), scheduler=CONFIG, cost=replace(TRUTH, host=host))
    found, _ = fit_host([(run.steps_table, run.requests_table)])
    assert found.ingress(1_000) == pytest.approx(90_000, rel=0.02)
    assert found.launch(30) == pytest.approx(host.launch(30), rel=0.01)
    for tokens in (100, 4_000):
        of_step = found.of_step(3, tokens, is_alone=True)
        assert of_step == pytest.approx(host.of_step(3, tokens, is_alone=True), rel=0.02)


def test_work_without_a_launch_time_is_queued_when_it_is_handed_over():
    """As in a simulated run, where nothing says that a step took as long as its launch."""
    table = step_table([DECODE] * 2, t_launch=[30_000, 30_000], cpu_launch_ms=[None, 0.4],
                       t_dev_end=[500_000, 500_000])  # fmt: skip
    assert queued_ns(table) == pytest.approx([30_000, 430_000])
    assert ends_with_its_launch(table).tolist() == [False, True]


def test_host_times_of_a_recorded_timeline():
    """Two decode steps overlapped, then a prefill; times in us on paper, ns in the table.

    0 poll, 10 planned, 30 handed over, 60 queued. Next turn: 65 poll, 75 planned, 95 handed, 120
    queued, step 1 ends at 200, is processed by 220. 230 poll (a request has come), 260 planned,
    300 handed, 700 queued, step 2 ends at 400 and is processed by 720, the prefill ends at 900 and
    is processed by 930. It leaves nothing to do: 2,000 poll, the request came 5 before.
    """
    us = 1_000
    table = step_table(
        [DECODE, DECODE, PREFILL, PREFILL],
        n_tokens=[4, 4, 50, 50], n_seqs=[4, 4, 1, 1],
        t_sched=[0, 65 * us, 230 * us, 2_000 * us],
        t_launch=[30 * us, 95 * us, 300 * us, 2_050 * us],
        t_dev_start=[31 * us, 200 * us, 400 * us, 2_060 * us],
        t_dev_end=[200 * us, 400 * us, 900 * us, 2_500 * us],
        t_done=[220 * us, 720 * us, 930 * us, 2_520 * us],
        cpu_sched_ms=[0.010, 0.010, 0.030, 0.020], cpu_launch_ms=[0.030, 0.025, 0.400, 0.100],
        n_running=[4, 0, 0, 0], n_waiting=[0, 1, 0, 0],
        ingress_ms=[None, None, 0.001, 0.005], gap_ms=[None, 0.0, 0.0, 1.16],
    )  # fmt: skip
    prompts = build_requests(
        {"arrival_ns": pa.array([0, 229 * us, 1_995 * us], type=pa.int64()),
         "prompt_len": pa.array([40, 7, 50], type=pa.int32()),
         "output_len": pa.array([1, 1, 1], type=pa.int32())},
        Metadata(table="requests", source="runtime"),
    ).table  # fmt: skip
    found = host_times(table, prompts)
    at = {name: np.round(getattr(found, name) / us, 3) for name in (
        "schedule", "launch", "process", "ingress")}  # fmt: skip
    np.testing.assert_allclose(at["schedule"], [np.nan, 15, 40, np.nan])
    # Of a prefill's launch, what counts is until the device begins, if it had nothing else to do.
    np.testing.assert_allclose(at["launch"], [50, 45, np.nan, 40])
    np.testing.assert_allclose(at["process"], [20, 20, 30, 20])
    np.testing.assert_allclose(at["ingress"], [np.nan, np.nan, np.nan, 5])
    assert found.arrived.tolist() == [40, 0, 7, 50]
    assert found.rows.tolist() == [0, 0, 50, 50]
    host, report = fit_host([(table, prompts)])
    assert host.launch_ns == pytest.approx(47_500, abs=5)  # of decode steps alone
    assert (host.prefill_launch_ns, report["launch of prefill, until it begins"]["n"]) == (
        40_000,
        1,
    )
    assert host.idle_ns == host.schedule_ns  # no turn without rows was seen
    assert report["ingress of an idle engine"]["p50_ns"] == pytest.approx(5_000, abs=1)


# ---- files and refusals ------------------------------------------------------------------------


def test_the_file_is_a_model_that_says_where_it_comes_from(cost, saved, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(cost.to_json(), allow_nan=False))
    again = LinearCost.from_json(tmp_path / "m.json")
    assert again == cost
    fit = again.fit
    assert (fit["hardware"], fit["model"]) == ("testgpu", "v41-flash")
    assert fit["traces"][0]["name"] == "known"
    assert len(fit["traces"][0]["sha256"]) == 64
    assert fit["traces"][0]["options"]["scheduler"]["max_num_seqs"] == 32
    assert set(fit["units"][PREFILL]) == {"const", "base", *PREFILL_FEATURES}
    assert set(fit["units"][DECODE]) == {*DECODE_TERMS, "graphs"}
    assert again.prefill_ranges["rows"][1] == 4_096
    assert not again.in_range(prefill_work(V41_FLASH, [(8_192, 8_192, 8_192)]))
    assert again.in_range(prefill_work(V41_FLASH, [(1_000, 3_000, 3_000)]))
    run = simulate(requests(10), cost=again)
    assert run.metadata.hardware == "testgpu"


def test_equal_runs_give_equal_models(cost, saved, small_chunks):
    again = calibrate([f"{saved}.steps.parquet", f"{small_chunks}.parquet"])
    assert again.to_json() == cost.to_json()


@pytest.fixture
def variant(run, tmp_path):
    """Save the run with other metadata or columns; returns its prefix."""

    def save(name, columns=None, rows=None, **metadata):
        table = with_columns(run.steps_table.slice(0, rows), **(columns or {}))
        prefix = tmp_path / name
        Run(table, run.requests_table, replace(run.metadata, **metadata)).save(prefix)
        return prefix

    return save


@pytest.mark.parametrize("what", ["hardware", "model"])
def test_runs_that_differ_in_kind_are_not_mixed(saved, variant, what):
    with pytest.raises(ConfigError, match=f"{what} = 'other': of b differs from .* of known"):
        calibrate([saved, variant("b", **{what: "other"})])


def test_runs_of_other_dimensions_or_sources_are_not_mixed(saved, variant, run):
    other = variant("b", config={**run.metadata.config, "shape": {"vocab_size": 7}})
    with pytest.raises(ConfigError, match="model = 'v41-flash': of b has other dimensions"):
        calibrate([saved, other])
    with pytest.raises(ConfigError, match="source = 'runtime'"):
        calibrate([saved, variant("c", source="runtime", clock="monotonic")])


def test_a_run_counts_once(saved):
    with pytest.raises(ConfigError, match="is the same run as known"):
        calibrate([saved, saved])
    with pytest.raises(ConfigError, match="at least one run"):
        calibrate([])


@pytest.mark.parametrize(("version", "says"), [
    (1, "has schema version 1, calibration needs 2"), (5, "schema version 5 is newer than 4"),
])  # fmt: skip
def test_another_schema_version(variant, version, says):
    file = Path(f"{variant('v')}.steps.parquet")
    table = pq.read_table(file)
    document = json.loads(table.schema.metadata[METADATA_KEY]) | {"schema_version": version}
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(document)}), file)
    with pytest.raises(TraceError, match=says):
        calibrate([file])


def test_too_few_steps(variant):
    with pytest.raises(ConfigError, match=r"prefill steps = \d+: at least 30 are needed \(1 left"):
        calibrate([variant("short", rows=100)])


@pytest.mark.parametrize(("kind", "name", "column"), [
    (PREFILL, "rows", "n_tokens"), (PREFILL, "n_seqs", "n_seqs"), (DECODE, "sum_k", "sum_k"),
])  # fmt: skip
def test_a_constant_feature_is_named(variant, run, kind, name, column):
    values = run.steps_table[column].to_numpy().copy()
    values[(run.steps["kind"] == kind) & (values > 0)] = 3
    prefix = variant("flat", {column: values})
    with pytest.raises(ConfigError, match=f"{kind}.{name} = 3: is the same in all"):
        calibrate([prefix])
    cost = calibrate([prefix], allow_constant=True)
    assert cost.fit[kind]["dropped"][name] == "constant at 3"
    ranges = cost.prefill_ranges if kind == PREFILL else cost.decode_ranges
    assert ranges[name] == (3, 3)


def test_several_ranks_are_refused(tmp_path):
    simulate(requests(10), cost=TRUTH, ranks=2).save(tmp_path / "two")
    with pytest.raises(TraceError, match="several ranks"):
        calibrate([tmp_path / "two"])


def test_features_have_the_order_of_the_model():
    assert FEATURES[PREFILL] == PREFILL_FEATURES
    assert FEATURES[DECODE] == DECODE_TERMS[1:]
