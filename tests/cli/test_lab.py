"""`mdi lab` and `mdi capacity`: what they print and keep, and what they refuse beforehand."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from mdi_sim.search.rows import load_rows
from minideepinfer.cli import INTERRUPTED
from tests.cli.conftest import InterruptingBar

FEW = ("azure-conv", "-n", 8, "--load", 20, "--set", "max_model_len=16384", "--ranks", 1,
       "--cost", "h200-flash-slice", "--jobs", 1)  # fmt: skip
TOML = """
[lab]
traces = ["azure-conv"]
policies = ["fcfs", "srpt:sigma=0.5"]
loads = ["speed=4"]
settings = ["default:", "few: max_num_seqs=2, max_num_batched_tokens=512"]
requests = 6
seeds = 2
ranks = 1
slo = "ttft<=300,tpot<=30"
cost = "h200-flash-slice"
jobs = 1

[scheduler]
max_model_len = 16384
"""


def test_table_and_rows(mdi):
    done = mdi("lab", *FEW, "--policy", "fcfs", "--policy", "lcfs", "--seeds", 2)
    assert done.code == 0, done.err
    assert done.err == "wrote lab/lab.parquet (4 runs)\n"
    text = " ".join(done.out.split())
    assert "4 runs: 1 workload, 2 seeds" in text
    assert "against fcfs" in text or "no variant is better than fcfs" in text
    frame, plan = load_rows(Path("lab/lab.parquet"))
    assert plan["policies"] == ["fcfs", "lcfs"]
    assert frame["policy"].tolist() == ["fcfs", "lcfs"] * 2


def test_a_file_says_the_same_as_flags(mdi):
    Path("lab.toml").write_text(TOML)
    done = mdi("lab", "--config", "lab.toml", "--json", "--rank-by", "ttft_ms_p99")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["runs"] == 8
    assert found["measure"] == "ttft_ms_p99"
    assert found["plan"]["loads"] == ["speed=4"]
    assert found["plan"]["settings"]["few"] == {"max_num_seqs": 2, "max_num_batched_tokens": 512}
    assert found["baseline"] == ["default", "round_robin", "fcfs"]
    assert len(found["ranking"]) == 4
    assert {row["n"] for row in found["differences"]} == {2}
    flags = ("azure-conv", "--policy", "fcfs", "--policy", "srpt:sigma=0.5", "--load",
             "speed=4", "--setting", "default:", "--setting",
             "few:max_num_seqs=2,max_num_batched_tokens=512", "-n", 6, "--seeds", 2, "--ranks", 1,
             "--slo", "ttft<=300,tpot<=30", "--cost", "h200-flash-slice", "--jobs", 1, "--set",
             "max_model_len=16384")  # fmt: skip
    before = set(Path("lab/runs").rglob("*.json"))
    again = mdi("lab", *flags, "--json", "--rank-by", "ttft_ms_p99")
    assert json.loads(again.out) == found
    assert set(Path("lab/runs").rglob("*.json")) == before


def test_interrupted_it_keeps_what_it_has(mdi, monkeypatch):
    monkeypatch.setattr(import_module("minideepinfer.commands.lab"), "progress", InterruptingBar)
    done = mdi("lab", *FEW, "--seeds", 4)
    assert done.code == INTERRUPTED
    assert "interrupted: 2 runs missing; the same command goes on from here" in done.out
    assert done.err == "wrote lab/lab.parquet (2 runs)\ninterrupted\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--policy", "nope"), "policy = 'nope': 'nope' is not a policy"),
        (("--policy", "srpt:x=1"), "'x' is not a parameter of srpt"),
        (("--policy", "fcfs", "--policy", "fcfs"), "policies = ['fcfs', 'fcfs']: one is given"),
        (("--load", "fast"), "loads = 'fast': must be a number"),
        (("--load", "20"), "loads = 'rate=20': is given twice"),
        (("--load", "rate=-1"), "rate = -1.0: must be a finite number above 0"),
        (("--load", "arrivals=x"), "arrivals = 'x'"),
        (("--setting", "few"), "setting = 'few': must be NAME:KEY=VALUE,KEY=VALUE"),
        (("--setting", "few:max_num_seqs"), "must be key=value"),
        (("--setting", "few:max_num_seq=3"), "setting few: max_num_seq = '3': unknown option; did"),
        (("--setting", "few:max_num_seqs=x"), "setting few: max_num_seqs = 'x': must be a whole"),
        (("--setting", "a:", "--setting", "a:ranks=2"), "a is given twice"),
        (("--placement", "best"), "placement = 'best': 'best' is not a placement"),
        (("--seeds", "0"), "seeds = 0: must be at least 1"),
        (("--slo", "ttft<3"), "slo = 'ttft<3': must be METRIC.STATISTIC<=MS"),
        (("--rank-by", "speed"), "rank_by = 'speed': must be one of requests, "),
        (("--cluster", "mpi://x:1"), "cluster = 'mpi://x:1': must be dask://HOST:PORT or ray"),
        (("--jobs", "0"), "jobs = 0: must be at least 1"),
        (("no.csv",), "traces = 'no.csv': is no workload preset, no file, no folder"),
        (("--cost", "no.json"), "cost model = 'no.json': cannot be read"),
        (("--config", "no.toml"), "config = 'no.toml': cannot be read"),
        (("--out", "file"), "out = 'file': is a file, must be a folder"),
    ],
)  # fmt: skip
def test_what_a_lab_refuses(fails, options, text):
    Path("file").touch()
    assert text in fails(2, "lab", *FEW, *options)
    assert not Path("lab").exists()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("policy = 'fcfs'", "lab.toml: policy = 'fcfs': unknown option; did you mean policies"),
        ("seeds = 'two'", "lab.toml: lab.seeds = 'two': must be a whole number"),
        ("loads = [true]", "lab.toml: lab.loads = [True]: must be a text, or several"),
        ("policies = []", "lab.toml: lab.policies = []: must be a text, or several"),
        ("[x]", "lab.toml: x = {}: unknown table; known: [scheduler], [lab]"),
        ("traces = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_named(fails, line, text):
    Path("lab.toml").write_text(f"[lab]\n{line}\n")
    assert text in fails(2, "lab", "azure-conv", "--config", "lab.toml")


def test_a_broken_trace_is_told_before_anything_runs(fails):
    Path("t.csv").write_text("req_id,arrival_ns,prompt_len,output_len\na,0,0,1\n")
    said = fails(1, "lab", "t.csv", "--jobs", 1)
    assert said.startswith("t.csv, row 2, column 'prompt_len': 0 must be at least 1 token")
    assert not Path("lab").exists()


def test_nothing_to_serve(fails):
    assert "traces = None: name at least one" in fails(2, "lab")
    assert "traces = None: name at least one" in fails(2, "capacity", "--slo", "ttft<=1")


def test_capacity(mdi):
    options = ("azure-conv", "-n", 10, "--set", "max_model_len=16384", "--ranks", 1, "--cost",
               "h200-flash-slice", "--jobs", 1, "--seeds", 2, "--tolerance", 0.3, "--start", 8,
               "--slo", "ttft<=300,tpot<=40")  # fmt: skip
    done = mdi("capacity", *options)
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "fcfs: capacity " in text
    assert "2 seeds, each within 30.0%)" in text
    assert "bound by ttft<=300 for 90%" in text
    assert done.err.startswith("wrote lab/capacity.parquet (")
    again = mdi("capacity", *options, "--json")
    found = json.loads(again.out)
    assert found["sentences"][0] in text
    assert found["unit"] == "req/s"
    assert found["plan"]["slo"] == "ttft<=300,tpot<=40,share>=0.9"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "slo = None: say which bounds are to hold, such as --slo"),
        (("--slo", "ttft.p95<=3"), "slo = 'ttft.p95<=3': must be"),
        (("--slo", "ttft<=3", "--load", "rate=3"), "load = 'rate=3': must have {rate} where"),
        (("--slo", "ttft<=3", "--start", "0"), "start = 0.0: must be a finite number above 0"),
        (("--slo", "ttft<=3", "--tolerance", "2"), "tolerance = 2.0: must be from 0.0001 to 1"),
    ],
)  # fmt: skip
def test_what_a_capacity_search_refuses(fails, options, text):
    assert text in fails(2, "capacity", "azure-conv", "-n", 3, *options)
