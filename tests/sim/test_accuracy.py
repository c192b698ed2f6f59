"""Recorded runs simulated by models that never saw them: as good as docs/accuracy.md says."""

from pathlib import Path

import pytest

from mdi_shared.errors import ConfigError
from minideepinfer.accuracy import BARS, accuracy
from minideepinfer.commands.accuracy import HEADERS, as_markdown

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "traces" / "recorded" / "h200-flash-slice").glob("*.steps.parquet"))
JUDGED = ("online_low_interval1", "online_high_tuned", "long_context", "preemption", "replay_tuned")
SLACK = 0.02  # what other versions of the solver may change


def stated():
    """The table of docs/accuracy.md, as fractions by run and column."""
    lines = [[cell.strip(" *") for cell in line.strip("|\n").split("|")]
             for line in (ROOT / "docs" / "accuracy.md").read_text().splitlines()
             if line.startswith("|")]  # fmt: skip
    header = lines[0]
    assert tuple(header[: len(HEADERS)]) == HEADERS, "other columns: make the table anew"
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines[2:19]}


@pytest.fixture(scope="module")
def found():
    return {run.name: run for run in accuracy(RUNS, JUDGED)}


@pytest.mark.parametrize("name", JUDGED)
def test_a_run_is_predicted_as_well_as_the_docs_say(found, name):
    run, row = found[name], stated()[name]
    columns = dict(zip(BARS, HEADERS[2:7], strict=True))
    for figure, column in columns.items():
        said = float(row[column].rstrip("%")) / 100
        assert abs(run.relative[figure]) <= abs(said) + SLACK, figure
    assert run.beyond == ()


def test_a_run_is_judged_by_a_fit_that_saw_none_of_its_requests(found):
    assert set(found["replay_tuned"].fitted_to) & {"replay", "replay_tuned"} == set()
    assert "decode" in found["replay_tuned"].fitted_to


def test_one_run_leaves_nothing_to_fit():
    with pytest.raises(ConfigError, match="traces = 1: give at least two runs"):
        list(accuracy(RUNS[:1]))


def test_device_times_that_are_off_move_the_waits():
    (run,) = accuracy(RUNS, ["preemption"], spread=True)
    low, high = run.ttft_range
    assert low < run.relative["ttft_mean"] < high
    assert as_markdown([run])[2].count("|") == len(HEADERS) + 2


def test_what_misses_its_bar_is_bold(found):
    run = found["long_context"]
    worse = type(run)(run.name, run.requests, run.fitted_to,
                      {**run.relative, "ttft_mean": 0.2}, run.steps)  # fmt: skip
    assert worse.beyond == ("ttft_mean",)
    assert "**+20.0%**" in as_markdown([worse])[2]
    assert "**" not in as_markdown([run])[2]
