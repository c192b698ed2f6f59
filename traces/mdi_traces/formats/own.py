"""This project's request traces, in the columns of REQUEST_SCHEMA.

Traces written by hand need only `arrival_ns`, `prompt_len` and `output_len`; other columns may be
left out and are then null, except `req_id` (the row number from 0), `max_tokens` (`output_len`)
and `cached_len` (0). An unknown column is an error, so that a misspelt one is not lost. A table
that went through a data frame or a database is read like one of ours: types are converted where
that loses nothing.

The requests of a run can be read as an input too: what the run added is cleared, a request that
gave no token gets `max_tokens` as its target, and rows are put in order of arrival.
"""

import json
from collections.abc import Set
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from mdi_shared.errors import TraceError
from mdi_traces.columns import Ints, int_lists, numbers, texts
from mdi_traces.formats import values
from mdi_traces.formats.base import Format, Imported, Options
from mdi_traces.formats.rows import Rows
from mdi_traces.formats.values import Column
from mdi_traces.schema import OUTPUT_COLUMNS, REQUEST_SCHEMA, REQUESTS, Metadata

_REQUIRED = ("arrival_ns", "prompt_len", "output_len")
_TIMES = ("arrival_ns", "think_ns")


def _matches(names: Set[str]) -> bool:
    return not names.isdisjoint(_REQUIRED[:2])


def _read(rows: Rows, options: Options) -> Imported:
    metadata = _metadata(rows)
    for name in sorted(rows.names):
        if name not in REQUEST_SCHEMA.names:
            raise TraceError(rows.file, f"unknown column; known: {', '.join(REQUEST_SCHEMA.names)}",
                             column=name[:60])  # fmt: skip
    for name in _REQUIRED:
        if not rows.has(name):
            raise TraceError(rows.file, "missing; a request needs " + ", ".join(_REQUIRED),
                             column=name)  # fmt: skip
    ran = any(_has_values(part.column(name)) for part in rows.parts for name in part.names
              if name in OUTPUT_COLUMNS)  # fmt: skip
    found = {field.name: _column(rows, field) for field in REQUEST_SCHEMA
             if rows.has(field.name) and field.name not in OUTPUT_COLUMNS}  # fmt: skip
    if ran:
        metadata = replace(metadata, notes=(*metadata.notes, *_as_input(found, metadata)))
    columns = {name: _arrow(REQUEST_SCHEMA.field(name).type, cells)
               for name, cells in found.items()}  # fmt: skip
    return Imported(columns=columns, metadata=metadata, sort=ran)


def _column(rows: Rows, field: pa.Field) -> Any:  # noqa: ANN401
    """Return a column's (values, valid), or a list for texts and lists."""
    name, dtype = field.name, field.type
    if pa.types.is_list(dtype):
        return rows.some_int_lists(name)
    if pa.types.is_string(dtype):
        return rows.some_texts(name) if field.nullable else rows.texts(name)
    if name in _TIMES:
        found = rows.some_times_ns(name, 1)
    elif pa.types.is_floating(dtype):
        found = rows.arrays(name, values.floats)
    else:
        found = rows.arrays(name, lambda cells: values.whole(cells, dtype.to_pandas_dtype()))
    if not field.nullable:
        rows.required(name, found)
    return found


def _arrow(dtype: pa.DataType, cells: Any) -> pa.Array:  # noqa: ANN401
    if pa.types.is_list(dtype):
        return int_lists(cells)
    return texts(cells) if pa.types.is_string(dtype) else numbers(cells[0], dtype, cells[1])


def _as_input(found: dict[str, Any], metadata: Metadata) -> list[str]:
    """Turn the columns of a run into those of an input, and say what was changed."""
    notes = [f"inputs of a run ({metadata.generator})"]
    output, _ = found["output_len"]
    if (output == 0).any() and "max_tokens" in found:
        output[:] = np.where(output == 0, found["max_tokens"][0], output)
        notes.append("requests without output get max_tokens as their target")
    if "session_id" in found and "turn" in found:
        _keep_turns_in_order(found["arrival_ns"][0], found["session_id"], found["turn"][0])
    return notes


def _keep_turns_in_order(arrival: Ints, sessions: list[str | None], turn: Ints) -> None:
    """Let no turn arrive before the one it follows: one that never came has its recorded time."""
    latest: dict[str, int] = {}
    for row in np.argsort(turn, kind="stable").tolist():
        session = sessions[row]
        if session is not None:
            arrival[row] = max(int(arrival[row]), latest.get(session, 0))
            latest[session] = int(arrival[row])


def _metadata(rows: Rows) -> Metadata:
    """Return the metadata of the files; files that differ become one import."""
    found = []
    for part in rows.parts:
        if part.header is None:
            continue
        header = part.header
        text = header if isinstance(header, bytes) else json.dumps(header, default=float)
        metadata = Metadata.from_json(text, part.file)
        if metadata.table != REQUESTS:
            raise TraceError(part.file, f"holds a {metadata.table} table, but requests are wanted")
        found.append(metadata)
    sizes = {m.hash_block_size for m in found if m.hash_block_size is not None}
    if len(sizes) > 1:
        raise TraceError(rows.file, "mixes files of different hash_block_size: "
                         f"{', '.join(map(str, sorted(sizes)))} tokens")  # fmt: skip
    if len(found) == len(rows.parts) and all(metadata == found[0] for metadata in found):
        return found[0]
    return Metadata(table=REQUESTS, source="import", hash_block_size=next(iter(sizes), None))


def _has_values(column: Column) -> bool:
    if isinstance(column, pa.ChunkedArray):
        return bool(column.null_count < len(column))
    return any(value is not None for value in values.objects(column))


OWN = Format(
    name="own",
    needs="arrival_ns, prompt_len, output_len, optionally the other columns of "
    "docs/trace-format.md",
    matches=_matches,
    read=_read,
    no_sessions="keeps its own think times",
)
