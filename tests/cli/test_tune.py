"""`mdi tune`: what it prints, draws and recommends, and what it refuses."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from minideepinfer.cli import INTERRUPTED
from tests.cli.conftest import InterruptingBar

MODEL = Path(__file__).parents[2] / "traces" / "models" / "h200-flash-slice.json"
FEW = ("--workload", "azure-conv", "-n", 25, "--cost", MODEL, "--trials", 6, "--jobs", 1)


def test_tables_and_plot(mdi):
    done = mdi("tune", *FEW, "--for", "throughput", "--plots", "p")
    assert done.code == 0, done.err
    assert done.err == "drew p\n"
    assert Path("p/tuning.png").read_bytes().startswith(b"\x89PNG")
    text = " ".join(done.out.split())
    assert "6 settings tried" in text
    assert "as given" in text
    assert "by the model's error" in text or "no difference: no setting" in text
    assert f"mdi simulate: --cost {MODEL}" in text
    error = json.loads(MODEL.read_text())["fit"]["prefill"]["held_out_mape"]
    assert f"held-out error: prefill {error:.1%}" in text


def test_the_recommended_options_are_those_to_copy(mdi):
    """A budget of 512 tokens is far too small for a model whose steps take 26 ms at least."""
    options = ("--set", "max_num_batched_tokens=512", "--arrivals", "burst",
               "--kv-cache-memory-gb", 2)  # fmt: skip
    done = mdi("tune", *FEW, *options, "--for", "throughput", "--json", "--trials", 20)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["beyond_model_error"] is True
    assert found["gain"]["low"] > 0
    assert len(found["trials"]) <= 20
    assert found["best"]["with_model_error"]["slower"]["tokens_s"] > 0
    flags = found["recommended"]["simulate"].split()
    assert "--kv-cache-memory-gb 2" in " ".join(flags)
    assert "--set kv_cache_memory_gb=2" in found["recommended"]["executor"]
    again = mdi("simulate", *FEW[:4], "--arrivals", "burst", *flags, "--json")
    assert again.code == 0, again.err
    speed = json.loads(again.out)["summary"]["throughput"]
    tokens_s = (speed["input_tokens"] + speed["output_tokens"]) / speed["span_s"]
    assert tokens_s == pytest.approx(found["best"]["measured"]["tokens_s"])
    if "cost_target" in found["recommended"]["executor"]:
        assert f"--set cost_model={MODEL}" in found["recommended"]["executor"]


def test_an_slo_makes_goodput_the_goal(mdi):
    done = mdi("tune", *FEW, "--slo", "ttft=300, tpot=40", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["objective"] == "goodput"
    assert found["slo"] == {"ttft_ms": 300.0, "tpot_ms": 40.0, "e2e_ms": None}
    assert 0 <= found["default"]["measured"]["goodput"] <= 1


def test_a_roofline_has_no_error_bar(mdi, small):
    done = mdi("tune", *small, "--for", "throughput", "--trials", 4, "--jobs", 1)
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "uncalibrated" in text
    assert "no error of it is known" in text or "no difference: no setting" in text


def test_interrupted_it_shows_what_it_has(mdi, monkeypatch):
    monkeypatch.setattr(import_module("minideepinfer.commands.tune"), "progress", InterruptingBar)
    done = mdi("tune", *FEW, "--for", "throughput")
    assert done.code == INTERRUPTED
    assert "2 settings tried" in done.out
    assert "interrupted: this is what was found so far" in done.out
    assert done.err == "interrupted\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "slo = None: say what to tune for"),
        (("--slo", "ttft=1", "--for", "throughput"), "say what to tune for"),
        (("--for", "latency"), "for = 'latency': must be throughput"),
        (("--slo", "ttft"), "slo = 'ttft': must be NAME=MS with a name of ttft, tpot, e2e"),
        (("--slo", "itl=3"), "slo = 'itl=3'"),
        (("--slo", "ttft=2s"), "must be a number of ms, without a unit"),
        (("--slo", "ttft=1,ttft=2"), "ttft is set twice"),
        (("--slo", "tpot=-1"), "tpot_ms = -1.0"),
        (("--for", "throughput", "--jobs", "0"), "jobs = 0: must be at least 1"),
        (("--for", "throughput", "--trials", "0"), "trials = 0: must be at least 1"),
        (("--for", "throughput", "--plot", "p.png"), "--plot; it is --plots FOLDER"),
        (("--for", "throughput", "--cost", "no.json"), "cost model = 'no.json': cannot be read"),
    ],
)  # fmt: skip
def test_what_it_refuses(fails, small, options, text):
    assert text in fails(2, "tune", *small, *options)


def test_a_cost_target_without_a_setting_follows_the_slo(mdi, small):
    """As `mdi simulate` says: a prefill step is one gap between two tokens."""
    policy = ("--set", "chunk_policy=cost_target", "--slo", "tpot=40", "--json")
    done = mdi("simulate", *small, *policy)
    assert done.code == 0, done.err
    assert json.loads(done.out)["config"]["scheduler"]["slo_itl_ms"] == 40.0
