"""One table, whatever it is written as: the same requests, to the nanosecond."""

import csv
import gzip
import io
import json
import zipfile
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdi_shared.errors import TraceError
from mdi_traces.formats import load_requests

quick = settings(max_examples=60, deadline=None,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip


def as_csv(rows: list[dict], delimiter: str = ",") -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(names)
    writer.writerows([["" if row.get(n) is None else row[n] for n in names] for row in rows])
    return text.getvalue().encode()


def as_json_lines(rows: list[dict]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def as_parquet(rows: list[dict], **types: pa.DataType) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        columns[name] = pa.array([row.get(name) for row in rows], types.get(name))
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def zipped(raw: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", "")
        archive.writestr("folder/trace", raw)
    return out.getvalue()


TEXTS = {
    "csv": as_csv,
    "tabs": lambda rows: as_csv(rows, "\t"),
    "semicolons": lambda rows: as_csv(rows, ";"),
    "json lines": as_json_lines,
    "json array": lambda rows: json.dumps(rows).encode(),
    "json over lines": lambda rows: json.dumps(rows, indent=1).encode(),
    "objects over lines": lambda rows: "\n".join(json.dumps(r, indent=1) for r in rows).encode(),
}
CONTAINERS = TEXTS | {"parquet": as_parquet}
ENCODINGS = {
    "utf-8": lambda raw: raw,
    "utf-8 with a mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "utf-16": lambda raw: raw.decode().encode("utf-16"),
    "utf-16 big end first": lambda raw: b"\xfe\xff" + raw.decode().encode("utf-16-be"),
    "blanks first": lambda raw: b" \n\n\t\n" + raw,
}
PACKINGS = {
    "plain": lambda raw: raw,
    "gzip": gzip.compress,
    "gzip in pieces": lambda raw: gzip.compress(raw[:9]) + gzip.compress(raw[9:]),
    "zstd": lambda raw: pa.compress(raw, codec="zstd", asbytes=True),
    "zip": zipped,
    "gzip twice": lambda raw: gzip.compress(gzip.compress(raw)),
}
START_MS = 1_756_300_000_123
MOONCAKE = [
    {"timestamp": START_MS + gap, "input_length": 600 + gap, "output_length": 5}
    for gap in (0, 1, 1, 250)
]


def arrivals(path, **options) -> list[int]:
    return load_requests(path, **options).table["arrival_ns"].to_pylist()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_container_and_packing_do_not_matter(container, packing, tmp_path):
    path = tmp_path / "misleading.txt"
    path.write_bytes(PACKINGS[packing](CONTAINERS[container](MOONCAKE)))
    trace = load_requests(path)
    assert trace.metadata.config == {"format": "mooncake"}
    assert trace.table["arrival_ns"].to_pylist() == [0, 10**6, 10**6, 250 * 10**6]
    assert trace.table["prompt_len"].to_pylist() == [600, 601, 601, 850]
    assert arrivals(path, limit=2) == [0, 10**6]


@pytest.mark.parametrize("container", TEXTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_marks_encodings_and_leading_blanks_do_not_matter(container, encoding, tmp_path):
    path = tmp_path / "t"
    path.write_bytes(ENCODINGS[encoding](TEXTS[container](MOONCAKE)))
    assert arrivals(path) == [0, 10**6, 10**6, 250 * 10**6]


FOREIGN = {
    "azure": [
        {"TIMESTAMP": "2023-11-16 18:17:03.9799600", "ContextTokens": 9, "GeneratedTokens": 2},
        {"TIMESTAMP": "2023-11-16 18:17:04.0319601", "ContextTokens": 9, "GeneratedTokens": 2},
    ],
    "burstgpt": [
        {"Timestamp": 19440110.25, "Request tokens": 9, "Response tokens": 2, "Session ID": None},
        {"Timestamp": 19440110.3020001, "Request tokens": 9, "Response tokens": 2,
         "Session ID": "a"},
    ],
    "lengths": [
        {"arrived_at": 0.1, "num_prefill_tokens": 9, "num_decode_tokens": 2},
        {"arrived_at": 0.1520001, "num_prefill_tokens": 9, "num_decode_tokens": 2},
    ],
    "bailian": [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 7.5, "input_length": 9,
         "output_length": 2},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 7.5520001, "input_length": 9,
         "output_length": 2},
    ],
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", FOREIGN)
def test_every_format_is_read_from_every_container(name, container, tmp_path):
    path = tmp_path / "t"
    path.write_bytes(CONTAINERS[container](FOREIGN[name]))
    trace = load_requests(path)
    assert trace.metadata.config == {"format": name}
    assert trace.table["arrival_ns"].to_pylist() == [0, 52_000_100]


def test_llmservingsim_requests(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(as_json_lines([
        {"input_toks": 9, "output_toks": 2, "arrival_time_ns": ns, "input_tok_ids": [1, 2]}
        for ns in (4_059_740, 4_059_741)
    ]))  # fmt: skip
    assert arrivals(path) == [0, 1]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"id": "x", "conversations": [{"from": "human", "value": "hi"}]}, "ShareGPT"),
        ({"session_id": "s", "sub_requests": [{"input_toks": 1}]}, "agentic sessions"),
        ({"conversation": [{"role": "user", "content": "hi"}]}, "LMSYS"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "chats as text"),
    ],
)
def test_data_sets_without_lengths_are_named(row, what, tmp_path):
    (tmp_path / "t.json").write_bytes(json.dumps([row]).encode())
    with pytest.raises(TraceError, match=f"holds .*{what}.*the lengths of prompt and output"):
        load_requests(tmp_path / "t.json")


UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+05:30", "duration"])
def test_arrow_times_of_any_unit_and_zone(unit, zone, tmp_path):
    dtype = pa.duration(unit) if zone == "duration" else pa.timestamp(unit, tz=zone)
    times = pa.array([1_700_000_000, 1_700_000_003]).cast(pa.int64()).cast(dtype)
    table = pa.table({"arrival_ns": times, "prompt_len": [1, 2], "output_len": [1, 2]})
    pq.write_table(table, tmp_path / "t", coerce_timestamps=None)
    assert arrivals(tmp_path / "t") == [0, 3 * UNITS[unit]]
    for names in (
        ["timestamp", "input_length", "output_length"],
        ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
        ["Timestamp", "Request tokens", "Response tokens"],
        ["arrived_at", "num_prefill_tokens", "num_decode_tokens"],
    ):
        pq.write_table(table.rename_columns(names), tmp_path / "foreign")
        assert arrivals(tmp_path / "foreign") == [0, 3 * UNITS[unit]]


WHOLE = {
    "int8": pa.int8(), "uint64": pa.uint64(), "float": pa.float32(), "half": pa.float16(),
    "double": pa.float64(), "decimal": pa.decimal128(24, 2), "text": pa.string(),
    "large text": pa.large_string(), "dictionary": pa.dictionary(pa.int8(), pa.int64()),
    "dictionary of texts": pa.dictionary(pa.int32(), pa.string()),
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers_of_any_arrow_type(kind, tmp_path):
    dtype = WHOLE[kind]
    if pa.types.is_dictionary(dtype):
        lengths = pa.array([3, 100]).cast(dtype.value_type).dictionary_encode()
    else:
        lengths = pa.array([3, 100]).cast(dtype)
    table = pa.table({"arrival_ns": [0, 0], "output_len": [1, 2], "prompt_len": lengths})
    pq.write_table(table, tmp_path / "t")
    assert load_requests(tmp_path / "t").table["prompt_len"].to_pylist() == [3, 100]


REFUSED = {
    "boolean": (pa.array([True, True]), "row 1, column 'prompt_len': True is not a whole number"),
    "fraction": (pa.array([1.0, 2.5]), "row 2, column 'prompt_len': 2.5 is not a whole number"),
    "decimal": (pa.array([Decimal("1.10")] * 2), "row 1.*1.10 is not a whole number"),
    "timestamp": (pa.array([1, 2], pa.timestamp("ms")), r"holds timestamp\[ms\], a time, which"),
    "NaN": (pa.array([1.0, float("nan")]), "row 2, column 'prompt_len': is empty"),
    "nulls": (pa.nulls(2), "row 1, column 'prompt_len': is empty"),
    "struct": (pa.array([{"a": 1}] * 2), "row 1.*is not a whole number"),
    "too large": (pa.array([1, 2**31]), "row 2.*2147483648 does not fit int32"),
    "rounded": (pa.array([1.0, 1.1e19]), "row 2.*has lost its last digits as a float"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_values_of_another_kind_are_refused(kind, tmp_path):
    array, message = REFUSED[kind]
    table = pa.table({"arrival_ns": [0, 0], "prompt_len": array, "output_len": [1, 2]})
    pq.write_table(table, tmp_path / "t")
    with pytest.raises(TraceError, match=message) as caught:
        load_requests(tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_booleans_and_dates_are_no_times(tmp_path):
    for array, message in (
        (pa.array([False, True]), "row 1, column 'arrival_ns': False is not"),
        (pa.array([1, 2], pa.date32()), r"holds date32\[day\], a time, which cannot stand here"),
    ):
        table = pa.table({"arrival_ns": array, "prompt_len": [1, 2], "output_len": [1, 2]})
        pq.write_table(table, tmp_path / "t")
        with pytest.raises(TraceError, match=message):
            load_requests(tmp_path / "t")


milliseconds = st.integers(0, 4 * 10**12)  # until the year 2096
tokens = st.integers(1, 10**6)
rows_of = st.lists(st.tuples(milliseconds, tokens, tokens), min_size=1, max_size=8)


@quick
@given(
    rows=rows_of,
    container=st.sampled_from(list(CONTAINERS)),
    unit=st.sampled_from(["ms", "s", "text"]),
)
def test_no_time_is_rounded(rows, container, unit, tmp_path):
    """Milliseconds as whole numbers, as seconds with three decimals, as dates."""
    rows.sort()
    if unit == "ms":
        made = [{"timestamp": t, "input_length": p, "output_length": o} for t, p, o in rows]
    elif unit == "s":
        made = [{"arrived_at": t / 1000, "input_tokens": p, "output_tokens": o}
                for t, p, o in rows]  # fmt: skip
    else:
        made = [{"TIMESTAMP": f"{np.datetime64(t, 'ms')}Z", "ContextTokens": p,
                 "GeneratedTokens": o} for t, p, o in rows]  # fmt: skip
    path = tmp_path / "t"
    path.write_bytes(CONTAINERS[container](made))
    trace = load_requests(path)
    first = rows[0][0]
    assert trace.table["arrival_ns"].to_pylist() == [(t - first) * 10**6 for t, _, _ in rows]
    assert trace.table["prompt_len"].to_pylist() == [p for _, p, _ in rows]


ids = st.lists(st.integers(0, 2**64 - 1), max_size=4)


@quick
@given(
    lists=st.lists(st.none() | ids, min_size=1, max_size=6),
    container=st.sampled_from(["json", "parquet"]),
)
def test_ids_of_64_bits_stay_equal_and_different(lists, container, tmp_path):
    rows = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": each}
            for each in lists]  # fmt: skip
    raw = as_json_lines(rows) if container == "json" else as_parquet(
        rows, hash_ids=pa.list_(pa.uint64()))  # fmt: skip
    (tmp_path / "t").write_bytes(raw)
    found = load_requests(tmp_path / "t").table["hash_ids"].to_pylist()
    assert [each if each is None else [i % 2**64 for i in each] for each in found] == lists


def test_ids_that_cannot_be_told_apart_are_refused(tmp_path):
    rows = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1, 2**64 - 1]}]
    (tmp_path / "t").write_bytes(as_json_lines(rows))
    with pytest.raises(TraceError, match="row 1, column 'hash_ids': mixes ids below 0 with"):
        load_requests(tmp_path / "t")


def test_tables_that_went_through_a_data_frame_are_read_as_before(tmp_path):
    import pandas as pd

    rows = [{"req_id": "a", "arrival_ns": 0, "prompt_len": 5, "output_len": 1, "turn": 0,
             "session_id": "7", "think_ns": None, "seed": 3},
            {"req_id": "b", "arrival_ns": 9, "prompt_len": 6, "output_len": 2, "turn": 1,
             "session_id": "7", "think_ns": 4, "seed": None}]  # fmt: skip
    (tmp_path / "own").write_bytes(as_json_lines(rows))
    expected = load_requests(tmp_path / "own").table
    frame = pd.DataFrame(rows)
    assert frame["think_ns"].dtype == float
    for name, save in {
        "filtered": lambda path: frame[frame.prompt_len > 0].to_parquet(path),
        "indexed": lambda path: frame.set_index("req_id").to_parquet(path),
        "index named": lambda path: frame.rename_axis("row").to_parquet(path, index=True),
        "csv": frame.to_csv,
        "csv without index": lambda path: frame.to_csv(path, index=False),
        "json": lambda path: frame.to_json(path, orient="records"),
        "json lines": lambda path: frame.to_json(path, orient="records", lines=True),
        "times": lambda path: frame.assign(
            arrival_ns=pd.to_datetime(frame.arrival_ns)).to_parquet(path),
        "times with a zone": lambda path: frame.assign(
            arrival_ns=pd.to_datetime(frame.arrival_ns, utc=True)).to_csv(path),
        "durations": lambda path: frame.assign(
            arrival_ns=pd.to_timedelta(frame.arrival_ns)).to_parquet(path),
        "categories": lambda path: frame.assign(
            session_id=frame.session_id.astype("category")).to_parquet(path),
    }.items():  # fmt: skip
        save(tmp_path / name)
        assert load_requests(tmp_path / name).table.equals(expected), name
