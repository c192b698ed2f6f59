"""Request traces from files: which format is it, and read it.

A format is recognised by its content, the keys of a JSONL file's first object or a CSV header,
never by its name alone. There is one module per format; nothing here knows a format's fields.

Read next: `base.py` (what a format offers), `mooncake.py` (the shortest), docs/trace-format.md.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.columns import Ints, ints, numbers
from mdi_traces.distributions import ArrivalProcess
from mdi_traces.formats import own
from mdi_traces.formats.azure import AZURE
from mdi_traces.formats.bailian import BAILIAN
from mdi_traces.formats.base import Format, Imported, Options
from mdi_traces.formats.burstgpt import BURSTGPT
from mdi_traces.formats.lengths import LENGTHS
from mdi_traces.formats.mooncake import MOONCAKE
from mdi_traces.formats.rows import csv_header, parse_object
from mdi_traces.formats.tracelab import TRACELAB
from mdi_traces.io import require_file
from mdi_traces.requests import RequestTrace, build_requests, validate_requests
from mdi_traces.schema import REQUESTS, Metadata

__all__ = ["FORMATS", "FORMAT_NAMES", "detect_format", "load_requests"]

FORMATS: dict[str, Format] = {
    each.name: each for each in (MOONCAKE, AZURE, BURSTGPT, BAILIAN, LENGTHS, TRACELAB)
}
FORMAT_NAMES = (*FORMATS, "own")


def load_requests(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    limit: int | None = None,
    sort: bool = False,
    arrivals: ArrivalProcess | None = None,
    seed: int = 0,
    closed_loop: bool = False,
) -> RequestTrace:
    """Read a request trace in any known format, checked row by row.

    `format` is one of FORMAT_NAMES, or None to recognise it. `limit` reads the file's first rows
    only. `sort` orders rows by arrival (ties stay in file order); without it, rows out of order
    are an error. `arrivals` and `seed` make the times of a file that has none. `closed_loop`
    turns the recorded gaps inside sessions into think times.

    Raises `TraceError` naming file, line and field, and `ConfigError` for options that the
    format cannot honour.
    """
    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "must be at least 1 row")
    if format is not None and format not in FORMAT_NAMES:
        raise ConfigError("format", format, f"must be one of {', '.join(FORMAT_NAMES)}")
    name = format or detect_format(path)
    if name == "own":
        _refuse_options(name, arrivals=arrivals, closed_loop=closed_loop)
        trace, lines = _read_own(path, limit)
    else:
        known = FORMATS[name]
        _refuse_options(
            name,
            arrivals=arrivals if known.has_times else None,
            closed_loop=closed_loop and not known.has_sessions,
        )
        options = Options(limit=limit, arrivals=arrivals, seed=seed, closed_loop=closed_loop)
        imported = known.read(str(path), options)
        trace, lines = _assemble(name, imported, seed if arrivals else None), imported.lines
    if sort:
        trace, lines = _sorted(trace, lines)
    validate_requests(trace.table, str(path), lines=lines)
    return trace


def detect_format(path: str | os.PathLike[str]) -> str:
    """Return the name of the file's format; raises `TraceError` listing the known ones."""
    require_file(path)
    file = str(path)
    first = _first_line(path)
    if first.startswith(b"PAR1"):
        return "own"
    keys, kind = _first_keys(first, file)
    for each in FORMATS.values():
        if each.kind == kind and each.matches(keys):
            return each.name
    if own.matches(keys):
        return "own"
    known = "; ".join(f"{each.name} ({each.kind.upper()}) needs {each.needs}"
                      for each in FORMATS.values())  # fmt: skip
    found = ", ".join(sorted(keys))[:200] or "nothing"
    raise TraceError(file, f"is in no known format; its first line has {found}. Known: {known}; "
                     f"own (Parquet, JSONL, CSV) needs {own.NEEDS}")  # fmt: skip


def _first_line(path: str | os.PathLike[str]) -> bytes:
    """Return the first line that is not blank, or the magic bytes of a Parquet file."""
    with Path(path).open("rb") as binary:
        magic = binary.read(4)
        if magic == b"PAR1":
            return magic
        binary.seek(0)
        return next((line for line in binary if line.strip()), b"")


def _first_keys(first: bytes, file: str) -> tuple[frozenset[str], str]:
    if not first.startswith(b"{"):
        return frozenset(csv_header(first, file)), "csv"
    return frozenset(parse_object(first.decode(errors="replace"), file, 1)), "jsonl"


def _read_own(path: str | os.PathLike[str], limit: int | None) -> own.Loaded:
    require_file(path)
    first = _first_line(path)
    if first.startswith(b"PAR1"):
        return own.read_own_parquet(path, limit)
    return (own.read_own_jsonl if first.startswith(b"{") else own.read_own_csv)(path, limit)


def _refuse_options(name: str, *, arrivals: ArrivalProcess | None, closed_loop: bool) -> None:
    if arrivals is not None:
        raise ConfigError("arrivals", arrivals, f"format {name!r} has arrival times of its own")
    if closed_loop:
        why = "keeps its own think times" if name == "own" else "records no sessions"
        raise ConfigError("closed_loop", closed_loop, f"format {name!r} {why}")


def _assemble(name: str, imported: Imported, seed: int | None) -> RequestTrace:
    metadata = Metadata(
        table=REQUESTS,
        source="import",
        config={"format": name},
        seed=seed,
        licence=imported.licence,
        hash_block_size=imported.hash_block_size,
        notes=imported.notes,
    )
    return build_requests(imported.columns, metadata)


def _sorted(trace: RequestTrace, lines: Ints) -> tuple[RequestTrace, Ints]:
    order = np.argsort(ints(trace.table["arrival_ns"]), kind="stable")
    return replace(trace, table=trace.table.take(numbers(order, pa.int64()))), lines[order]
