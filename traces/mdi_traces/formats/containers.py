"""Columns by name from CSV, JSON and Parquet, whatever they mean.

A container is told by its content: Parquet by its magic, JSON by a bracket, everything else is
CSV, also with tabs, semicolons or bars between the fields. JSON may be one object a line, objects
that follow one another over several lines, or one array of objects. A name that comes twice is an
error.

Read next: `rows.py` (what formats ask for), `values.py` (what values may be).
"""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from mdi_shared.errors import TraceError
from mdi_traces.columns import Ints
from mdi_traces.formats.files import PathLike, as_utf8, contents, reading
from mdi_traces.formats.values import Column, shown
from mdi_traces.io import parse_parquet, require_unique, unguarded
from mdi_traces.schema import METADATA_KEY, REQUEST_SCHEMA

_HEADER = "mdi"  # key of our metadata, in the first line of JSON lines
_LARGEST_LINE = 64 << 20
_BLANK = re.compile(r"[\s\x1e]*")  # also the record separator of JSON sequences
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0|")  # how pandas names an index without a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one file: names and columns, and the 1-based line, or row, of each.

    `header` is the metadata of a file of ours, as JSON text or parsed. `blank` says what a missing
    value is called.
    """

    file: str
    names: tuple[str, ...]
    column: Callable[[str], Column]
    lines: Ints
    header: object = None
    blank: str = "is empty"


class _RepeatedKey(ValueError):
    """A JSON object names a key twice."""


def read_parts(
    paths: PathLike | list[PathLike] | tuple[PathLike, ...], limit: int | None
) -> list[Part]:
    """Read the files that the paths stand for, at most `limit` rows in all.

    Raises `TraceError` naming file and row.
    """
    parts: list[Part] = []
    left = limit
    with closing(contents(paths)) as streams:
        for name, stream in streams:
            with reading(name):
                part = _read_part(name, stream, left)
            parts.append(part)
            left = None if left is None else left - len(part.lines)
            if left == 0:
                break
    return parts


def _read_part(name: str, stream: BinaryIO, limit: int | None) -> Part:
    if stream.peek(4).startswith(b"PAR1"):  # type: ignore[attr-defined]
        return _parquet(name, stream.read(), limit)
    text = as_utf8(name, stream)
    number, first = 1, text.readline()
    while first and not first.strip():
        number, first = number + 1, text.readline()
    if not first:
        raise TraceError(name, "is empty")
    if b"\0" in first:
        raise TraceError(name, "is not text, and of no binary kind that is known")
    if first.lstrip().startswith((b"{", b"[")):
        return _json(name, first, number, text, limit)
    return _csv(name, first, number, text, limit)


def _parquet(name: str, raw: bytes, limit: int | None) -> Part:
    table = parse_parquet(name, raw)
    metadata = table.schema.metadata or {}
    dropped = {
        column for column in _pandas_index(name, metadata)
        if column not in REQUEST_SCHEMA.names
    }  # fmt: skip
    table = table.select([n for n in table.column_names if n not in dropped]).slice(0, limit)
    return Part(
        file=name,
        names=tuple(table.column_names),
        column=table.column,
        lines=np.arange(1, len(table) + 1),
        header=metadata.get(METADATA_KEY),
    )


def _pandas_index(name: str, metadata: dict[bytes, bytes]) -> list[str]:
    """Return the columns that pandas added for the index of a data frame."""
    try:
        document = json.loads(metadata.get(b"pandas", b"{}"))
        return [each for each in document.get("index_columns", []) if isinstance(each, str)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise TraceError(name, "its pandas metadata is damaged") from error


def _csv(name: str, first: bytes, number: int, rest: BinaryIO, limit: int | None) -> Part:
    """Read every field as text; the first line names the columns."""
    body = rest.read() if limit is None else b"".join(islice(rest, limit))
    if body.count(b'"') % 2:  # the limit fell inside a field of several lines
        body += rest.read()
    raw = b"".join([first, body]).rstrip(b"\r\n") + b"\n"
    if not raw.isascii():
        _parsed(name, number, raw.decode)
    table = _csv_table(name, first, number, raw)
    header = [column[0].as_py() for column in table.columns]
    names = ["" if cell is None else str(cell).strip() for cell in header]
    if _INDEX.fullmatch(names[0]) and len(names) > 1:
        names, table = names[1:], table.select(range(1, len(names)))
    require_unique(names, name)
    table = table.slice(1, limit).rename_columns(names)
    guarded = b"'" in raw
    return Part(
        file=name,
        names=tuple(names),
        column=lambda key: unguarded(table[key]) if guarded else table[key],
        lines=np.arange(number + 1, number + 1 + len(table)),
    )


def _csv_table(name: str, first: bytes, number: int, raw: bytes) -> pa.Table:
    """Parse the whole file, its header as the first row."""
    delimiter = max(",\t;|", key=lambda each: first.count(each.encode()))
    wrong: list[pacsv.InvalidRow] = []

    def refuse(row: pacsv.InvalidRow) -> str:
        wrong.append(row)
        return "error"

    width = first.count(delimiter.encode()) + 1
    try:
        return pacsv.read_csv(
            io.BytesIO(raw),
            read_options=pacsv.ReadOptions(
                use_threads=False,  # only then a wrong row has a number
                autogenerate_column_names=True,
                block_size=min(len(raw) + 1, _LARGEST_LINE),
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=delimiter, ignore_empty_lines=False, newlines_in_values=b'"' in raw,
                invalid_row_handler=refuse,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types={f"f{i}": pa.string() for i in range(width)},
                null_values=[""], strings_can_be_null=True,
            ),
        )  # fmt: skip
    except pa.ArrowInvalid as error:
        if wrong:
            raise TraceError(
                name, f"has {wrong[0].actual_columns} fields, the header has "
                f"{wrong[0].expected_columns}: perhaps cut off",
                row=number - 1 + (wrong[0].number or 1),
            ) from error  # fmt: skip
        raise TraceError(name, f"is not CSV: {str(error).splitlines()[0]}") from error


def _json(name: str, first: bytes, number: int, rest: BinaryIO, limit: int | None) -> Part:
    objects = _json_lines(name, first, number, rest) if _is_object(first) else None
    if objects is None:
        objects = _json_text(name, first + rest.read(), number)
    found = list(islice(objects, None if limit is None else limit + 1))
    header = None
    for line, record in found:
        if not isinstance(record, dict):
            raise TraceError(name, "is not a JSON object", row=line)
    if found and _HEADER in found[0][1]:
        header = found.pop(0)[1][_HEADER]
    found = found[:limit]
    records: list[dict[str, Any]] = [record for _, record in found]
    return Part(
        file=name,
        names=tuple(dict.fromkeys(chain.from_iterable(records))),
        column=lambda key: [record.get(key) for record in records],
        lines=np.array([line for line, _ in found], dtype=np.int64),
        header=header,
        blank="missing",
    )


def _is_object(line: bytes) -> bool:
    """Say whether a line is a whole JSON object, as in JSON lines."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(name: str, first: bytes, number: int, rest: BinaryIO) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(chain([first], rest), start=number):
        if text.strip():
            yield line, _parsed(name, line, _decode, text)


def _json_text(name: str, raw: bytes, number: int) -> Iterator[tuple[int, Any]]:
    """Yield the elements of an array, or objects that follow one another, with their lines."""
    text = _parsed(name, number, raw.decode)
    at = _after_blanks(text, 0)
    in_array = text[at] == "["
    at, counted = at + in_array, 0
    while True:
        at = _after_blanks(text, at)
        number, counted = number + text.count("\n", counted, at), at
        if at == len(text) and not in_array:
            return
        if in_array and text[at : at + 1] == "]":
            if _after_blanks(text, at + 1) < len(text):
                raise TraceError(name, "goes on after its JSON array", row=number)
            return
        value, end = _parsed(name, number, _DECODER.raw_decode, text, at)
        yield number, value
        at = _after_blanks(text, end)
        if in_array and text[at : at + 1] == ",":
            at += 1
        elif in_array and text[at : at + 1] != "]":
            raise TraceError(name, "is a JSON array without an end, perhaps cut off", row=number)


def _parsed(name: str, line: int, parse: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401
    try:
        return parse(*given)
    except UnicodeDecodeError as error:
        raise TraceError(name, f"is not UTF-8 text ({error.reason})") from error
    except _RepeatedKey as error:
        raise TraceError(name, f"the key {error} comes twice in one object", row=line) from error
    except json.JSONDecodeError as error:
        raise TraceError(name, f"is not valid JSON, perhaps cut off ({error})",
                         row=line) from error  # fmt: skip
    except (ValueError, ArithmeticError) as error:
        raise TraceError(name, "holds a number of too many digits", row=line) from error
    except RecursionError as error:
        raise TraceError(name, "is nested too deeply", row=line) from error


def _decode(line: bytes) -> object:
    return _DECODER.decode(line.decode())


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _RepeatedKey(shown(next(key for key, count in counts.items() if count > 1)))
    return record


def _after_blanks(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return at if match is None else match.end()


_DECODER = json.JSONDecoder(parse_float=Decimal, object_pairs_hook=_unique_keys)
