"""Rows of a foreign text file, taken column by column, with every bad value located.

`JsonRows` and `CsvRows` offer the same few kinds of columns, so that a format says only which field
is what. They fill in nothing: a missing, empty or unreadable value is a `TraceError` naming file,
line and field.

Read next: `mooncake.py` (the shortest format), `__init__.py` (which format is it?).
"""

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from mdi_shared.errors import TraceError
from mdi_traces.columns import Bools, Ints, floats, ints
from mdi_traces.io import require_file

Kind = Literal["int", "float", "str"]
_ARROW: dict[Kind, pa.DataType] = {"int": pa.int64(), "float": pa.float64(), "str": pa.string()}
_WORDS: dict[Kind, str] = {"int": "a whole number", "float": "a number", "str": "a text"}
NS_PER_S = 1_000_000_000
_LONGEST_NS = 2**62  # 146 years; beyond it sums of times could overflow


class Rows(ABC):
    """Rows of `file`; `lines` is the 1-based line each came from."""

    def __init__(self, file: str, lines: Ints) -> None:
        self.file = file
        self.lines = lines
        if len(lines) == 0:
            raise TraceError(file, "holds no requests")

    def __len__(self) -> int:
        return len(self.lines)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Say whether the file has this field."""

    @abstractmethod
    def ints(self, name: str) -> Ints:
        """Return a field of whole numbers."""

    @abstractmethod
    def floats(self, name: str) -> NDArray[np.float64]:
        """Return a field of numbers, NaN and infinity included if the file says so."""

    @abstractmethod
    def texts(self, name: str) -> list[str]:
        """Return a field of texts."""

    def tokens(self, name: str, minimum: int = 1) -> Ints:
        """Return a field of lengths between `minimum` and the largest int32, tokens."""
        values = self.ints(name)
        self.refuse(values < minimum, name, values, f"must be at least {minimum} token")
        self.refuse(values >= 2**31, name, values, "is too large for a length")
        return values

    def times_ns(self, name: str, unit_ns: int) -> Ints:
        """Return a field of times, counted in `unit_ns` nanoseconds, as ns from the same zero."""
        values = self.floats(name)
        self.refuse(~np.isfinite(values), name, values, "is not a time")
        self.refuse(values < 0, name, values, "must not be negative")
        self.refuse(values * unit_ns >= _LONGEST_NS, name, values, "is too late to be a time")
        return np.rint(values * unit_ns).astype(np.int64)

    def refuse(
        self, bad: Bools, name: str, values: Sequence[Any] | NDArray[Any], problem: str
    ) -> None:
        """Raise `TraceError` for the first row where `bad` is True."""
        if bad.any():
            row = int(bad.argmax())
            self.fail(row, name, f"{values[row]} {problem}")

    def fail(self, row: int, name: str, problem: str) -> NoReturn:
        """Raise `TraceError` for a 0-based row and a field."""
        raise TraceError(self.file, problem, row=int(self.lines[row]), column=name)


class JsonRows(Rows):
    """Rows of a JSONL file, one parsed object each."""

    def __init__(self, file: str, records: list[dict[str, Any]], lines: Ints) -> None:
        super().__init__(file, lines)
        self.records = records

    def has(self, name: str) -> bool:
        return any(name in record for record in self.records)

    def values(self, name: str, types: tuple[type, ...], what: str) -> list[Any]:
        """Return a field whose values must be of one of `types`, described by `what`."""
        values = [record.get(name) for record in self.records]
        for row, value in enumerate(values):
            if type(value) not in types:  # not isinstance: True is no number
                missing = name not in self.records[row]
                self.fail(row, name, "missing" if missing else f"{value!r} is not {what}")
        return values

    def ints(self, name: str) -> Ints:
        values = self.values(name, (int,), _WORDS["int"])
        big = [abs(value) >= 2**63 for value in values]
        self.refuse(np.array(big), name, values, "is too large")
        return np.array(values, dtype=np.int64)

    def floats(self, name: str) -> NDArray[np.float64]:
        return np.array(self.values(name, (int, float), _WORDS["float"]), dtype=np.float64)

    def texts(self, name: str) -> list[str]:
        return self.values(name, (str,), _WORDS["str"])

    def int_lists(self, name: str) -> list[list[int]]:
        """Return a field of lists of whole numbers."""
        values = self.values(name, (list,), "a list of whole numbers")
        for row, value in enumerate(values):
            if any(type(item) is not int or abs(item) >= 2**63 for item in value):
                self.fail(row, name, "is not a list of whole numbers")
        return values


class CsvRows(Rows):
    """Rows of a CSV file as an Arrow table of the wanted columns."""

    def __init__(self, file: str, table: pa.Table, lines: Ints) -> None:
        super().__init__(file, lines)
        self.table = table

    def has(self, name: str) -> bool:
        return name in self.table.column_names

    def ints(self, name: str) -> Ints:
        return ints(self._column(name))

    def floats(self, name: str) -> NDArray[np.float64]:
        return floats(self._column(name))

    def texts(self, name: str) -> list[str]:
        values: list[str] = self._column(name).to_pylist()
        return values

    def _column(self, name: str) -> pa.ChunkedArray:
        if not self.has(name):
            raise TraceError(self.file, "the column is missing", column=name)
        return self.table[name]


def read_jsonl(path: str | os.PathLike[str], limit: int | None = None) -> JsonRows:
    """Parse a JSONL file, at most `limit` rows; blank lines are skipped but counted."""
    require_file(path)
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(decoded(file, str(path)), start=1):
            if limit is not None and len(records) == limit:
                break
            if not line.strip():
                continue
            records.append(parse_object(line, str(path), number))
            lines.append(number)
    return JsonRows(str(path), records, np.array(lines, dtype=np.int64))


def parse_object(line: str, file: str, number: int) -> dict[str, Any]:
    """Parse one line that must be a JSON object; raises `TraceError` naming the line."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(file, f"is not valid JSON, perhaps cut off ({error})",
                         row=number) from error  # fmt: skip
    if not isinstance(record, dict):
        raise TraceError(file, "is not a JSON object", row=number)
    return record


def decoded(lines: Iterable[str], file: str) -> Iterator[str]:
    """Yield text lines; raises `TraceError` where the bytes are not UTF-8."""
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise TraceError(file, f"is not UTF-8 text ({error.reason})") from error


def read_csv(
    path: str | os.PathLike[str], columns: Mapping[str, Kind], *, limit: int | None = None
) -> CsvRows:
    """Parse those `columns` of a CSV file that it has, at most `limit` rows.

    Every row must have as many fields as the header, and every value must be of its kind and not
    empty. Raises `TraceError`; row numbers are lines of the file, the header being line 1.
    """
    raw, header = read_csv_bytes(path, limit)
    wanted = {name: kind for name, kind in columns.items() if name in header}
    try:
        table = pacsv.read_csv(
            io.BytesIO(raw),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types={name: _ARROW[kind] for name, kind in wanted.items()},
                include_columns=list(wanted),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        raise _first_bad_value(raw, wanted, str(path)) from error
    if any(table[name].null_count for name in wanted):
        raise _first_bad_value(raw, wanted, str(path))
    return CsvRows(str(path), table, np.arange(2, len(table) + 2, dtype=np.int64))


def read_csv_bytes(path: str | os.PathLike[str], limit: int | None) -> tuple[bytes, list[str]]:
    """Return a CSV file's bytes, to at most `limit` rows, and its header; no rows is an error."""
    require_file(path)
    with Path(path).open("rb") as file:
        raw = file.read() if limit is None else b"".join(islice(file, limit + 1))
    raw = raw.rstrip()  # blank lines at the end are no rows
    if b"\n" not in raw:
        raise TraceError(str(path), "holds no requests")
    return raw, csv_header(raw, str(path))


def csv_header(raw: bytes, file: str) -> list[str]:
    """Return the column names of a CSV file's first line."""
    first = raw.split(b"\n", 1)[0].removeprefix(b"\xef\xbb\xbf").rstrip(b"\r")
    try:
        return next(csv.reader([first.decode()]), [])
    except UnicodeDecodeError as error:
        raise TraceError(file, f"is not UTF-8 text ({error.reason})") from error


def _first_bad_value(raw: bytes, wanted: Mapping[str, Kind], file: str) -> TraceError:
    """Find what Arrow could not convert: it does not say where."""
    lines = raw.decode(errors="replace").removeprefix("\ufeff").splitlines()
    header = next(csv.reader(lines[:1]))
    for number, line in enumerate(lines[1:], start=2):
        fields = next(csv.reader([line]), [])
        if len(fields) != len(header):
            return TraceError(file, f"has {len(fields)} fields, the header has {len(header)}: "
                              f"perhaps cut off", row=number)  # fmt: skip
        for name, kind in wanted.items():
            text = fields[header.index(name)]
            if not text:
                return TraceError(file, "is empty", row=number, column=name)
            if not _is_a(kind, text):
                return TraceError(file, f"{text!r} is not {_WORDS[kind]}", row=number, column=name)
    return TraceError(file, "is not CSV that can be read")


def _is_a(kind: Kind, text: str) -> bool:
    if kind == "str":
        return True
    try:
        return abs(int(text)) < 2**63 if kind == "int" else bool(float(text) + 1)
    except ValueError:
        return False
