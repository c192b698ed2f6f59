"""Recorded runs simulated by models that never saw them: all figures are docs/accuracy.md's."""

import json
from pathlib import Path

import numpy as np
import pytest

from mdi_analysis import SLO, summarize
from mdi_shared.cost.linear import LinearCost
from mdi_shared.errors import ConfigError
from mdi_sim.fit.calibrate import fit_runs, read_recorded, recordings
from mdi_traces.run import load_run
from minideepinfer.accuracy import BARS, accuracy, resimulate
from minideepinfer.commands.accuracy import HEADERS, as_markdown, table_of, worst_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
SLICE, TINY = (
    sorted((ROOT / "traces" / "recorded" / folder).glob("*.steps.parquet"))
    for folder in ("h200-flash-slice", "h200-tiny")
)
RUNS = {f"{path.parent.name}/{path.name.partition('.')[0]}": path for path in (*SLICE, *TINY)}
RARE_VOTES = ("online_low", "online_high", "online_high_again", "replay")
FIRST_FIVE = ("online_low_interval1", "online_high_tuned", "long_context", "preemption",
              "replay_tuned")  # fmt: skip
SLACK = 0.02  # what other versions of the solver may change


def tables():
    """The page's tables of runs, a dict by column for each run, by folder and name."""
    parts = PAGE.split("| run | requests |")[1:]
    assert len(parts) == 2
    header = [name.replace("\n", " ") for name in HEADERS]
    for folder, part in zip(("h200-flash-slice", "h200-tiny"), parts, strict=True):
        rows = ("| run | requests |" + part).split("\n\n")[0].splitlines()
        lines = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]
        assert lines[0][: len(HEADERS)] == header, "other columns: make the table anew"
        for line in lines[2:]:
            yield f"{folder}/{line[0]}", dict(zip(lines[0], line, strict=True))


STATED = dict(tables())


@pytest.fixture(scope="module")
def found():
    return {f"{paths[0].parent.name}/{run.name}": run
            for paths in (SLICE, TINY) for run in accuracy(paths)}  # fmt: skip


def of_slice(found, names):
    return [found[f"h200-flash-slice/{name}"] for name in names]


def percent(text):
    return float(text.rstrip("%")) / 100


def test_every_recorded_run_is_in_the_tables():
    assert set(STATED) == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_predicted_as_the_page_says(found, name):
    run, row = found[name], STATED[name]
    low, high = map(percent, row["TTFT mean, step times off by 1 %"].split(" to "))
    assert low - SLACK <= run.relative["ttft_mean"] <= high + SLACK
    for figure, column in zip(BARS, HEADERS[2:7], strict=True):
        said = row[column.replace("\n", " ")]
        if said == "–":
            assert run.relative[figure] is None
        elif figure != "ttft_mean" or name.split("/")[1] not in RARE_VOTES:
            slack = max(SLACK, abs(percent(said)) / 20)
            assert run.relative[figure] == pytest.approx(percent(said), abs=slack), figure
    for kind in ("prefill", "decode"):
        said = row[f"{kind} steps P50 / P90"]
        if said == "–":
            assert kind not in run.steps
        else:
            stated = list(map(percent, said.split(" / ")))
            assert [run.steps[kind].p50, run.steps[kind].p90] == pytest.approx(stated, abs=0.005)


def test_the_worst_rows_are_named(found):
    for paths, says in ((SLICE, "6 of 17 runs miss a bar"), (TINY, "7 of 8 runs miss a bar")):
        runs = [found[f"{path.parent.name}/{path.name.partition('.')[0]}"] for path in paths]
        assert says in worst_of(runs)
        assert says in TEXT
    worst = found["h200-flash-slice/prefill_mixed"]
    assert worst.worst == "tpot_p99" or worst.worst == "tpot_mean"
    assert "`prefill_mixed`, whose TPOT is 85 % too long in the mean and 110 % at P99" in TEXT
    for name in FIRST_FIVE:
        assert found[f"h200-flash-slice/{name}"].beyond == ()


def test_the_sentences_about_groups_of_runs(found):
    """Figures of README and page that take the largest of several runs."""
    rare, five = of_slice(found, RARE_VOTES), of_slice(found, FIRST_FIVE)

    def largest(runs, *figures):
        return max(abs(run.relative[figure]) for run in runs for figure in figures)

    for runs, figures, said in (
        (rare, ("output_tok_s_gpu",), 0.004), (rare, ("tpot_mean",), 0.011),
        (five, ("output_tok_s_gpu",), 0.003), (five, ("ttft_mean", "tpot_mean"), 0.016),
        (five, ("ttft_p99", "tpot_p99"), 0.046),
    ):  # fmt: skip
        assert largest(runs, *figures) == pytest.approx(said, abs=0.005)
    assert "throughput is within 0.4 % and mean TPOT within 1.1 %" in TEXT


def test_a_run_is_judged_by_a_fit_that_saw_none_of_its_requests(found):
    run = found["h200-flash-slice/replay_tuned"]
    assert set(run.fitted_to) & {"replay", "replay_tuned"} == set()
    assert "decode" in run.fitted_to


@pytest.mark.parametrize(("folder", "kind", "said"), [
    ("h200-flash-slice", "prefill", (0.026, 0.081, 0.040, 0.019, 0.060, 1_904)),
    ("h200-flash-slice", "decode", (0.008, 0.023, 0.011, 0.007, 0.022, 25_109)),
    ("h200-tiny", "prefill", (0.143, 0.258, 0.154, 0.097, 0.283, 153)),
    ("h200-tiny", "decode", (0.002, 0.010, 0.004, 0.003, 0.010, 914)),
])  # fmt: skip
def test_what_single_steps_are_off_by(folder, kind, said):
    """By recording, then by shape; the figures of this page, of calibration.md and of README."""
    fit = json.loads((ROOT / "traces" / "models" / f"{folder}.json").read_text())["fit"][kind]
    by_recording, by_shape = fit["held_out"], fit["held_out_shapes"]
    assert by_recording["by"] == "recording"
    assert fit["held_out_mape"] == by_recording["mape"]
    stated = [by_recording[name] for name in ("p50", "p90", "mape")] + [
        by_shape[name] for name in ("p50", "p90")]  # fmt: skip
    assert (*(round(value, 3) for value in stated), fit["n"]) == said


# ---- the tuner's choice, and chunks that aim at a step time -----------------------------------


@pytest.fixture(scope="module")
def runs():
    """The slice's runs as a fit reads them, by name, and the number of each one's recording."""
    read = [read_recorded(path) for path in SLICE]
    return {run.name: run for run in read}, dict(
        zip([run.name for run in read], recordings(read), strict=True)
    )


def left_out(runs, name):
    by_name, number = runs
    others = [run for each, run in by_name.items() if number[each] != number[name]]
    return fit_runs(others, judged=False)


def cells(start):
    """The cells of the page's row that begins so."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("name", "bounds", "start"), [
    ("online_high", (250.0, 35.0), "| `online_high`, TTFT"),
    ("online_high_tuned", (250.0, 35.0), "| | chosen: budget"),
    ("replay", (100.0, 10.0), "| `replay`, TTFT"),
    ("replay_tuned", (100.0, 10.0), "| | chosen: interval 1"),
])  # fmt: skip
def test_the_table_of_the_tuners_choice(runs, name, bounds, start):
    _, _, _, today, unseen, measured, ttft, tpot, speed = cells(start)
    slo = SLO(ttft_ms=bounds[0], tpot_ms=bounds[1])
    recorded = load_run(SLICE[0].parent / name)
    real = summarize(recorded, slo=slo, itl=False)
    assert f"{real.goodput.goodput_share:.1%}".replace("%", " %") in measured
    latency, rates = real.latency, real.throughput
    for stated, of in ((ttft, latency.ttft_ms), (tpot, latency.tpot_ms)):
        digits = 0 if of.mean > 30 else 1
        assert stated == f"{of.mean:,.{digits}f}, {of.p99:,.{digits}f} ms"
    assert speed == f"{rates.input_tok_s_gpu + rates.output_tok_s_gpu:,.0f}"
    shipped = LinearCost.from_json(ROOT / "traces" / "models" / "h200-flash-slice.json")
    for stated, cost in ((today, shipped), (unseen, left_out(runs, name))):
        share = summarize(resimulate(recorded, cost), slo=slo, itl=False).goodput.goodput_share
        assert share == pytest.approx(float(stated.rstrip(" %")) / 100, abs=SLACK)


@pytest.mark.parametrize("name", ["budget", "target"])
def test_the_table_of_steps_that_aim_at_a_time(runs, name):
    recorded = load_run(SLICE[0].parent / f"rising_context_{name}")
    _, count, mean, spread, ends, speed = cells(f"| {name} |")
    steps = recorded.steps.query("kind == 'prefill' and n_tokens > 0")["gpu_ms"].to_numpy()
    assert count == str(len(steps))
    assert mean == f"{steps.mean():.1f} ms"
    assert spread.strip("*") == f"{100 * steps.std() / steps.mean():.1f} %"
    assert ends == f"{steps.min():.1f}, {steps.max():.1f} ms"
    assert speed == f"{summarize(recorded, itl=False).throughput.input_tok_s_gpu:,.0f}"
    simulated = resimulate(recorded, left_out(runs, f"rising_context_{name}")).steps
    own = simulated.query("kind == 'prefill' and n_tokens > 0")["gpu_ms"].to_numpy()
    said = {"budget": 0.087, "target": 0.039}[name]
    assert np.std(own) / np.mean(own) == pytest.approx(said, abs=0.005)


# ---- the command -------------------------------------------------------------------------------


def test_one_run_leaves_nothing_to_fit():
    with pytest.raises(ConfigError, match="traces = 1: give at least two runs"):
        list(accuracy(SLICE[:1]))


def test_device_times_that_are_off_move_the_waits():
    (run,) = accuracy(SLICE, ["preemption"], spread=True)
    low, high = run.ttft_range
    assert low < run.relative["ttft_mean"] < high
    assert as_markdown([run])[2].count("|") == len(HEADERS) + 2


def test_what_misses_its_bar_is_marked_and_the_worst_run_named(found):
    run = found["h200-flash-slice/long_context"]
    worse = type(run)("worse", run.requests, run.fitted_to,
                      {**run.relative, "ttft_mean": 0.2}, run.steps)  # fmt: skip
    assert worse.beyond == ("ttft_mean",)
    assert "**+20.0%**" in as_markdown([worse])[2]
    assert "**" not in as_markdown([run])[2]
    assert "+20.0%*" in table_of([worse], "{}*")[1][0]
    assert worst_of([run, worse]) == "worst: worse, TTFT mean +20.0%; 1 of 2 runs miss a bar"
    assert worse.to_dict()["worst"] == "ttft_mean"
