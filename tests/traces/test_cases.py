"""Files as they are met in the field, one of each kind, in `cases/`."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.distributions import Poisson
from mdi_traces.formats import load_requests
from mdi_traces.requests import RequestTrace

CASES = Path(__file__).parent / "cases"


def load(name: str, **options) -> RequestTrace:
    return load_requests(CASES / name, **options)


def column(trace: RequestTrace, name: str) -> list:
    return trace.table[name].to_pylist()


def test_burstgpt_calls_without_a_session_are_open_loop():
    trace = load("burstgpt_blank_session.csv", closed_loop=True)
    assert column(trace, "arrival_ns") == [0, 10**9, 9 * 10**9, 10 * 10**9]
    assert column(trace, "session_id") == [None, "aaaa-1", "aaaa-1", None]
    assert column(trace, "turn") == [None, 0, 1, None]
    assert column(trace, "think_ns") == [None, None, 6 * 10**9, None]
    assert trace.metadata.notes == ("1 failed call left out",)
    assert load("burstgpt_blank_session.csv").table["think_ns"].null_count == 4


def test_the_arrival_column_of_vidur_traces_is_a_time():
    assert column(load("arrived_at.csv"), "arrival_ns") == [0, 4_314_579_000, 11_836_633_000]
    with pytest.raises(ConfigError, match=r"has times of its own \(arrived_at\)"):
        load("arrived_at.csv", arrivals=Poisson(1.0))


def test_mooncake_sessions_and_delays():
    trace = load("mooncake_sessions.jsonl", closed_loop=True)
    assert column(trace, "session_id") == ["a", "b", "a"]
    assert column(trace, "turn") == [0, 0, 1]
    assert column(trace, "think_ns") == [None, None, 500_000_000]
    assert load("mooncake_sessions.jsonl").table["think_ns"].null_count == 3


def test_unsigned_hashes_stay_equal_and_different():
    first, second = column(load("mooncake_u64_hash_ids.jsonl"), "hash_ids")
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_hash_ids_may_be_missing_or_null():
    trace = load("mooncake_optional_fields.jsonl")
    assert column(trace, "hash_ids") == [[0, 1], None, None]


def test_the_index_column_of_pandas_is_no_column():
    assert column(load("pandas_filtered.parquet"), "prompt_len") == [500, 700, 800]


def test_whole_floats_of_pandas_are_whole_numbers(tmp_path):
    text = (CASES / "pandas_floats.csv").read_text()
    trace = load("pandas_floats.csv")
    assert column(trace, "think_ns")[15] == 2_943_761_375
    (tmp_path / "t").write_text(text.replace("2943761375.0", "5.5"))
    with pytest.raises(TraceError, match=r"row 17, column 'think_ns': '5\.5' is not a"):
        load_requests(tmp_path / "t")


def test_requests_of_a_closed_loop_run_can_be_served_again():
    name = "closed_loop_run.requests.parquet"
    trace = load(name)
    arrival, req_ids = column(trace, "arrival_ns"), column(trace, "req_id")
    assert arrival == sorted(arrival)
    recorded = pq.read_table(CASES / name)
    came = dict(zip(recorded["req_id"].to_pylist(), recorded["arrival_ns"].to_pylist(),
                    strict=True))  # fmt: skip
    assert arrival == [came[req_id] for req_id in req_ids]
    assert trace.table["think_ns"].null_count == recorded["think_ns"].null_count
    assert trace.table["t_finish"].null_count == len(trace)


def test_a_turn_that_never_came_stays_behind_the_one_it_follows(tmp_path):
    """Its recorded time may lie before the time at which the turn before really came."""
    table = pq.read_table(CASES / "closed_loop_run.requests.parquet")
    waits = [row for row, think in enumerate(table["think_ns"].to_pylist()) if think is not None]
    arrival = table["arrival_ns"].to_pylist()
    arrival[waits[-1]] = 1
    index = table.schema.get_field_index("arrival_ns")
    table = table.set_column(index, table.schema.field(index), pa.array(arrival))
    pq.write_table(table, tmp_path / "t.parquet")
    trace = load_requests(tmp_path / "t.parquet")
    assert column(trace, "arrival_ns") == sorted(column(trace, "arrival_ns"))


def test_timestamps_keep_their_unit():
    assert column(load("timestamps_ms.parquet"), "arrival_ns") == [0, 1_500_000_000]


def test_times_since_1970_are_exact_and_count_from_the_first_request():
    assert column(load("epoch_ms.jsonl"), "arrival_ns") == [0, 100_000_000, 200_000_000]


def test_a_column_that_comes_twice_is_named():
    with pytest.raises(TraceError, match=r"duplicate_column\.csv, column 'prompt_len': 2 columns"):
        load("duplicate_column.csv")


@pytest.mark.parametrize("name", ["bom.jsonl", "trace.jsonl.gz"])
def test_marks_and_packings_do_not_matter(name):
    trace = load(name)
    assert column(trace, "arrival_ns") == [0, 1_500_000_000]
    assert column(trace, "hash_ids") == [[0, 1], [2]]
