"""The figures of docs/calibration.md about the recordings, from the models and the recordings."""

import json
from pathlib import Path

import numpy as np
import pytest

from mdi_sim.fit.calibrate import read_recorded
from mdi_sim.fit.features import gather_steps
from mdi_sim.fit.steps import fit_steps, predict
from tests.sim.test_recorded_fit import MODELS, runs_in

PAGE = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
KINDS = ("prefill", "decode")


def fit_of(folder):
    return json.loads((MODELS / f"{folder}.json").read_text())["fit"]


def gathered(folder, kind):
    return gather_steps([read_recorded(path).steps for path in runs_in(folder)], kind)


def percents(errors):
    return [f"{100 * errors[name]:.1f} %" for name in ("p50", "mape", "p90")]


def test_the_table_of_errors():
    """Each kind of step, then its classes, which the tiny model's rows leave out."""
    lines = PAGE.partition("| recording | kind |")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines[: lines.index("")]]  # fmt: skip
    expected = []
    for folder in ("h200-flash-slice", "h200-tiny"):
        for kind in KINDS:
            found = fit_of(folder)[kind]
            by_recording, by_shape = found["held_out"], found["held_out_shapes"]
            longest = found["extrapolation"]
            expected.append([
                f"`{folder}`" if kind == "prefill" else "", kind, f"{found['n']:,}",
                *percents(by_recording), *percents(by_shape),
                f"{100 * longest['mape']:.1f} % ({longest['n']:,} steps)",
            ])  # fmt: skip
            if folder == "h200-flash-slice":
                expected += [
                    ["", name, f"{own['n']:,}", *percents(own),
                     *percents(by_shape["by_class"][name]), ""]
                    for name, own in by_recording["by_class"].items()
                ]  # fmt: skip
    assert rows == expected


def test_the_worst_recording_and_step():
    fit = fit_of("h200-flash-slice")
    held_out = fit["prefill"]["held_out"]
    worst = max(held_out["recordings"], key=lambda each: each["mape"])
    assert [fit["traces"][run]["name"] for run in worst["runs"]] == ["prefill_1024"]
    assert f"{worst['mape']:.1%} in the mean".replace("%", " %") in TEXT
    assert f"({worst['bias']:+.1%})".replace("%", " %") in TEXT
    assert f"{held_out['max']:+.0%}, a prefill step of one token".replace("%", " %") in TEXT
    assert not fit_of("h200-tiny")["prefill"]["usable_for_control"]


def test_what_the_fit_has_seen():
    fit = fit_of("h200-flash-slice")
    limits = [fit[kind]["extrapolation"]["fitted_up_to_max_k"] for kind in KINDS]
    assert limits == [81_920, 8_718]
    assert "steps of up to 81,920 (prefill) and 8,718 tokens (decode)" in TEXT
    decode = gathered("h200-flash-slice", "decode")
    assert f"at most {decode.column('sum_k').max():,.0f} context tokens" in TEXT
    waited = [fit[kind]["left_out"]["the device waited for the host"] for kind in KINDS]
    assert f"{waited[0]} prefill and {waited[1]} decode steps were left out" in TEXT
    assert "111 prefill and 509 decode" in TEXT


def test_few_rows_are_explained_badly():
    steps = gathered("h200-flash-slice", "prefill")
    error = np.abs(predict(fit_steps(steps).terms, steps) / steps.ns - 1.0)
    few = (steps.column("rows") >= 17) & (steps.column("rows") <= 256)
    assert few.sum() == 136
    assert error[few].mean() == pytest.approx(0.09, abs=0.005)
    assert (int((error[few] > 0.1).sum()), int((error > 0.1).sum())) == (41, 55)
    assert "136 steps, 9 % off in the mean" in TEXT
    assert "(41 of the 55 that are more than 10 % off)" in TEXT


def test_the_tiny_models_prefill_takes_what_its_launch_takes():
    assert np.median(gathered("h200-tiny", "prefill").ns) == pytest.approx(23e6, abs=0.5e6)
    assert "23 ms in the median" in TEXT
