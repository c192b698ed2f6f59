"""BurstGPT (HPMLL/BurstGPT), with the session columns of its third release where present.

`Timestamp` is seconds. A row with zero response tokens is a failed call: left out, and counted in
the notes. Most rows of the third release have no session: they stay without one. A closed loop
takes as think time the gap between two turns' times, less the previous turn's `Elapsed time`
where the file has it; without it the whole gap, an upper bound.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from mdi_shared.errors import TraceError
from mdi_traces.columns import Ints, texts
from mdi_traces.formats.base import (
    Format,
    Imported,
    Options,
    Turns,
    left_out,
    length_columns,
    require_sessions,
    session_columns,
)
from mdi_traces.formats.rows import NS_PER_S, Rows


def _matches(names: Set[str]) -> bool:
    return names >= {"Timestamp", "Request tokens", "Response tokens"}


def _read(rows: Rows, options: Options) -> Imported:
    output = rows.tokens("Response tokens", minimum=0)
    kept = output > 0
    if not kept.any():
        raise TraceError(rows.file, "every row is a failed call (zero response tokens)")
    prompt = rows.tokens("Request tokens", minimum=0)
    rows.refuse(kept & (prompt < 1), "Request tokens", prompt, "must be at least 1 token")
    sent = rows.times_ns("Timestamp", NS_PER_S)
    index = np.flatnonzero(kept)
    columns = length_columns(sent[kept], prompt[kept], output[kept])
    columns["req_id"] = texts([str(row) for row in index.tolist()])
    if require_sessions(rows, "Session ID", options):
        columns |= _sessions(rows, index, sent, options.closed_loop)
    return Imported(
        columns=columns,
        kept=index,
        licence="CC-BY-4.0 (BurstGPT, Wang et al., KDD 2025)",
        notes=left_out(len(rows) - len(index), "failed call"),
    )


def _sessions(rows: Rows, kept: Ints, sent: Ints, closed_loop: bool) -> dict[str, Any]:
    """Number the turns of each session in order of time."""
    names = rows.some_texts("Session ID")
    busy, _ = rows.some_times_ns("Elapsed time", NS_PER_S)  # 0 where it is not known
    turn: list[int | None] = [None] * len(rows)
    think: list[int | None] = [None] * len(rows)
    turns = Turns()
    for row in kept[np.argsort(sent[kept], kind="stable")].tolist():
        name, start = names[row], int(sent[row])
        if name:
            turn[row], think[row] = turns.add(name, start, start + int(busy[row]))
    order = kept.tolist()
    return session_columns(
        [names[row] or None for row in order],
        [turn[row] for row in order],
        [think[row] for row in order] if closed_loop else None,
    )


BURSTGPT = Format(
    name="burstgpt",
    needs="Timestamp (s), Request tokens, Response tokens, optionally Session ID, Elapsed time (s)",
    matches=_matches,
    read=_read,
)
