"""Rules of request traces: each broken one is named with file, row, column and value."""

import pytest

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.check import check_requests
from mdi_traces.requests import validate_requests

from .conftest import trace_of

GOOD = {"req_id": ["a", "b", "c"], "arrival_ns": [0, 5, 5], "prompt_len": [3, 4, 5],
        "output_len": [1, 2, 3]}  # fmt: skip


def test_equal_arrival_times_are_fine():
    validate_requests(trace_of(**GOOD).table, "f")
    assert check_requests(trace_of(**GOOD)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": [3, 0, 5]}, "f, row 2, column 'prompt_len': 0 must be at least 1 token"),
        ({"prompt_len": [3, 4, -7]}, "row 3, column 'prompt_len': -7 must"),
        ({"output_len": [0, 1, 1]}, "row 1, column 'output_len': 0 must be at least 1"),
        ({"max_tokens": [1, 2, 2]}, "row 3, column 'max_tokens': 2 is less than output_len"),
        ({"cached_len": [0, 4, 0]}, "row 2, column 'cached_len': 4 must be less than prompt_len"),
        ({"cached_len": [-1, 0, 0]}, "row 1, column 'cached_len': -1 must not be negative"),
        ({"arrival_ns": [-1, 0, 0]}, "row 1, column 'arrival_ns': -1 must not be negative"),
        ({"arrival_ns": [0, 5, 2**63 - 1]}, r"row 3, column 'arrival_ns': 9\d+ must be at most 4"),
        ({"rank": [0, -1, None]}, "row 2, column 'rank': -1 must not be negative; null = any"),
        ({"temperature": [0.0, -1.0, None]}, "row 2, column 'temperature': -1.0 must be at least"),
        ({"temperature": [0.0, 1.0, float("inf")]}, "row 3, column 'temperature': inf must be"),
        ({"temperature": [0.0, 1.0, float("nan")]}, "row 3, column 'temperature': nan must be"),
        ({"top_p": [None, 1.0, 0.0]}, "row 3, column 'top_p': 0.0 must be above 0 and at most 1"),
        ({"top_p": [1.5, 1.0, None]}, "row 1, column 'top_p': 1.5 must be above 0"),
        ({"top_k": [-1, 0, None]}, "row 2, column 'top_k': 0 must be at least 1, or -1"),
        ({"arrival_ns": [0, 5, 4]}, "row 3, column 'arrival_ns': 4 is earlier .* sort=True"),
        ({"req_id": ["a", "b", "a"]}, "row 3, column 'req_id': 'a' is also the id of row 1"),
        ({"session_id": ["s", "t", "s"], "turn": [1, 0, 1]},
         "row 3, column 'turn': 1 comes after a turn as late or later of session 's'"),
        ({"session_id": ["s", "t", "s"], "turn": [0, 0, 1], "think_ns": [None, 3, 4]},
         "row 2, column 'think_ns': 3 on the first turn of session 't'"),
        ({"session_id": ["s", "s", None], "turn": [0, 1, None], "think_ns": [None, 3, 4]},
         "row 3, column 'think_ns': 4 needs session_id and turn"),
        ({"session_id": ["s", "s", "s"], "turn": [0, 1, 2], "think_ns": [None, 3, -4]},
         "row 3, column 'think_ns': -4 must not be negative"),
        ({"session_id": ["s", "s", "s"], "turn": [0, 1, 2], "think_ns": [None, 2**61, 2**62]},
         r"row 3, column 'think_ns': 4\d+ is too long: all think times together"),
    ],
)  # fmt: skip
def test_broken_rules(change, message):
    trace = trace_of(**(GOOD | change))
    with pytest.raises(TraceError, match=message):
        validate_requests(trace.table, "f")
    assert check_requests(trace)


def test_an_empty_trace_is_an_error():
    empty = trace_of(**{name: [] for name in GOOD})
    with pytest.raises(TraceError, match="f: holds no requests"):
        validate_requests(empty.table, "f")
    assert check_requests(empty)[0].law == "not_empty"


def test_check_lists_all_broken_rules_with_0_based_rows():
    trace = trace_of(**(GOOD | {"arrival_ns": [3, 2, 1], "req_id": ["a", "a", "b"]}))
    assert [(f.law, f.row) for f in check_requests(trace)] == [
        ("valid_arrival_ns", 1), ("valid_req_id", 1)
    ]  # fmt: skip


def test_head_scaled_and_open_loop():
    trace = trace_of(**GOOD, session_id=["s"] * 3, turn=[0, 1, 2], think_ns=[None, 10, 21],
                     t_finish=[7, 8, 9])  # fmt: skip
    assert trace.head(2).table["req_id"].to_pylist() == ["a", "b"]
    fast = trace.scaled(2.0)
    assert fast.table["arrival_ns"].to_pylist() == [0, 2, 2]
    assert fast.table["think_ns"].to_pylist() == [None, 5, 10]
    assert fast.table["t_finish"].null_count == 3
    assert fast.metadata.notes == ("times divided by 2",)
    assert trace.to_open_loop().table["think_ns"].null_count == 3
    assert trace.table["think_ns"].to_pylist() == [None, 10, 21], "the original is unchanged"
    assert trace.frame()["think_ns"].tolist()[1:] == [10, 21]


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_scaled_refuses_what_is_no_speed(speed):
    with pytest.raises(ConfigError, match="speed"):
        trace_of(**GOOD).scaled(speed)
    with pytest.raises(ConfigError, match="count"):
        trace_of(**GOOD).head(0)


def test_save_refuses_an_unknown_ending(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.parquet, \.jsonl, \.csv"):
        trace_of(**GOOD).save(tmp_path / "t.xml")
