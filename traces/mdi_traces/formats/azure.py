"""Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset), CSV.

`TIMESTAMP` is wall-clock time with up to nine fractional digits, without a zone (2023) or with one
such as +00:00 (2024); a file keeps to one of the two. Times are counted from the first request.
There are no sessions and no prefix ids.
"""

from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from mdi_traces.columns import Ints, ints
from mdi_traces.formats.base import Format, Imported, Options, length_columns
from mdi_traces.formats.rows import CsvRows, Kind, read_csv

_COLUMNS: dict[str, Kind] = {"TIMESTAMP": "str", "ContextTokens": "int", "GeneratedTokens": "int"}


def _matches(keys: frozenset[str]) -> bool:
    return keys >= _COLUMNS.keys()


def _read(path: str, options: Options) -> Imported:
    rows = read_csv(path, _COLUMNS, limit=options.limit)
    prompt, output = rows.tokens("ContextTokens"), rows.tokens("GeneratedTokens")
    times = _times_ns(rows)
    return Imported(
        columns=length_columns(times - times.min(), prompt, output),
        lines=rows.lines,
        licence="CC-BY-4.0 (Azure Public Dataset: 2023 Patel et al., ISCA 2024; "
        "2024 Stojkovic et al., HPCA 2025)",
    )


def _times_ns(rows: CsvRows) -> Ints:
    """Parse all times at once; the first row says whether the file gives zones."""
    column = rows.table["TIMESTAMP"]
    zoned = _zoned(column[0].as_py())
    try:
        stamps = pc.cast(column, pa.timestamp("ns", tz="UTC" if zoned else None))
    except pa.ArrowInvalid:
        for row, text in enumerate(column.to_pylist()):
            _require_time(rows, row, text, zoned)
        raise
    return ints(stamps.cast(pa.int64()))


def _zoned(text: str) -> bool:
    clock = text[10:]
    return clock.endswith("Z") or "+" in clock or "-" in clock


def _require_time(rows: CsvRows, row: int, text: str, zoned: bool) -> None:
    try:
        datetime.fromisoformat(text[:19])
    except ValueError:
        rows.fail(row, "TIMESTAMP", f"{text!r} is not a time like 2023-11-16 18:17:03.9799600")
    if _zoned(text) != zoned:
        here, first = ("no zone", "has one") if zoned else ("a zone", "has none")
        rows.fail(row, "TIMESTAMP", f"{text!r} has {here}, but the first row {first}")
    try:
        pa.scalar(text).cast(pa.timestamp("ns", tz="UTC" if zoned else None))
    except pa.ArrowInvalid:
        rows.fail(row, "TIMESTAMP", f"{text!r} is not a time like 2023-11-16 18:17:03.9799600")


AZURE = Format(
    name="azure",
    kind="csv",
    needs="TIMESTAMP, ContextTokens, GeneratedTokens",
    matches=_matches,
    read=_read,
)
