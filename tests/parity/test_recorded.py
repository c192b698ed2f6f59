"""Recordings in the repository are sound, say where they come from, and decide as simulated."""

from pathlib import Path

import pytest

import mdi_analysis
from mdi_sim.retrace import replay_recorded
from mdi_traces.check import check_run
from mdi_traces.run import load_run

RECORDED = Path(__file__).parents[2] / "traces" / "recorded"
RUNS = sorted(
    path.relative_to(RECORDED).as_posix().removesuffix(".steps.parquet")
    for path in RECORDED.rglob("*.steps.parquet")
)
TOLD = ("device", "driver_version", "torch", "tilelang", "model", "command", "commit", "date")


def test_there_are_recordings_of_both_models():
    assert {name.split("/")[0] for name in RUNS} == {"h200-flash-slice", "h200-tiny"}


@pytest.mark.parametrize("name", RUNS)
def test_a_recording_is_sound_and_says_where_it_comes_from(name):
    run = load_run(RECORDED / name)
    assert not [finding for finding in check_run(run) if not finding.skipped]
    provenance = run.metadata.config["provenance"]
    assert all(provenance[key] for key in TOLD)
    assert run.metadata.source == "runtime"


@pytest.mark.parametrize("name", RUNS)
def test_the_simulator_makes_the_recorded_decisions(name):
    run = load_run(RECORDED / name)
    assert mdi_analysis.compare(run, replay_recorded(run)).plans.identical
