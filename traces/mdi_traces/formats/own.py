"""This project's request traces: Parquet, JSONL and CSV in the columns of REQUEST_SCHEMA.

Traces written by hand need only `arrival_ns`, `prompt_len` and `output_len`; other columns may be
left out and are then null, except `req_id` (the row number from 0), `max_tokens` (`output_len`)
and `cached_len` (0). An unknown column is an error, so that a misspelt one is not lost. In CSV an
empty field is null and `hash_ids` are ids with spaces between.

The request table of a run can be read as an input too: what the run added is cleared, and a
request that gave no token gets `max_tokens` as its target.
"""

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from mdi_shared.errors import TraceError
from mdi_traces.columns import Ints, int_lists, ints, numbers, texts
from mdi_traces.formats.rows import decoded, parse_object, read_csv_bytes
from mdi_traces.io import read_parquet, read_table, require_file
from mdi_traces.requests import RequestTrace, build_requests, clear_outputs, put_column
from mdi_traces.schema import METADATA_KEY, REQUEST_SCHEMA, REQUESTS, Metadata, type_name

NEEDS = "arrival_ns, prompt_len, output_len, optionally the other columns of docs/trace-format.md"
_REQUIRED = ("arrival_ns", "prompt_len", "output_len")
_HEADER = "mdi"  # key of the metadata line in JSONL
Loaded = tuple[RequestTrace, Ints]  # and the line of each row in the file


def matches(keys: frozenset[str]) -> bool:
    """Say whether JSONL keys or a CSV header are this project's."""
    return _HEADER in keys or keys >= set(_REQUIRED[:2])


def read_own_parquet(path: str | os.PathLike[str], limit: int | None) -> Loaded:
    """Read a request table of ours, or any Parquet file with its column names."""
    raw = read_parquet(path)
    if METADATA_KEY in (raw.schema.metadata or {}):
        table, metadata = read_table(path, REQUESTS)
    else:
        columns = {name: _cast(raw[name], name, str(path)) for name in raw.column_names}
        trace = _complete(columns, len(raw), str(path), Metadata(table=REQUESTS, source="import"))
        table, metadata = trace.table, trace.metadata
    trace = _as_input(RequestTrace(table if limit is None else table.slice(0, limit), metadata))
    return trace, np.arange(1, len(trace) + 1, dtype=np.int64)


def read_own_jsonl(path: str | os.PathLike[str], limit: int | None) -> Loaded:
    """Read rows of JSON objects, after an optional first line `{"mdi": metadata}`."""
    require_file(path)
    file = str(path)
    metadata = Metadata(table=REQUESTS, source="import")
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    with Path(path).open(encoding="utf-8") as text:
        for number, line in enumerate(decoded(text, file), start=1):
            if limit is not None and len(records) == limit:
                break
            if not line.strip():
                continue
            record = parse_object(line, file, number)
            if number == 1 and _HEADER in record:
                metadata = Metadata.from_document(record[_HEADER], file)
                continue
            records.append(record)
            lines.append(number)
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: _from_json(records, lines, name, file) for name in names}
    trace = _complete(columns, len(records), file, metadata)
    return _as_input(trace), np.array(lines, dtype=np.int64)


def read_own_csv(path: str | os.PathLike[str], limit: int | None) -> Loaded:
    """Read a CSV file with a header of column names."""
    file = str(path)
    raw, names = read_csv_bytes(path, limit)
    options = pacsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
    )
    try:
        table = pacsv.read_csv(
            io.BytesIO(raw), convert_options=options,
            read_options=pacsv.ReadOptions(use_threads=False),  # only then errors name the row
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
        )  # fmt: skip
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0] if str(error) else "cannot be parsed"
        raise TraceError(file, f"perhaps cut off: {reason}") from error
    columns = {name: _from_text(table[name].to_pylist(), name, file) for name in names}
    trace = _complete(columns, len(table), file, Metadata(table=REQUESTS, source="import"))
    return _as_input(trace), np.arange(2, len(table) + 2, dtype=np.int64)


def _complete(columns: dict[str, Any], count: int, file: str, metadata: Metadata) -> RequestTrace:
    for name in _REQUIRED:
        if name not in columns:
            raise TraceError(file, "missing; a request needs " + ", ".join(_REQUIRED), column=name)
    if count == 0:
        raise TraceError(file, "holds no requests")
    return build_requests(columns, metadata)


def _as_input(trace: RequestTrace) -> RequestTrace:
    """Turn the request table of a run into an input; a trace that is one is left as it is."""
    table = clear_outputs(trace.table)
    if table is trace.table:
        return trace
    notes = [f"inputs of a run ({trace.metadata.generator})"]
    output = ints(table["output_len"])
    if (output == 0).any():
        output = np.where(output == 0, ints(table["max_tokens"]), output)
        table = put_column(table, "output_len", numbers(output, pa.int32()))
        notes.append("requests without output get max_tokens as their target")
    metadata = replace(trace.metadata, notes=(*trace.metadata.notes, *notes))
    return RequestTrace(table, metadata)


def _field(name: str, file: str) -> pa.Field:
    if name not in REQUEST_SCHEMA.names:
        raise TraceError(file, f"unknown column; known: {', '.join(REQUEST_SCHEMA.names)}",
                         column=name)  # fmt: skip
    return REQUEST_SCHEMA.field(name)


def _cast(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    field = _field(name, file)
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TraceError(file, f"cannot be read as {type_name(field.type)} ({error})",
                         column=name) from error  # fmt: skip


def _from_json(records: list[dict[str, Any]], lines: list[int], name: str, file: str) -> pa.Array:
    field = _field(name, file)
    values = [record.get(name) for record in records]
    for line, value in zip(lines, values, strict=True):
        if not (_fits(value, field.type) or (value is None and field.nullable)):
            problem = "missing" if value is None else f"{value!r} is not {type_name(field.type)}"
            raise TraceError(file, problem, row=line, column=name)
    return _array(values, field.type)


def _from_text(cells: list[str | None], name: str, file: str) -> pa.Array:
    field = _field(name, file)
    values: list[Any] = []
    for line, cell in enumerate(cells, start=2):
        value = None if cell is None else _parse(cell, field.type)
        if not (_fits(value, field.type) or (cell is None and field.nullable)):
            problem = "is empty" if cell is None else f"{cell!r} is not {type_name(field.type)}"
            raise TraceError(file, problem, row=line, column=name)
        values.append(value)
    return _array(values, field.type)


def _parse(cell: str, dtype: pa.DataType) -> object:
    """Return the cell's value, or None when it is not of that type."""
    try:
        if pa.types.is_integer(dtype):
            return int(cell)
        if pa.types.is_floating(dtype):
            return float(cell)
        return [int(part) for part in cell.split()] if pa.types.is_list(dtype) else cell
    except ValueError:
        return None


def _fits(value: object, dtype: pa.DataType) -> bool:
    if pa.types.is_integer(dtype):
        bounds = np.iinfo(dtype.to_pandas_dtype())
        return type(value) is int and int(bounds.min) <= value <= int(bounds.max)
    if pa.types.is_floating(dtype):
        return type(value) in (int, float) and value == value
    if pa.types.is_list(dtype):
        return isinstance(value, list) and all(_fits(item, pa.int64()) for item in value)
    return isinstance(value, str)


def _array(values: list[Any], dtype: pa.DataType) -> pa.Array:
    if pa.types.is_list(dtype):
        return int_lists(values)
    if pa.types.is_string(dtype) or pa.types.is_dictionary(dtype):
        return texts(values, dtype)
    valid = np.array([value is not None for value in values], dtype=bool)
    filled = [0 if value is None else value for value in values]
    return numbers(np.array(filled, dtype=dtype.to_pandas_dtype()), dtype, valid)
