"""BurstGPT CSV (HPMLL/BurstGPT), with the session columns of its third release where present.

`Timestamp` is seconds from the first day's midnight; times are counted from the first request
kept. A row with zero response tokens is a failed call: left out, and counted in the notes. With
sessions, a closed loop takes as think time the gap between two turns' times, less the previous
turn's `Elapsed time` where the file has it; without it the whole gap, an upper bound.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from mdi_shared.errors import TraceError
from mdi_traces.columns import Bools, Ints, numbers, texts
from mdi_traces.formats.base import (
    Format,
    Imported,
    Options,
    Turns,
    left_out,
    length_columns,
    think_column,
)
from mdi_traces.formats.rows import NS_PER_S, CsvRows, Kind, read_csv

_COLUMNS: dict[str, Kind] = {
    "Timestamp": "float",
    "Request tokens": "int",
    "Response tokens": "int",
    "Session ID": "str",
    "Elapsed time": "float",
}


def _matches(keys: frozenset[str]) -> bool:
    return keys >= {"Timestamp", "Request tokens", "Response tokens"}


def _read(path: str, options: Options) -> Imported:
    rows = read_csv(path, _COLUMNS, limit=options.limit)
    output = rows.tokens("Response tokens", minimum=0)
    kept = output > 0
    if not kept.any():
        raise TraceError(path, "every row is a failed call (zero response tokens)")
    prompt = rows.tokens("Request tokens", minimum=0)
    rows.refuse(kept & (prompt < 1), "Request tokens", prompt, "must be at least 1 token")
    sent = rows.times_ns("Timestamp", NS_PER_S)
    arrival = (sent - sent[kept].min())[kept]
    columns = length_columns(arrival, prompt[kept], output[kept])
    columns["req_id"] = texts([str(row) for row in np.flatnonzero(kept)])
    if rows.has("Session ID"):
        columns |= _sessions(rows, kept, arrival, options.closed_loop)
    elif options.closed_loop:
        raise TraceError(path, "has no 'Session ID' column, which closed_loop = True needs")
    failed = len(rows) - int(kept.sum())
    return Imported(
        columns=columns,
        lines=rows.lines[kept],
        licence="CC-BY-4.0 (BurstGPT, Wang et al., KDD 2025)",
        notes=left_out(failed, "failed call"),
    )


def _sessions(rows: CsvRows, kept: Bools, arrival: Ints, closed_loop: bool) -> dict[str, Any]:
    """Number the turns of each session in order of time."""
    names = [name for name, keep in zip(rows.texts("Session ID"), kept, strict=True) if keep]
    busy = np.zeros(len(arrival), dtype=np.int64)
    if rows.has("Elapsed time"):
        busy = rows.times_ns("Elapsed time", NS_PER_S)[kept]
    turn = np.zeros(len(arrival), dtype=np.int64)
    think: list[int | None] = [None] * len(arrival)
    turns = Turns()
    for row in np.argsort(arrival, kind="stable").tolist():
        start = int(arrival[row])
        turn[row], think[row] = turns.add(names[row], start, start + int(busy[row]))
    columns = {"session_id": texts(names), "turn": numbers(turn, pa.int32())}
    return columns | ({"think_ns": think_column(think)} if closed_loop else {})


BURSTGPT = Format(
    name="burstgpt",
    kind="csv",
    needs="Timestamp (s), Request tokens, Response tokens, optionally Session ID, Elapsed time (s)",
    matches=_matches,
    read=_read,
    has_sessions=True,
)
