"""Fits to the recordings in the repository: how far off they are, and the models made of them."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mdi_analysis import summarize
from mdi_shared.cost.linear import LinearCost
from mdi_sim.fit.calibrate import calibrate
from mdi_traces.run import load_run
from minideepinfer.accuracy import resimulate

TRACES = Path(__file__).parents[2] / "traces"
RECORDED, MODELS = TRACES / "recorded", TRACES / "models"
FOLDERS = ("h200-flash-slice", "h200-tiny")


def runs_in(folder, without=()):
    steps = (RECORDED / folder).glob("*.steps.parquet")
    names = sorted(path.name.removesuffix(".steps.parquet") for path in steps)
    return [RECORDED / folder / name for name in names if name not in without]


@pytest.fixture(scope="module")
def slice_model():
    return calibrate(runs_in("h200-flash-slice"))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_step_times_of_the_slice_on_what_was_held_out(slice_model, kind):
    lengths = {"short context", "long context"}
    sequences = {"one sequence", "several sequences"} if kind == "prefill" else set()
    for held_out, most in (("held_out", 0.10), ("held_out_shapes", 0.08)):
        found = slice_model.fit[kind][held_out]
        assert set(found["by_class"]) == lengths | sequences
        for name, errors in {"all": found, **found["by_class"]}.items():
            assert errors["n"] > 500, name
            assert errors["p50"] <= 0.035, name
            assert errors["p90"] <= most, name
    assert slice_model.fit[kind]["usable_for_control"]


def test_recordings_of_the_same_requests_are_held_out_together(slice_model):
    names = [trace["name"] for trace in slice_model.fit["traces"]]
    held_out = slice_model.fit["prefill"]["held_out"]
    parts = [{names[run] for run in each["runs"]} for each in held_out["recordings"]]
    assert len(parts) == 11
    assert {"replay", "replay_tuned"} in parts
    assert {"online_high", "online_high_again", "online_high_interval1",
            "online_high_tuned"} in parts  # fmt: skip
    assert sum(each["n"] for each in held_out["recordings"]) == held_out["n"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_shipped_models_are_the_fits_of_the_recordings(folder):
    shipped, again = LinearCost.from_json(MODELS / f"{folder}.json"), calibrate(runs_in(folder))
    assert [t["sha256"] for t in shipped.fit["traces"]] == [
        t["sha256"] for t in again.fit["traces"]
    ]  # fmt: skip
    for kind in ("prefill", "decode"):
        error = shipped.fit[kind]["held_out_mape"]
        assert error == pytest.approx(again.fit[kind]["held_out_mape"], rel=1e-6)
        assert getattr(shipped, f"{kind}_ranges") == getattr(again, f"{kind}_ranges")
        for name, value in asdict(getattr(shipped, kind)).items():
            found = np.array(getattr(getattr(again, kind), name))
            assert found == pytest.approx(np.array(value), rel=1e-9, abs=1e-9), name
    assert asdict(again.host) == pytest.approx(asdict(shipped.host), abs=1)  # rounded to ns


def test_waiting_for_a_vote_in_an_idle_engine_is_simulated():
    """Arrivals alone, the run itself unseen by the fit; a tenth either way, launches are noisy."""
    model = calibrate(runs_in("h200-tiny", without=("online_low",)))
    recorded = load_run(RECORDED / "h200-tiny" / "online_low")
    run = resimulate(recorded, model)
    real, simulated = (summarize(each, itl=False).latency.ttft_ms for each in (recorded, run))
    assert simulated.mean == pytest.approx(real.mean, rel=0.1)
