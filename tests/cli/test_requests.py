"""Which requests are served, and what is said: other times, several files, long waits."""

import json
from pathlib import Path

import pytest

from minideepinfer import load_requests, simulate
from minideepinfer.commands.values import read_description

OPTIONS = ("--model", "tiny")
FAST = "note: recorded arrival times scaled to 100 requests per second"
DRAWN = "note: recorded arrival times replaced by Poisson(rate=3.0), seed 0"
UNUSED = "note: priority and hash_ids of the trace: kept, but nothing in this run uses them"


def rows(*arrivals_s, **more):
    return "".join(
        json.dumps({"arrival_ns": int(s * 1e9), "prompt_len": 9, "output_len": 3, **more}) + "\n"
        for s in arrivals_s
    )


@pytest.fixture
def two(mdi):
    """Two files that are one trace."""
    Path("a.jsonl").write_text(rows(0, 1, priority=1, hash_ids=[1]))
    Path("b.jsonl").write_text(rows(2, 3))
    return "a.jsonl", "b.jsonl"


@pytest.mark.parametrize(
    ("options", "note"),
    [((), None), (("--rate", "100"), FAST), (("--arrivals", "poisson:3"), DRAWN)],
)
@pytest.mark.parametrize("verb", ["simulate", "tune"])
def test_times_and_unused_columns_are_told(mdi, two, verb, options, note):
    search = ("--for", "throughput", "--trials", "1", "-j", "1") if verb == "tune" else ()
    done = mdi(verb, *two, *OPTIONS, *options, *search)
    assert done.code == 0, done.err
    assert UNUSED in done.out
    told = [line for line in done.out.splitlines() if "recorded arrival times" in line]
    assert told == ([] if note is None else [note])


def test_several_files_are_one_trace_that_a_saved_run_names(mdi, two):
    assert mdi("simulate", *two, *OPTIONS, "--out", "r").code == 0
    assert read_description(Path("r")).served.trace == two
    again = mdi("simulate", "--config", "r", "--out", "again")
    assert (again.code, "4 requests" in again.out) == (0, True)
    assert "identical" in mdi("compare", "r", "again").out
    Path("c.toml").write_text('[simulate]\nmodel = "tiny"\ntrace = ["a.jsonl", "b.jsonl"]\n')
    assert "4 requests" in mdi("simulate", "--config", "c.toml").out
    assert mdi("convert", *two, "both.csv").code == 0
    assert load_requests("both.csv").table["arrival_ns"].to_pylist() == [0, 10**9, 2 * 10**9,
                                                                        3 * 10**9]  # fmt: skip


@pytest.mark.parametrize("text", ["[]", "[1]", "1", '[["a"]]'])
def test_what_names_no_trace(fails, text):
    Path("c.toml").write_text(f"[simulate]\ntrace = {text}\n")
    assert "simulate.trace = " in fails(2, "simulate", "--config", "c.toml")


def test_python_says_the_same(two):
    found = simulate(load_requests(two, rate=100.0), shape="tiny")
    assert [f"note: {note}" for note in found.notes[:2]] == [FAST, UNUSED]


def test_replay_says_what_is_due_and_refuses_to_wait_for_days(mdi, fails, two):
    pytest.importorskip("torch")
    sizes = ("--set", "num_blocks=64", "--set", "max_model_len=1024", "--set", "max_num_seqs=2")
    done = mdi("replay", "random:tiny", *two, "--speed", "10", *sizes, "--out", "r")
    assert done.code == 0, done.err
    assert "serving 4 requests, first request due after 0 s, last 0.3 s" in done.err
    assert UNUSED in done.out
    done = mdi("replay", "random:tiny", *two, "--rate", "100", *sizes, "--out", "r")
    assert FAST in done.out
    Path("late.jsonl").write_text(rows(0, 900_000))
    told = fails(2, "replay", "random:tiny", "late.jsonl", "--out", "late")
    assert told.startswith("trace = '10.4 days': is the longest time in which nothing is due")
    assert not list(Path().glob("late.*.parquet"))
