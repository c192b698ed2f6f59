"""The trace export: what a viewer gets, in which order, and what happens when writing fails."""

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from mdi_analysis import export_perfetto
from mdi_shared.errors import MiniDeepInferError, TraceError


def events_of(path):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)["traceEvents"]


def of(events, **wanted):
    return [e for e in events if all(e.get(key) == value for key, value in wanted.items())]


def test_device_steps_are_named_by_kind(run, tmp_path):
    events = events_of(export_perfetto(run, tmp_path / "run.json"))
    device = of(events, ph="X", tid=2)
    assert [e["name"] for e in device] == ["prefill"] * 2 + ["decode"] * 3
    assert (device[0]["ts"], device[0]["dur"]) == (2000.0, 8000.0)
    assert device[1]["args"] == {"step": 1, "n_seqs": 2, "n_tokens": 128, "sum_k": 100}


def test_one_process_per_rank(two_ranks, tmp_path):
    events = events_of(export_perfetto(two_ranks, tmp_path / "run.json"))
    names = {e["pid"]: e["args"]["name"] for e in of(events, name="process_name")}
    assert names == {0: "rank 0", 1: "rank 1", 2: "requests without a rank"}
    assert Counter(e["pid"] for e in of(events, ph="X", tid=2)) == {0: 5, 1: 5}


def test_cpu_slices_do_not_overlap(run, tmp_path):
    events = events_of(export_perfetto(run, tmp_path / "run.json"))
    cpu = of(events, ph="X", tid=1)
    assert Counter(e["name"] for e in cpu) == {"schedule": 5, "launch": 5, "process": 5}
    for before, after in pairwise(cpu):
        assert after["ts"] >= before["ts"] + before["dur"]
    assert [(e["name"], e["ts"], e["dur"]) for e in cpu[:3]] == [
        ("schedule", 0.0, 500.0), ("launch", 500.0, 500.0), ("process", 10750.0, 250.0),
    ]  # fmt: skip


def test_unrecorded_processing_time_gives_no_slice(run, tmp_path):
    steps = run.steps.assign(cpu_proc_ms=np.float32("nan"))
    events = events_of(export_perfetto(run.but(steps=steps), tmp_path / "run.json"))
    assert of(events, name="process") == []
    assert len(of(events, name="schedule")) == 5


def test_counters_are_written_when_they_change(run, tmp_path):
    events = events_of(export_perfetto(run, tmp_path / "run.json"))
    free = [(e["ts"], e["args"]["free blocks"]) for e in of(events, name="free blocks")]
    assert free == [(0.0, 98), (11000.0, 97), (29000.0, 99)]
    assert [e["args"]["running"] for e in of(events, name="running")] == [0, 2, 1, 0]


def test_request_spans_open_and_close(run, tmp_path):
    events = events_of(export_perfetto(run, tmp_path / "run.json"))
    spans = defaultdict(list)
    for e in events:
        if e["ph"] in "be":
            spans[e["id"], e["name"]].append((e["ph"], e["ts"]))
    assert all([phase for phase, _ in pair] == ["b", "e"] for pair in spans.values())
    assert spans[1, "request r1"] == [("b", 5000.0), ("e", 33000.0)]
    assert spans[1, "queue"] == [("b", 5000.0), ("e", 11000.0)]
    assert spans[1, "decode"] == [("b", 21000.0), ("e", 33000.0)]
    assert (0, "queue") not in spans  # scheduled the moment it came
    assert spans[3, "request r3"] == [("b", 30000.0), ("e", 33000.0)]  # open until the end


def test_max_steps_cuts_steps_of_all_ranks_and_requests(two_ranks, tmp_path):
    events = events_of(export_perfetto(two_ranks, tmp_path / "run.json", max_steps=2))
    assert Counter(e["args"]["step"] for e in of(events, ph="X", tid=2)) == {0: 2, 1: 2}
    assert max(e["ts"] for e in events if e["ph"] in "be") == 21000.0
    assert of(events, name="request r3") == []
    whole = events_of(export_perfetto(two_ranks, tmp_path / "whole.json"))
    assert events_of(export_perfetto(two_ranks, tmp_path / "n.json", max_steps=99)) == whole


def test_packed_file_holds_the_same_and_is_reproducible(run, tmp_path):
    plain = export_perfetto(run, tmp_path / "run.json")
    packed = export_perfetto(run, tmp_path / "run.json.gz")
    again = export_perfetto(run, tmp_path / "other.json.gz")
    assert events_of(packed) == events_of(plain)
    assert packed.read_bytes() == again.read_bytes()


def test_nothing_to_show_is_a_valid_file(nothing, tmp_path):
    assert events_of(export_perfetto(nothing, tmp_path / "run.json")) == []
    assert events_of(export_perfetto(nothing, tmp_path / "run.json", max_steps=1)) == []


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_failure_keeps_the_old_file_and_leaves_no_rest(run, tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    path.write_text("old")
    broken = run.but(requests=run.requests.drop(columns="rank"))  # found after steps were written
    with pytest.raises(TraceError, match="column 'rank'"):
        export_perfetto(broken, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "max_steps", "what"),
    [
        ("run.txt", None, "must end in .json or .json.gz"),
        ("run.json", 0, "max_steps = 0: must be at least 1"),
        ("nowhere/run.json", None, "cannot be written: No such file or directory"),
    ],
)
def test_wrong_arguments(run, tmp_path, name, max_steps, what):
    with pytest.raises(MiniDeepInferError, match=what):
        export_perfetto(run, tmp_path / name, max_steps=max_steps)
