"""Mooncake (kvcache-ai/Mooncake, FAST'25 release): lengths, times and prefix block ids.

`timestamp` is milliseconds, coarse, so that many requests share one. `hash_ids` are one id per 512
prompt tokens, the last block possibly partial; rows may lack them. They are kept as they are, and
no prefix hit is computed here: that depends on the cache being studied.

Benchmark tools add `session_id` and `delay`, the milliseconds from the end of the turn before:
the think time of a closed loop. Where a later turn has no delay, it is the gap between the two
times, an upper bound. A turn with a delay may lack its time; it can only be sent in a closed loop.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from mdi_traces.columns import Bools, Ints, int_lists
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
from mdi_traces.formats.rows import NS_PER_MS, Rows

BLOCK_TOKENS = 512


def _matches(names: Set[str]) -> bool:
    return names >= {"timestamp", "input_length", "output_length"} and "chat_id" not in names


def _read(rows: Rows, options: Options) -> Imported:
    prompt, output = rows.tokens("input_length"), rows.tokens("output_length")
    arrival, known = rows.some_times_ns("timestamp", NS_PER_MS)
    sessions: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if require_sessions(rows, "session_id", options):
        sessions, notes = _sessions(rows, arrival, known, options.closed_loop)
    rows.required("timestamp", (arrival, known))
    hash_ids = rows.some_int_lists("hash_ids")
    hashed = any(ids is not None for ids in hash_ids)
    return Imported(
        columns=length_columns(arrival, prompt, output)
        | sessions
        | ({"hash_ids": int_lists(hash_ids)} if hashed else {}),
        licence="Apache-2.0 (Mooncake, Qin et al., FAST 2025)",
        hash_block_size=BLOCK_TOKENS if hashed else None,
        notes=notes,
    )


def _sessions(
    rows: Rows, arrival: Ints, known: Bools, closed_loop: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Number the turns; in a closed loop, times that are missing are filled in from delays."""
    names = rows.some_texts("session_id")
    delay, delayed = rows.some_times_ns("delay", NS_PER_MS)
    turns = Turns()
    turn: list[int | None] = [None] * len(rows)
    think: list[int | None] = [None] * len(rows)
    order = np.argsort(arrival, kind="stable") if known.all() else np.arange(len(rows))
    for row in order.tolist():
        name = names[row] = names[row] or None
        if name is None:
            continue
        if closed_loop and delayed[row] and not known[row] and name in turns.ended_ns:
            arrival[row], known[row] = turns.ended_ns[name] + delay[row], True
        turn[row], think[row] = turns.add(name, int(arrival[row]), int(arrival[row]))
        if think[row] is not None and delayed[row]:
            think[row] = int(delay[row])
    if not closed_loop:
        return session_columns(names, turn, None), ()
    idle = sum(some and pause is None for some, pause in zip(delayed.tolist(), think, strict=True))
    return session_columns(names, turn, think), left_out(idle, "first delay")


MOONCAKE = Format(
    name="mooncake",
    needs="timestamp (ms), input_length, output_length, optionally hash_ids, session_id, "
    "delay (ms)",
    matches=_matches,
    read=_read,
)
