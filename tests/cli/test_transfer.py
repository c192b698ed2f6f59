"""`mdi transfer`: what it prints and writes, and that a simulation says its times are predicted."""

import json
from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "traces"
SLICE = TRACES / "models" / "h200-flash-slice.json"
TO_B200 = ("--hardware", "b200", "--model", "v41-flash", "--ep", 4)


@pytest.fixture
def predicted(mdi):
    """A prediction as `p.json` in the test's folder."""
    done = mdi("transfer", SLICE, *TO_B200, "-o", "p.json")
    assert (done.code, done.err) == (0, "wrote p.json\n"), done.err
    return done


def test_the_tables_say_what_was_predicted_from_what(predicted):
    for text in ("v41-flash on b200, ep 4: predicted, not measured", "flash-slice on h200",
                 "h200-flash-slice.json", "FP8 tensor cores", "us per layer", "assumed",
                 "explains the fit", "4,096 new of 131,072 tokens", "of peak rates"):  # fmt: skip
        assert text in predicted.out, text


def test_json_is_the_file(mdi, predicted):
    document = json.loads(mdi("transfer", SLICE, *TO_B200, "-o", "p.json", "--json").out)
    assert document.pop("checked") == {}
    assert document == json.loads(Path("p.json").read_text())
    assert document["kind"] == "predicted"
    assert document["basis"]["name"] == "h200-flash-slice.json"
    assert document["basis"]["prefill"]["terms"]["link"]["from"] == "assumed"


def test_a_simulation_and_show_say_that_it_is_predicted(mdi, predicted):
    options = ("--workload", "azure-conv", "-n", 5, "--cost", "p.json", "--ranks", 4)
    done = mdi("simulate", *options, "--out", "r")
    assert done.code == 0, done.err
    for out in (done.out, mdi("show", "r").out):
        text = " ".join(out.split())
        assert "predicted for b200 (ep 4), not measured" in text
        assert "efficiencies of flash-slice on h200" in text
        assert "nothing was recorded on this hardware with this model" in text
    counted = json.loads(mdi("simulate", *options, "--json").out)["summary"]["extrapolated"]
    assert counted["steps"] == counted["of"] > 0
    one = mdi("simulate", *options[:-1], 1)
    assert "note: step times were predicted with experts split over 4, but 1 rank is" in one.out


def test_a_prediction_is_checked_on_recorded_runs(mdi):
    run = TRACES / "recorded" / "h200-tiny" / "decode"
    done = mdi("transfer", SLICE, "--model", TRACES / "models" / "h200-tiny.json",
               "--check", run, "-o", "p.json")  # fmt: skip
    assert done.code == 0, done.err
    assert "against the runs given" in done.out
    assert "decode, " in done.out.partition("against the runs given")[2]


def test_what_cannot_be_asked_for(mdi, fails, predicted):
    assert "must be one of h100, h200, b200" in fails(2, "transfer", SLICE, "--hardware", "a100",
                                                "-o", "q.json")  # fmt: skip
    assert "must be one of v41-flash, tiny" in fails(2, "transfer", SLICE, "--model", "v3",
                                                     "-o", "q.json")  # fmt: skip
    assert "no such file" in fails(2, "transfer", SLICE, "--model", "v3.json", "-o", "q.json")
    assert "ep = 5: must divide" in fails(2, "transfer", SLICE, "--ep", 5, "-o", "q.json")
    assert "must end in .json" in fails(2, "transfer", SLICE, "-o", "q.txt")
    assert "no such file" in fails(2, "transfer", "none.json", "-o", "q.json")
    assert "no such file" in fails(2, "transfer", SLICE, "--check", "none", "-o", "q.json")
    assert "p.json': is a prediction" in fails(2, "transfer", "p.json", "-o", "q.json")
    assert not Path("q.json").exists()
    assert "predicted for v41-flash: see mdi transfer --model" in fails(
        2, "simulate", "--workload", "azure-conv", "--cost", "p.json", "--model", "tiny"
    )
