"""A lab: what it plans, that results are found again and shared, and what its statistics say."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import minideepinfer as mdi
from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_sim.search.lab import Lab, load_name, served_under
from mdi_sim.search.rows import SCHEMA, columns_markdown, load_rows, rows_frame
from mdi_sim.search.slo import parse_service_level
from mdi_sim.search.statistics import paired_differences, ranking, t_interval
from minideepinfer import measures

STEPS = mdi.ConstantCost(prefill_ns=20_000_000, decode_ns=5_000_000)
SMALL = {"cost": STEPS, "scheduler": {"num_blocks": 200, "max_model_len": 16_384,
                                      "prefill_attempt_interval": 1}, "ranks": 1}  # fmt: skip
ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_lab(policies=("fcfs", "srpt"), **options):
    return mdi.lab(["azure-conv"], policies, requests=12, loads=[20], **{**SMALL, **options})


def test_one_row_per_run_that_repeats_it(here):
    found = small_lab(seeds=2, slo="ttft<=300,tpot<=20")
    frame = found.frame
    assert list(frame.columns) == SCHEMA.names
    assert frame[["seed", "policy"]].values.tolist() == [
        [0, "fcfs"], [0, "srpt"], [1, "fcfs"], [1, "srpt"],
    ]  # fmt: skip
    row = frame.iloc[1]
    run = mdi.RunDescription.from_json(json.loads(row["description"]))
    work = mdi.generate_workload("azure-conv", num_requests=12, rate=20.0, seed=0)
    again = mdi.simulate(work, run).summary(mdi.SLO(ttft_ms=300, tpot_ms=20))
    assert row["ttft_ms_p99"] == again.latency.ttft_ms.p99
    assert row["itl_ms_mean"] == again.latency.itl_ms.mean
    assert row["goodput_share"] == again.goodput.goodput_share
    assert row["offered_req_s"] == pytest.approx(11 / (work.table["arrival_ns"][-1].as_py() / 1e9))
    assert row["slowdown_mean"] >= 1
    assert frame["error"].isna().all()
    loaded = mdi.LabResult.load("lab")
    assert loaded.frame.equals(frame)
    assert loaded.plan == found.plan


def test_runs_of_a_seed_serve_the_same_workload():
    lab = Lab(traces={"azure-conv": mdi.Served(workload="azure-conv", requests=9)},
              policies={"fcfs": "fcfs", "srpt": "srpt"}, loads=["2", "speed=3"], seeds=(4, 5),
              settings={"default": {}, "few": {"max_num_seqs": 2}}, options=SMALL)  # fmt: skip
    plan = lab.plan()
    assert len(plan) == len({each.key for each in plan}) == 16
    served = {}
    for each in plan:
        served.setdefault((each.load, each.seed), set()).add((each.run.served, each.run.seed))
    assert all(len(workloads) == 1 for workloads in served.values())
    assert {each.run.scheduler.max_num_seqs for each in plan if each.setting == "few"} == {2}
    assert [each.load for each in plan[:4]] == ["rate=2", "rate=2", "speed=3", "speed=3"]


def test_what_is_there_is_not_run_again(here, monkeypatch):
    first = small_lab(seeds=2)
    calls = []
    monkeypatch.setattr(measures, "simulate", lambda *a, **k: calls.append(a) or pytest.fail("ran"))
    again = small_lab(seeds=2)
    assert again.frame.equals(first.frame)
    assert calls == []
    # A longer lab runs what is new only, whatever the places in the plan.
    monkeypatch.undo()
    monkeypatch.chdir(here)
    ran = []
    simulate = measures.simulate
    monkeypatch.setattr(measures, "simulate", lambda *a: ran.append(a[1].policy) or simulate(*a))
    longer = small_lab(("lcfs", "srpt", "fcfs"), seeds=2)
    assert ran.count("srpt") == 0
    assert ran.count("lcfs") == 2
    shared = longer.frame[longer.frame["policy"] == "srpt"]["key"].tolist()
    assert shared == first.frame[first.frame["policy"] == "srpt"]["key"].tolist()


def test_a_damaged_result_is_computed_anew(here):
    before = small_lab(seeds=1)
    key = before.frame["key"][0]
    Path("lab/runs", key[:2], f"{key}.json").write_text('{"key": "cut o')
    after = small_lab(seeds=1)
    assert after.frame.drop(columns="wall_s").equals(before.frame.drop(columns="wall_s"))


def test_other_inputs_have_other_names(here):
    plan = Lab(traces={"t": mdi.Served(workload="azure-conv", requests=3)},
               policies={"fcfs": "fcfs"}, options=SMALL)  # fmt: skip
    slo = parse_service_level("ttft<=100")
    others = [
        replace(plan, seeds=(1,)), replace(plan, policies={"fcfs": "lcfs"}),
        replace(plan, slo=slo),
        replace(plan, traces={"t": mdi.Served(workload="azure-conv", requests=4)}),
        replace(plan, options={**SMALL, "cost": mdi.ConstantCost(prefill_ns=1, decode_ns=1)}),
    ]  # fmt: skip
    keys = [each.plan()[0].key for each in (plan, *others)]
    assert len(set(keys)) == len(keys)
    # Where a file lies changes no result.
    mdi.generate_workload("azure-conv", num_requests=3, seed=0).save("one.csv")
    Path("two.csv").write_bytes(Path("one.csv").read_bytes())
    files = [replace(plan, traces={name: mdi.Served(trace=name)}).plan()[0].key
             for name in ("one.csv", "two.csv")]  # fmt: skip
    assert files[0] == files[1]
    same = replace(plan, slo=parse_service_level("ttft<=100,share>=0.5"))
    assert same.plan()[0].key == replace(plan, slo=slo).plan()[0].key


def test_a_recorded_trace_has_one_replicate(here):
    mdi.generate_workload("azure-conv", num_requests=5, seed=0).save("t.csv")
    found = mdi.lab(["t.csv"], ["fcfs"], loads=["as recorded", "arrivals=poisson:9"], seeds=3,
                    **SMALL)  # fmt: skip
    assert found.frame.groupby("load").size().to_dict() == {
        "as recorded": 1, "arrivals=poisson:9": 3,
    }  # fmt: skip


def test_a_run_that_fails_is_a_row(here):
    class Broken(mdi.Policy):
        def order(self, seq, view):
            return float("nan")

    found = small_lab({"fcfs": "fcfs", "mine": Broken()}, seeds=1)
    error = found.frame.set_index("policy")["error"]
    assert error.isna().to_dict() == {"fcfs": True, "mine": False}
    assert "order for request" in error["mine"]
    assert found.frame.set_index("policy")["ttft_ms_mean"].isna().to_dict() == {
        "fcfs": False, "mine": True,
    }  # fmt: skip
    standings = found.ranking()
    assert [each.failed for each in standings] == [0, 1]
    assert not standings[1].on_front
    assert "failed: mine on azure-conv, rate=20, seed 0: policy Broken" in found.table()


def test_a_policy_of_ones_own_is_not_kept(here):
    class Mine(mdi.Policy):
        def order(self, seq, view):
            return -seq.request.arrived_ns

    small_lab({"mine": Mine(), "lcfs": "lcfs"}, seeds=1)
    assert len(list(Path("lab/runs").rglob("*.json"))) == 1


SHARED = """
import sys
import minideepinfer as mdi
found = mdi.lab(["azure-conv"], ["fcfs", "srpt", "lcfs"], requests=40, loads=[20], seeds=6,
                cost="h200-flash-slice", ranks=1, out="shared",
                on_run=lambda n: print("run", flush=True))
print(found.frame["e2e_ms_mean"].sum())
"""


def test_killed_it_goes_on_and_two_share_a_folder(here):
    """Kill one in the middle, then let two finish the rest: the sum is that of one alone."""
    (here / "script.py").write_text(SHARED)
    command = [sys.executable, "script.py"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "run\n"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    kept = len(list(Path("shared/runs").rglob("*.json")))
    assert 1 <= kept < 18
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = [each.communicate(timeout=120)[0].splitlines()[-1] for each in both]
    assert sums[0] == sums[1]
    assert len(list(Path("shared/runs").rglob("*.json"))) == 18
    assert not list(Path("shared").rglob("*.partial"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policies": ["nope"]}, "'nope' is not a policy"),
        ({"policies": ["fcfs", "fcfs"]}, r"policies = \['fcfs', 'fcfs'\]: one is given twice"),
        ({"policies": []}, r"policies = \[\]: must name at least one"),
        ({"loads": ["x"]}, "loads = 'x': must be a number"),
        ({"loads": ["rat=3"]}, "loads = 'rat=3': must be a rate, rate=…, speed=…"),
        ({"loads": [3, "rate=3"]}, "loads = 'rate=3': is given twice"),
        ({"loads": [0]}, "rate = 0.0: must be a finite number above 0"),
        ({"settings": {"a": {"max_num_seq": 3}}}, "did you mean max_num_seqs"),
        ({"settings": {"a": {"max_num_seqs": 0}}}, "setting a: max_num_seqs = 0: must be"),
        ({"placements": ["x"]}, "placement = 'x': 'x' is not a placement"),
        ({"seeds": 0}, "seeds = 0: must be at least 1"),
        ({"seeds": [-1]}, "seeds = -1: must be at least 0"),
        ({"slo": "ttft"}, "slo = 'ttft': must be METRIC.STATISTIC<=MS"),
        ({"slo": "ttft.p99<=3"}, "a lab takes bounds on each request, such as"),
        ({"traces": ["no.csv"]}, "traces = 'no.csv': is no workload preset, no file"),
        ({"jobs": 0}, "jobs = 0: must be at least 1"),
        ({"cluster": "x://y"}, "cluster = 'x://y': must be dask://HOST:PORT or ray://"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_runs(here, options, text):
    given = {"traces": ["azure-conv"], "policies": ["fcfs"], "requests": 3, **SMALL, **options}
    with pytest.raises(ConfigError, match=text):
        mdi.lab(given.pop("traces"), given.pop("policies"), **given)
    assert not Path("lab").exists()


def test_another_trace_than_planned_is_no_result(here):
    mdi.generate_workload("azure-conv", num_requests=7, seed=0).save("t.csv")
    lab = Lab(traces={"t": mdi.Served(trace="t.csv")}, policies={"fcfs": "fcfs"}, options=SMALL)
    plan = lab.plan()
    mdi.generate_workload("azure-conv", num_requests=6, seed=0).save("t.csv")
    with pytest.raises(MiniDeepInferError, match=r"t.csv is another file than when the lab began"):
        measures.run_planned(plan[0])
    with pytest.raises(MiniDeepInferError, match="another version of this package"):
        measures.run_planned(replace(plan[0], code="0"))


def test_loads():
    served = mdi.Served(workload="azure-conv", requests=2)
    assert [load_name(load) for load in ("6", "rate=6.0", "speed=2", "as recorded")] == [
        "rate=6", "rate=6", "speed=2", "as recorded",
    ]  # fmt: skip
    assert served_under(served, "6").rate == 6.0
    assert served_under(served, "arrivals=gamma:5:2").arrivals == "gamma:5:2"
    assert served_under(served, "as recorded") == served


# ---- statistics ---------------------------------------------------------------------------------


def table(values, **others):
    """Rows of policies by seed (and load): {policy: {(load, seed): e2e mean}}."""
    rows = [
        {"trace": "t", "load": load, "setting": "default", "placement": "p", "policy": policy,
         "seed": seed, "e2e_ms_mean": value, "e2e_ms_p99": value * others.get(policy, 1)}
        for policy, by in values.items() for (load, seed), value in by.items()
    ]  # fmt: skip
    return rows_frame(rows)


BASE = ("default", "p", "a")


def test_t_interval_by_hand():
    """Of 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.30265."""
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high - found.mean == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert t_interval([5.0]).low is None
    assert not t_interval([5.0]).excludes_zero


def test_pairing_takes_out_what_seeds_do():
    """b is a tenth below a in every seed; the seeds themselves differ tenfold."""
    a = {("l", seed): 10.0**seed for seed in range(4)}
    frame = table({"a": a, "b": {at: 0.9 * value for at, value in a.items()}})
    (row,) = paired_differences(frame, "e2e_ms_mean", BASE).to_dict("records")
    assert row["policy"] == "b"
    assert (row["change"], row["low"], row["high"]) == pytest.approx((-0.1, -0.1, -0.1))
    best, base = ranking(frame, "e2e_ms_mean", ("e2e_ms_mean", "e2e_ms_p99"), BASE)
    assert (best.variant[-1], base.change) == ("b", None)
    assert best.change.mean == pytest.approx(-0.1)
    assert best.values["e2e_ms_mean"] == pytest.approx(0.9 * 10**1.5)  # a geometric mean


def test_the_front_and_the_order():
    a = {("l", seed): 10.0 + seed for seed in range(3)}
    b, c = ({at: v * factor for at, v in a.items()} for factor in (0.5, 2))
    frame = table({"a": a, "b": b, "c": c}, b=4.0)
    found = ranking(frame, "e2e_ms_mean", ("e2e_ms_mean", "e2e_ms_p99"), BASE)
    assert [each.variant[-1] for each in found] == ["b", "a", "c"]
    assert [each.on_front for each in found] == [True, True, False]  # b pays at P99; c loses both


def test_shares_differ_in_points_and_more_is_better():
    rows = rows_frame([
        {"trace": "t", "load": "l", "setting": "default", "placement": "p", "policy": policy,
         "seed": seed, "goodput_share": share, "e2e_ms_mean": 1.0, "e2e_ms_p99": 1.0}
        for policy, share in (("a", 0.0), ("b", 0.25)) for seed in range(2)
    ])  # fmt: skip
    best, _ = ranking(rows, "goodput_share", ("e2e_ms_mean", "e2e_ms_p99"), BASE)
    assert (best.variant[-1], best.change.mean) == ("b", 0.25)


def test_a_workload_without_replicates_counts_alike_in_each_seed():
    a = {("drawn", 0): 10.0, ("drawn", 1): 20.0, ("recorded", 0): 5.0}
    frame = table({"a": a, "b": {at: v * (2 if at[0] == "recorded" else 1)
                                 for at, v in a.items()}})  # fmt: skip
    found = ranking(frame, "e2e_ms_mean", ("e2e_ms_mean", "e2e_ms_p99"), BASE)[-1]
    assert (found.variant[-1], found.change.n) == ("b", 2)
    assert found.change.mean == pytest.approx(2**0.5 - 1)  # of two workloads, geometrically
    assert found.change.low == pytest.approx(found.change.high)


def test_more_comparisons_make_wider_intervals():
    noise = np.random.default_rng(0).normal(1, 0.05, (3, 6))
    values = {name: {("l", seed): 10 * noise[place, seed] for seed in range(6)}
              for place, name in enumerate("abc")}  # fmt: skip
    two = ranking(table({n: values[n] for n in "ab"}), "e2e_ms_mean", ("e2e_ms_mean",) * 2, BASE)
    three = ranking(table(values), "e2e_ms_mean", ("e2e_ms_mean",) * 2, BASE)
    narrow, wide = (next(each.change for each in found if each.variant[-1] == "b")
                    for found in (two, three))  # fmt: skip
    assert narrow.mean == wide.mean
    assert wide.high - wide.low > narrow.high - narrow.low


def test_sentences(here):
    found = small_lab(seeds=1)
    assert "one replicate, so how sure that is is not known" in found.sentence() or (
        "no variant is better" in found.sentence())  # fmt: skip
    a = {("l", seed): 10.0 + seed for seed in range(3)}
    plan = {"settings": {"default": {}}, "placements": ["p"], "policies": ["a", "b"],
            "traces": ["t"], "loads": ["l"], "seeds": [0, 1, 2], "slo": None}  # fmt: skip
    half = mdi.LabResult(table({"a": a, "b": {at: v / 2 for at, v in a.items()}}, b=4.0), plan)
    assert half.sentence() == (
        "b has the best e2e_ms_mean: -50.0% against a (95 % interval -50.0% to -50.0%, 3 seeds, "
        "1 workload); P99 of e2e +100.0%"
    )
    worse = mdi.LabResult(table({"a": a, "b": {at: v * 2 for at, v in a.items()}}), plan)
    assert worse.sentence() == "no variant is better than a in e2e_ms_mean"
    assert half.sentence("jain") == "no verdict: the runs have no jain"
    alone = mdi.LabResult(table({"a": a}), {**plan, "policies": ["a"]})
    assert "nothing to be compared with" in alone.sentence()


def test_docs_have_the_columns():
    assert columns_markdown() in (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")


def test_other_files_are_no_results(here):
    Path("x.parquet").write_text("nothing")
    with pytest.raises(ConfigError, match=r"lab = 'x.parquet': cannot be read"):
        load_rows(Path("x.parquet"))
    mdi.generate_workload("azure-conv", num_requests=2, seed=0).save("t.parquet")
    with pytest.raises(ConfigError, match="is no result of mdi lab"):
        mdi.LabResult.load("t.parquet")
