"""Trace files: written whole or not at all, read with every mismatch named.

No time stamps are stored: equal input gives equal bytes. Row-level rules are not checked here but
in `requests.py` and `check.py`.

Read next: `saving.py` (how a file takes its place), `run.py` (the files of one run),
`formats/own.py` (request traces by hand).
"""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdi_shared.errors import TraceError
from mdi_traces.saving import atomic_file
from mdi_traces.schema import (
    ADDED_COLUMNS,
    CONTENT_KEY,
    METADATA_KEY,
    SCHEMA_VERSION,
    SCHEMAS,
    Metadata,
    type_name,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GROUP_ROWS = 1 << 17  # of a Parquet row group, so much is held in memory when writing
_BUFFER = 1 << 20  # bytes written at a time
_SEAL = b"mdi-seal"  # then the SHA-256 of the file without these two
_ENDING = 8  # bytes after a Parquet file's footer: its length, and a mark
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # what a spreadsheet would run; an apostrophe stops it


def write_parquet(
    path: str | os.PathLike[str],
    table: pa.Table | Iterable[pa.Table],
    metadata: Metadata,
    *,
    content: Callable[[], str] | None = None,
) -> None:
    """Write a table of kind `metadata.table` with its metadata.

    A table may come in pieces, which are written as they come; the file does not depend on how it
    was cut. `content`, asked after the last piece, names the run that the table is a part of; see
    `read_content`. Raises `TraceError` when the columns differ from the schema, `SaveError` when
    the file cannot be written.
    """
    schema = SCHEMAS[metadata.table].with_metadata({METADATA_KEY: metadata.to_json().encode()})
    pieces = [table] if isinstance(table, pa.Table) else table
    with atomic_file(path) as file:
        hashed = _Hashed(file)
        with (
            pa.output_stream(hashed, buffer_size=_BUFFER) as out,
            pq.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for group in _row_groups(pieces, metadata.table, str(path)):
                writer.write_table(group.select(schema.names).cast(schema))
            if content is not None:
                writer.add_key_value_metadata({CONTENT_KEY: content().encode()})
        hashed.seal()


def _row_groups(pieces: Iterable[pa.Table], kind: str, file: str) -> Iterator[pa.Table]:
    """Yield tables of `_GROUP_ROWS` rows, but for the last one; at least one."""
    waiting: list[pa.Table] = []
    rows, is_first = 0, True
    for piece in pieces:
        require_schema(piece, kind, file)
        while rows + len(piece) > _GROUP_ROWS:
            taken = _GROUP_ROWS - rows
            yield _joined([*waiting, piece.slice(0, taken)])
            piece = piece.slice(taken)
            waiting, rows, is_first = [], 0, False
        waiting.append(piece)
        rows += len(piece)
    if rows or is_first:
        yield _joined(waiting or [SCHEMAS[kind].empty_table()])


def _joined(pieces: list[pa.Table]) -> pa.Table:
    return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).combine_chunks()


def write_jsonl(path: str | os.PathLike[str], table: pa.Table, metadata: Metadata) -> None:
    """Write one JSON object a line: first `{"mdi": metadata}`, then rows without their nulls."""
    require_schema(table, metadata.table, str(path))
    with atomic_file(path) as file:
        file.write(b'{"mdi": ' + metadata.to_json().encode() + b"}\n")
        for row in table.to_pylist():
            kept = {name: value for name, value in row.items() if value is not None}
            file.write(json.dumps(kept).encode() + b"\n")


def write_csv(path: str | os.PathLike[str], table: pa.Table, metadata: Metadata) -> None:
    """Write the columns that hold values as CSV, lists as ids with spaces between.

    Texts that a spreadsheet would run as a formula get an apostrophe in front, which reading
    takes away. CSV has no place for metadata: source, licence and hash block size do not travel.
    """
    require_schema(table, metadata.table, str(path))
    names = [name for name in table.column_names if table[name].null_count < len(table)]
    with atomic_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        for row in table.select(names).to_pylist():
            writer.writerow([_cell(row[name]) for name in names])
        text.detach()


def _cell(value: object) -> object:
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, str) and _FORMULA.match(value):
        return "'" + value
    return "" if value is None else value


def unguarded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return CSV cells without the apostrophe that keeps a spreadsheet from running them."""
    if not pa.types.is_string(column.type):
        return column
    return pc.replace_substring_regex(column, f"^'({_FORMULA.pattern})", r"\1")


def read_table(path: str | os.PathLike[str], kind: str) -> tuple[pa.Table, Metadata]:
    """Read a Parquet table of `kind` (steps, items or requests) in the schema's column order.

    A file of an older schema comes back as one of today's: columns it could not have are null.
    Raises `TraceError` when the file is not there, cut off or damaged, holds another kind of
    table, comes from a newer schema, or has a column missing, unknown, of another type, or null
    where a value is required.
    """
    file = str(path)
    require_file(path)
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(file, f"cannot be read: {error.strerror or error}") from error
    table = parse_parquet(file, raw)
    document = (table.schema.metadata or {}).get(METADATA_KEY)
    if document is None:
        raise TraceError(file, "has no mini-deepinfer metadata: not a trace of this project")
    metadata = Metadata.from_json(document, file)
    if metadata.table != kind:
        raise TraceError(file, f"holds a {metadata.table} table, but a {kind} table is wanted")
    table = _with_added_columns(table, kind, metadata.schema_version)
    require_schema(table, kind, file)
    metadata = replace(metadata, schema_version=SCHEMA_VERSION)
    return table.select(SCHEMAS[kind].names).cast(SCHEMAS[kind]), metadata


def _with_added_columns(table: pa.Table, kind: str, version: int) -> pa.Table:
    for name, since in ADDED_COLUMNS.get(kind, {}).items():
        if version < since and name not in table.column_names:
            field = SCHEMAS[kind].field(name)
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table


def read_content(path: str | os.PathLike[str]) -> str | None:
    """Return what names the run a file is a part of; None in files written before there was one.

    Only the end of the file is read. Raises `TraceError` when it cannot be.
    """
    require_file(path)
    try:
        content = (pq.read_metadata(path).metadata or {}).get(CONTENT_KEY)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    return None if content is None else content.decode(errors="replace")


def parse_parquet(file: str, raw: bytes) -> pa.Table:
    """Read any Parquet file, given as bytes; every failure is a one-line `TraceError`.

    Seal and page checksums are verified, where there are any, and no column name may come twice.
    """
    _require_seal(file, raw)
    try:
        with pq.ParquetFile(pa.py_buffer(raw), page_checksum_verification=True) as parquet:
            table = parquet.read()
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _unreadable(file, error) from error
    require_unique(table.column_names, file)
    return table


class _Hashed(io.RawIOBase):
    """Hands bytes on to a file and takes their digest, which then goes into it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: "ReadableBuffer") -> int:
        self._digest.update(data)
        return self._file.write(data)

    def seal(self) -> None:
        """Put a digest of all bytes of a Parquet file in front of its footer.

        Readers look for what the footer names and pass over the rest. Page checksums do not cover
        the footer, where names, types and metadata are.
        """
        file = self._file
        file.seek(-_ENDING, os.SEEK_END)
        file.seek(-_ENDING - int.from_bytes(file.read(4), "little"), os.SEEK_END)
        at = file.tell()
        footer = file.read()
        file.seek(at)
        file.write(_SEAL + self._digest.digest() + footer)


def _require_seal(file: str, raw: bytes) -> None:
    end = _footer_at(raw)
    start = end - len(_SEAL) - hashlib.sha256().digest_size
    if start < 0 or not raw.startswith(_SEAL, start):
        return  # written by another program
    digest = hashlib.sha256(raw[:start])
    digest.update(raw[end:])
    if digest.digest() != raw[start + len(_SEAL) : end]:
        raise TraceError(file, "is damaged: its bytes are not those that were written")


def _footer_at(raw: bytes) -> int:
    """Return where the footer begins: its length stands before the last four bytes."""
    return len(raw) - _ENDING - int.from_bytes(raw[-_ENDING:-4], "little")


def require_unique(names: Sequence[str], file: str) -> None:
    """Raise `TraceError` for a column name that comes twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise TraceError(file, f"{count} columns have this name", column=name[:60])


def _unreadable(path: str | os.PathLike[str], error: Exception) -> TraceError:
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return TraceError(str(path), f"cannot be read as Parquet, it is damaged or cut off ({reason})")


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise `TraceError` unless `path` is a file with something in it."""
    target = Path(path)
    if target.is_dir():
        raise TraceError(str(path), "is a folder, not a file")
    if not target.is_file():
        raise TraceError(str(path), "not found")
    if target.stat().st_size == 0:
        raise TraceError(str(path), "is empty")


def require_schema(table: pa.Table, kind: str, file: str) -> None:
    """Raise `TraceError` naming the first column of `table` that differs from the schema."""
    schema = SCHEMAS[kind]
    for name in table.column_names:
        if name not in schema.names:
            raise TraceError(file, f"unknown in a {kind} table", column=name)
    for field in schema:
        if field.name not in table.column_names:
            raise TraceError(file, f"missing from the {kind} table", column=field.name)
        column = table[field.name]
        if column.type != field.type:
            raise TraceError(file, f"has type {type_name(column.type)}, must be "
                             f"{type_name(field.type)}", column=field.name)  # fmt: skip
        if not field.nullable and column.null_count:
            row = next(i for i, value in enumerate(column) if not value.is_valid)
            raise TraceError(file, "null is not allowed", row=row + 1, column=field.name)
