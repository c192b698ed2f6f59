"""Files are written whole or not at all, and read with every mismatch named."""

import csv

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdi_shared.errors import SaveError, TraceError
from mdi_traces import io
from mdi_traces.formats import load_requests
from mdi_traces.io import read_table, write_csv, write_jsonl, write_parquet
from mdi_traces.schema import (
    ADDED_COLUMNS,
    METADATA_KEY,
    REQUEST_SCHEMA,
    SCHEMA_VERSION,
    STEP_SCHEMA,
    Metadata,
)

from .conftest import make_run, refusal, trace_of

META = Metadata(table="requests", source="import", licence="MIT", hash_block_size=16)
WRITERS = [write_parquet, write_jsonl, write_csv]


@pytest.fixture
def table() -> pa.Table:
    return trace_of(
        req_id=["a", "b", "c"], arrival_ns=[0, 5, 2**53 + 1], prompt_len=[3, 4, 5],
        max_tokens=[9, 9, 9], output_len=[1, 2, 3], hash_ids=[[1, 2], None, []],
        session_id=["s", None, "s"], turn=[0, None, 1], think_ns=[None, None, 7],
        seed=[2**64 - 1, None, 0], temperature=[None, 0.5, 1.0], priority=[-1, None, 1],
    ).table  # fmt: skip


def test_parquet_round_trip_is_exact(table, tmp_path):
    write_parquet(tmp_path / "t.parquet", table, META)
    again, metadata = read_table(tmp_path / "t.parquet", "requests")
    assert metadata == META
    assert again.equals(table)
    assert again.schema.equals(REQUEST_SCHEMA)


@pytest.mark.parametrize("writer", WRITERS)
def test_equal_input_gives_equal_bytes(writer, table, tmp_path):
    for name in ("one", "two"):
        writer(tmp_path / name, table, META)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_own_formats_keep_every_value(ending, table, tmp_path):
    path = tmp_path / f"t.{ending}"
    (write_parquet if ending == "parquet" else write_jsonl)(path, table, META)
    trace = load_requests(path)
    assert trace.metadata == META
    assert trace.table.equals(table)


def test_csv_keeps_every_value_but_not_the_empty_list(table, tmp_path):
    write_csv(tmp_path / "t.csv", table, META)
    rows = load_requests(tmp_path / "t.csv").table.to_pylist()
    expected = table.to_pylist()
    expected[2]["hash_ids"] = None
    assert rows == expected


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("fault", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    writer, fault, table, tmp_path, monkeypatch
):
    path = tmp_path / "t"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io.os, fault, fail)
    with pytest.raises(SaveError, match="cannot be written: No space left on device"):
        writer(path, table, META)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, pa.ArrowInvalid])
def test_a_writer_that_dies_half_way_leaves_the_old_file(error, table, tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    path.write_text("old")

    def pieces():
        yield table
        raise error("stop")

    monkeypatch.setattr(io, "_GROUP_ROWS", 1)  # so that something was written before
    with pytest.raises(error):
        write_parquet(path, pieces(), META)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2), (0, 3)])
def test_a_file_does_not_depend_on_how_the_table_came(cuts, table, tmp_path, monkeypatch):
    monkeypatch.setattr(io, "_GROUP_ROWS", 2)
    ends = [*cuts, len(table)]
    pieces = [table.slice(a, b - a) for a, b in zip([0, *cuts], ends, strict=True)]
    write_parquet(tmp_path / "whole", table, META)
    write_parquet(tmp_path / "cut", iter(pieces), META)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()
    with pq.ParquetFile(tmp_path / "cut") as file:
        assert file.num_row_groups == -(-len(table) // 2)
    assert read_table(tmp_path / "cut", "requests")[0].equals(table)
    write_parquet(tmp_path / "none", iter(()), META)
    assert len(read_table(tmp_path / "none", "requests")[0]) == 0


def test_writing_where_there_is_no_folder(table, tmp_path):
    with pytest.raises(SaveError, match="cannot be written: No such file or directory"):
        write_parquet(tmp_path / "no" / "t.parquet", table, META)
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot be written: Not a directory"):
        write_parquet(tmp_path / "file" / "t.parquet", table, META)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_cut_off_files_are_one_line_errors(keep, table, tmp_path):
    write_parquet(tmp_path / "t.parquet", table, META)
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:keep])
    with pytest.raises(TraceError, match=r"cut\.parquet: (is empty|cannot be read)") as caught:
        read_table(tmp_path / "cut.parquet", "requests")
    assert "\n" not in str(caught.value)


def test_damage_in_the_middle_is_an_error(table, tmp_path):
    write_parquet(tmp_path / "t.parquet", table, META)
    raw = bytearray((tmp_path / "t.parquet").read_bytes())
    raw[4:200] = bytes(196)
    (tmp_path / "t.parquet").write_bytes(bytes(raw))
    with pytest.raises(TraceError, match="is damaged: its bytes are not those that were written"):
        read_table(tmp_path / "t.parquet", "requests")


def test_no_flipped_bit_is_read_as_another_value(table, tmp_path):
    """The seal covers what page checksums do not: names, types and metadata in the footer."""
    path, rng = tmp_path / "t.parquet", np.random.default_rng(0)
    write_parquet(path, table, META, content=lambda: "abc")
    raw = path.read_bytes()
    for at in rng.choice(len(raw), 300, replace=False).tolist():
        flipped = bytearray(raw)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(flipped))
        if refusal(lambda: read_table(path, "requests")) is None:
            found, metadata = read_table(path, "requests")
            assert found.equals(table), at
            assert metadata == META, at


def test_files_of_other_writers_have_no_seal(table, tmp_path):
    _write_raw(tmp_path / "t.parquet", table, META.to_json())
    assert read_table(tmp_path / "t.parquet", "requests")[0].equals(table)


def test_pages_have_checksums_for_other_readers(table, tmp_path):
    write_parquet(tmp_path / "t.parquet", table, META)
    raw = bytearray((tmp_path / "t.parquet").read_bytes())
    raw[40] ^= 255
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(pa.py_buffer(bytes(raw)), page_checksum_verification=True)


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "'=1", "''@", "'quoted", "a=b", "-1 2"]
)
def test_csv_cells_are_no_formulas_and_come_back_unchanged(text, tmp_path):
    trace = trace_of(req_id=[text], arrival_ns=[0], prompt_len=[1], output_len=[1],
                     hash_ids=[[-5, 3]])  # fmt: skip
    trace.save(tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        cells = list(csv.reader(file))[1]
    assert not any(cell.startswith(("=", "+", "-", "@", "\t")) for cell in cells)
    assert load_requests(tmp_path / "t.csv").table.equals(trace.table)


def test_not_found_and_folder(tmp_path):
    with pytest.raises(TraceError, match=r"no\.parquet: not found"):
        read_table(tmp_path / "no.parquet", "steps")
    with pytest.raises(TraceError, match="is a folder"):
        read_table(tmp_path, "steps")


def _write_raw(path, table, metadata: str | None):
    meta = {} if metadata is None else {METADATA_KEY: metadata.encode()}
    pq.write_table(table.replace_schema_metadata(meta), path)


def test_wrong_kind_newer_schema_and_foreign_file(table, tmp_path):
    path = tmp_path / "t.parquet"
    write_parquet(path, table, META)
    with pytest.raises(TraceError, match="holds a requests table, but a steps table is wanted"):
        read_table(path, "steps")
    _write_raw(path, table, META.to_json().replace('"schema_version": 4', '"schema_version": 9'))
    with pytest.raises(TraceError, match="schema version 9 is newer than 4"):
        read_table(path, "requests")
    _write_raw(path, table, None)
    with pytest.raises(TraceError, match="no mini-deepinfer metadata"):
        read_table(path, "requests")


def test_missing_unknown_and_mistyped_columns(table, tmp_path):
    path = tmp_path / "t.parquet"
    _write_raw(path, table.drop_columns(["cached_len"]), META.to_json())
    with pytest.raises(TraceError, match="column 'cached_len': missing from the requests table"):
        read_table(path, "requests")
    _write_raw(path, table.append_column("colour", table["req_id"]), META.to_json())
    with pytest.raises(TraceError, match="column 'colour': unknown in a requests table"):
        read_table(path, "requests")
    index = table.schema.get_field_index("arrival_ns")
    floats = table.set_column(index, "arrival_ns", table["arrival_ns"].cast("double", safe=False))
    _write_raw(path, floats, META.to_json())
    with pytest.raises(TraceError, match="'arrival_ns': has type double, must be int64"):
        read_table(path, "requests")


def test_null_in_a_required_column(table, tmp_path):
    index = table.schema.get_field_index("prompt_len")
    nulls = pa.array([1, None, 3], pa.int32())
    _write_raw(tmp_path / "t.parquet", table.set_column(index, "prompt_len", nulls), META.to_json())
    with pytest.raises(TraceError, match="row 2, column 'prompt_len': null is not allowed"):
        read_table(tmp_path / "t.parquet", "requests")


def test_a_run_of_the_first_schema_is_read_as_one_of_todays(tmp_path):
    steps = make_run().steps_table
    meta = Metadata(table="steps", source="runtime", schema_version=1)
    old = steps.drop_columns(list(ADDED_COLUMNS["steps"]))
    path = tmp_path / "old.steps.parquet"
    _write_raw(path, old, meta.to_json())
    found, metadata = read_table(path, "steps")
    assert found.schema.equals(STEP_SCHEMA)
    assert found.select(old.column_names).equals(old)
    assert all(found[name].null_count == len(found) for name in ADDED_COLUMNS["steps"])
    assert metadata.schema_version == SCHEMA_VERSION
    _write_raw(path, old, meta.to_json().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(TraceError, match="column 'ingress_ms': missing from the steps table"):
        read_table(path, "steps")
