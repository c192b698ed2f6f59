"""`mdi calibrate`: what it prints and writes, and what `mdi simulate --cost` makes of the file."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mdi_shared.cost.group import FITTED, GroupCost, GroupTerms
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_sim.simulate import simulate
from mdi_traces.run import load_run
from tests.sim.recorded import CONFIG, TRUTH, noisy_run, requests


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("runs") / "known"
    noisy_run().save(prefix)
    return prefix


@pytest.fixture
def model(mdi, known):
    """A fitted model as `m.json` in the test's folder."""
    done = mdi("calibrate", known, "-o", "m.json")
    assert (done.code, done.err) == (0, "wrote m.json\n"), done.err
    return json.loads(Path("m.json").read_text())


def test_the_tables_say_how_well_it_fits_and_what_was_dropped(mdi, known):
    done = mdi("calibrate", f"{known}.steps.parquet", "--out", "m.json")
    assert done.code == 0, done.err
    for text in ("v41-flash on testgpu, 1 run", "known", "shapes held out", "several sequences",
                 "longest contexts held out", "dropped consumer_rows", "ns per row",
                 "first of its kind in a run", "schedule_ns_per_seq", "3.0 us"):  # fmt: skip
        assert text in done.out, text
    assert mdi("calibrate", known, "--out", "m.json").err == "replaced m.json\n"


def test_accuracy_fits_100_columns_and_names_the_worst(mdi):
    folder = Path(__file__).parents[2] / "traces" / "recorded" / "h200-flash-slice"
    runs = sorted(folder.glob("*.steps.parquet"))
    done = mdi("accuracy", *runs, "--only", "rising_context_budget", "--only", "prefill_mixed",
               "--spread")  # fmt: skip
    assert done.code == 0, done.err
    assert max(map(len, map(str.rstrip, done.out.splitlines()))) <= 100
    for text in ("above 3 %", "times off by 1 %", "+85.4%*", "single steps",
                 "worst: prefill_mixed, TPOT mean +85.4%; 1 of 2 runs miss a bar"):  # fmt: skip
        assert text in done.out, text


def test_json_is_the_model(mdi, known):
    document = json.loads(mdi("calibrate", known, "-o", "m.json", "--json").out)
    assert document == json.loads(Path("m.json").read_text())
    found, expected = LinearCost.from_json(document).host, TRUTH.host
    expected = replace(expected, prefill_launch_ns=expected.launch_ns)
    assert asdict(found) == pytest.approx(asdict(expected), rel=1e-3, abs=1)


def test_a_simulation_takes_it_and_counts_what_it_extrapolates(mdi, model):
    options = ("--workload", "azure-conv", "-n", 30, "--cost", "m.json")
    inside = mdi("simulate", *options, "--set", "max_num_batched_tokens=4096", "--json")
    counted = json.loads(inside.out)["summary"]["extrapolated"]
    assert counted["steps"] < counted["of"]
    done = mdi("simulate", *options, "--set", "max_num_batched_tokens=16384", "--rate", 200,
               "--out", "r")  # fmt: skip
    error = model["fit"]["prefill"]["held_out_mape"]
    assert f"fitted linear model, held-out error: prefill {error:.1%}" in done.out
    for out in (done.out, mdi("show", "r").out):
        assert "lie outside what the model was fitted on" in " ".join(out.split())
        assert "prefill.rows" in out
    assert "fitted for" not in done.out


def test_a_roofline_extrapolates_nothing(mdi, small):
    assert json.loads(mdi("simulate", *small, "--json").out)["summary"]["extrapolated"] is None


def test_another_model_than_the_fitted_one_is_told(mdi, small, model):
    done = mdi("simulate", *small, "--cost", "m.json")
    assert "note: step times were fitted for v41-flash, but tiny is simulated" in done.out


def test_a_shipped_model_brings_the_dimensions_it_was_fitted_for(mdi, small):
    shipped = Path(__file__).parents[2] / "traces" / "models" / "h200-flash-slice.json"
    done = mdi("simulate", "--workload", "azure-conv", "-n", 3, "--cost", shipped, "--out", "r")
    assert done.code == 0, done.err
    assert load_run("r").metadata.model == "flash-slice"
    assert load_run("r").metadata.hardware == "NVIDIA H200"
    assert "fitted for" not in done.out
    other = mdi("simulate", *small, "--cost", shipped)
    assert "fitted for flash-slice, but tiny is simulated" in other.out


@pytest.mark.parametrize(("name", "value", "says"), [
    ("hidden_size", None, "shape.hidden_size = None: is missing"),
    ("heads", 3, "shape.heads = 3: unknown dimension"),
])  # fmt: skip
def test_dimensions_edited_into_nonsense_are_refused(fails, model, name, value, says):
    shape = asdict(TINY) | {name: value}
    model["fit"]["shape"] = {key: each for key, each in shape.items() if each is not None}
    Path("m.json").write_text(json.dumps(model))
    assert says in fails(2, "simulate", "--workload", "azure-conv", "-n", 3, "--cost", "m.json")


def _set(document, path, value):
    *keys, last = path
    for key in keys:
        document = document[key]
    if value is None:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(("path", "value", "says"), [
    (("prefill", "terms", "rows"), -1.0, "prefill.rows = -1.0: must be a finite number of"),
    (("decode", "terms", "sum_k"), None, "decode.terms.sum_k = None: is missing"),
    (("host", "launch_ns"), -5, "launch_ns = -5: must be at least 0, at most 1,000"),
    (("host", "process_ns"), None, "host.process_ns = None: is missing"),
    (("decode", "graphs"), [[8, 100], [4, 200]], "decode.graphs"),
    (("prefill", "ranges", "rows"), [9, 1], "prefill.ranges.rows = (9, 1)"),
    (("schema_version",), 7, "schema_version = 7: must be 1"),
    (("units",), "ms", "units = 'ms': must be 'ns'"),
])  # fmt: skip
def test_a_model_edited_into_nonsense_is_refused(fails, small, model, path, value, says):
    _set(model, path, value)
    Path("m.json").write_text(json.dumps(model))
    told = fails(2, "simulate", *small, "--cost", "m.json")
    assert says in told
    assert told.startswith("m.json: ")


def test_runs_that_cannot_be_used(mdi, fails, known, run_r):
    assert "prefill steps = " in fails(2, "calibrate", run_r, "-o", "m.json")
    hardware = fails(2, "calibrate", known, run_r, "-o", "m.json")
    assert hardware == ("hardware = 'h200': of r differs from 'testgpu' of known: "
                        "one model holds for one hardware")  # fmt: skip
    assert "is the same run as known" in fails(2, "calibrate", known, known, "-o", "m.json")
    assert "no such file" in fails(2, "calibrate", "nothing", "-o", "m.json")
    assert "is a file" in fails(2, "calibrate", known, "-o", f"{known}.steps.parquet/m.json")
    assert "must end in .json" in fails(2, "calibrate", known, "-o", "m.txt")
    Path("r.steps.parquet").write_bytes(b"PAR1")
    assert "cannot be read as Parquet" in fails(1, "calibrate", run_r, "-o", "m.json")
    assert not Path("m.json").exists()


def test_a_group_is_fitted_on_top_of_one_rank_and_simulated(mdi, tmp_path):
    cost = replace(TRUTH, fit={"hardware": None, "model": V41_FLASH.name})
    Path("base.json").write_text(json.dumps(cost.to_json()))
    terms = GroupTerms(const=2e6, own=0.9, rows=3_000.0)
    group = GroupCost(ranks=2, prefill=terms, decode=terms, basis={"kind": FITTED})
    run = simulate(requests(), scheduler=CONFIG, cost=replace(cost, group=group), ranks=2)
    run.save("two")
    done = mdi("calibrate", "two", "--base", "base.json", "-o", "g.json")
    assert done.code == 0, done.err
    for text in ("groups of 2 ranks", "shapes held out", "0.9 of the slowest rank's own time"):
        assert text in done.out, text
    assert LinearCost.from_json(Path("g.json")).group.prefill.rows == pytest.approx(3e3, rel=0.05)
    options = ("--workload", "azure-conv", "-n", 10, "--cost", "g.json", "--ranks")
    two, four = (mdi("simulate", *options, ranks) for ranks in (2, 4))
    assert "exchange fitted to groups of 2" in " ".join(two.out.split())
    assert "fitted to groups of 2, but 4 ranks are simulated" in " ".join(four.out.split())
    refused = mdi("calibrate", "two", "-o", "m.json")
    assert refused.code == 1
    assert "has several ranks" in refused.err
    refused = mdi("calibrate", "two", "-o", "m.json", "--base", "base.json", "--allow-constant")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)


def test_one_ranks_model_gets_an_assumed_exchange_and_says_so(mdi, tmp_path):
    shipped = Path(__file__).parents[2] / "traces" / "models" / "h200-flash-slice.json"
    options = ("--workload", "azure-conv", "-n", 5, "--cost", shipped, "--json", "--ranks")
    one, two = (json.loads(mdi("simulate", *options, ranks).out) for ranks in (1, 2))
    assert "group" not in one["config"]["cost"]
    assert two["config"]["cost"]["group"]["basis"]["kind"] == "assumed"
    assert any("exchanging rows is assumed, not measured" in note for note in two["notes"])
    done = mdi("simulate", *options, 7)
    assert "ranks = 7: must divide the 384 routed experts" in done.err
