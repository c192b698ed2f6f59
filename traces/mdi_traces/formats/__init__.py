"""Request traces from files: which format is it, and read it.

A format is recognised by the names of its fields, never by the file's name. There is one module
per format; nothing here knows a format's fields. Files may be CSV, JSON or Parquet, plain or
packed, one or many: `files.py` and `containers.py` see to that.

Read next: `base.py` (what a format offers), `mooncake.py` (one of them), docs/trace-format.md.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.columns import Ints, codes, ints, numbers
from mdi_traces.distributions import ArrivalProcess
from mdi_traces.formats.azure import AZURE
from mdi_traces.formats.bailian import BAILIAN
from mdi_traces.formats.base import Format, Imported, Options
from mdi_traces.formats.burstgpt import BURSTGPT
from mdi_traces.formats.containers import read_parts
from mdi_traces.formats.files import PathLike
from mdi_traces.formats.lengths import LENGTHS
from mdi_traces.formats.mooncake import MOONCAKE
from mdi_traces.formats.own import OWN
from mdi_traces.formats.rows import Rows
from mdi_traces.formats.tracelab import TRACELAB
from mdi_traces.pacing import retime
from mdi_traces.requests import RequestTrace, build_requests, put_column, validate_requests
from mdi_traces.schema import REQUESTS, Metadata

__all__ = ["FORMATS", "FORMAT_NAMES", "detect_format", "load_requests"]

FORMATS: dict[str, Format] = {
    each.name: each for each in (MOONCAKE, AZURE, BURSTGPT, BAILIAN, LENGTHS, TRACELAB, OWN)
}
FORMAT_NAMES = tuple(FORMATS)
# Data sets whose rows hold no lengths in tokens, by a field that only they have.
_NOT_READ = {
    "conversations": "conversations as text (ShareGPT)",
    "conversation": "conversations as text (LMSYS, WildChat)",
    "messages": "chats as text",
    "text_input": "prompts as text",
    "prompt": "prompts as text",
    "sub_requests": "agentic sessions of LLMServingSim",
}
_LOOKED_AT = 100  # rows that tell the format


def load_requests(
    path: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    limit: int | None = None,
    sort: bool = False,
    arrivals: ArrivalProcess | None = None,
    rate: float | None = None,
    seed: int = 0,
    closed_loop: bool = False,
) -> RequestTrace:
    """Read a request trace in any known format, checked row by row.

    `path` is a file, a pipe, a folder of files, or a list of these, which together are one trace
    on one clock. `format` is one of FORMAT_NAMES, or None to recognise it. `limit` reads the first
    rows only. `sort` orders rows by arrival (ties stay in file order); without it, rows out of
    order are an error. `arrivals` and `seed` make the times of a file that has none, and replace
    those of another, as `rate` (requests per second) does: see `retime`; a note says so.
    `closed_loop` turns the recorded gaps inside sessions into think times. Times count from the
    first request.

    Raises `TraceError` naming file, line and field, and `ConfigError` for options that the
    format cannot honour.
    """
    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "must be at least 1 row")
    if arrivals is not None and rate is not None:
        raise ConfigError("rate", rate, "cannot be given together with arrivals")
    if format is not None and format not in FORMATS:
        raise ConfigError("format", format, f"must be one of {', '.join(FORMAT_NAMES)}")
    rows = _rows(path, limit)
    known = FORMATS[format] if format else _recognised(rows)
    if len(rows) == 0:
        raise TraceError(rows.file, "holds no requests")
    if closed_loop and known.no_sessions:
        raise ConfigError("closed_loop", True, f"format {known.name!r} {known.no_sessions}")
    makes = None if known.has_times else arrivals
    imported = known.read(rows, Options(arrivals=makes, seed=seed, closed_loop=closed_loop))
    trace = _assembled(known.name, imported, seed if makes else None)
    trace, order = _ordered(_from_zero(trace), by_time=sort or imported.sort)
    kept = order if imported.kept is None else imported.kept[order]
    validate_requests(trace.table, rows.file, place=lambda row: rows.place(int(kept[row])))
    replaces = arrivals if known.has_times else None
    if replaces is None and rate is None:
        return trace
    return retime(trace, process=replaces, rate=rate, seed=seed)


def detect_format(path: PathLike) -> str:
    """Return the name of the file's format; raises `TraceError` listing the known ones."""
    return _recognised(_rows(path, _LOOKED_AT)).name


def _rows(path: PathLike | Sequence[PathLike], limit: int | None) -> Rows:
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise ConfigError("path", paths, "names no file")
    return Rows(", ".join(map(str, paths)), read_parts(paths, limit))


def _recognised(rows: Rows) -> Format:
    """Return the one format that every file is in."""
    found: Format | None = None
    for part in rows.parts:
        names = frozenset(part.names)
        if not names and part.header is None:
            continue  # an empty JSON array
        known = OWN if part.header is not None else next(
            (each for each in FORMATS.values() if each.matches(names)), None
        )  # fmt: skip
        if known is None:
            raise TraceError(part.file, _unknown(names))
        if found is not None and known is not found:
            raise TraceError(part.file, f"is in format {known.name!r}, but {rows.parts[0].file} is "
                             f"in {found.name!r}: together they are no trace")  # fmt: skip
        found = known
    if found is None:
        raise TraceError(rows.file, "holds no requests")
    return found


def _unknown(names: frozenset[str]) -> str:
    for name, what in _NOT_READ.items():
        if name in names:
            return (f"holds {what}, which is not read: a trace needs the lengths of prompt and "
                    "output in tokens")  # fmt: skip
    known = "; ".join(f"{each.name} needs {each.needs}" for each in FORMATS.values())
    fields = ascii(", ".join(sorted(names)))[1:201].strip("'") or "nothing"
    return f"is in no known format; its fields are {fields}. Known: {known}"


def _assembled(name: str, imported: Imported, seed: int | None) -> RequestTrace:
    metadata = imported.metadata or Metadata(
        table=REQUESTS,
        source="import",
        config={"format": name},
        seed=seed,
        licence=imported.licence,
        hash_block_size=imported.hash_block_size,
        notes=imported.notes,
    )
    return build_requests(imported.columns, metadata)


def _from_zero(trace: RequestTrace) -> RequestTrace:
    arrival = ints(trace.table["arrival_ns"])
    if arrival.min() == 0:
        return trace
    since_first = numbers(arrival - arrival.min(), pa.int64())
    return replace(trace, table=put_column(trace.table, "arrival_ns", since_first))


def _ordered(trace: RequestTrace, *, by_time: bool) -> tuple[RequestTrace, Ints]:
    """Return the trace in order, and which row each came from.

    Turns of a session that arrive at the same time are put in order of turn, in the places that
    they have; otherwise rows of equal time stay in file order.
    """
    table = trace.table
    arrival, turn = ints(table["arrival_ns"]), ints(table["turn"], null=-1)
    session = codes(table["session_id"])[0]
    order = np.argsort(arrival, kind="stable") if by_time else np.arange(len(trace))
    keys = arrival[order], session[order]
    placed = order.copy()
    placed[np.lexsort(keys)] = order[np.lexsort((np.where(keys[1] < 0, -1, turn[order]), *keys))]
    if (placed == np.arange(len(trace))).all():
        return trace, placed
    return replace(trace, table=table.take(numbers(placed, pa.int64()))), placed
