"""Qwen-Bailian JSONL (alibaba-edu/qwen-bailian-usagetraces-anon): chats of a production service.

`timestamp` is seconds from the trace's start. A session is a chain of chats: `parent_chat_id`
names the chat before, -1 the first; a chat whose parent is not in the file starts there. `turn` is
numbered anew from 0 in order of time, because parts of chains are missing. `hash_ids` are one id
per 16 prompt tokens. When a turn was answered is not recorded: a closed loop takes the whole gap
between two turns as think time, an upper bound.
"""

import numpy as np
import pyarrow as pa

from mdi_traces.columns import Ints, int_lists, numbers, texts
from mdi_traces.formats.base import Format, Imported, Options, Turns, length_columns, think_column
from mdi_traces.formats.rows import NS_PER_S, JsonRows, read_jsonl

BLOCK_TOKENS = 16
_FIRST = -1  # parent of a chat that starts a session


def _matches(keys: frozenset[str]) -> bool:
    return keys >= {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"}


def _read(path: str, options: Options) -> Imported:
    rows = read_jsonl(path, options.limit)
    arrival = rows.times_ns("timestamp", NS_PER_S)
    columns = length_columns(arrival, rows.tokens("input_length"), rows.tokens("output_length"))
    columns["req_id"] = texts([str(chat) for chat in rows.ints("chat_id").tolist()])
    order = np.argsort(arrival, kind="stable")
    sessions = _sessions(rows, order)
    turn = np.zeros(len(rows), dtype=np.int64)
    think: list[int | None] = [None] * len(rows)
    turns = Turns()
    for row in order.tolist():
        turn[row], think[row] = turns.add(sessions[row], int(arrival[row]), int(arrival[row]))
    columns["session_id"] = texts(sessions)
    columns["turn"] = numbers(turn, pa.int32())
    if options.closed_loop:
        columns["think_ns"] = think_column(think)
    hashed = rows.has("hash_ids")
    if hashed:
        columns["hash_ids"] = int_lists(rows.int_lists("hash_ids"))
    return Imported(
        columns=columns,
        lines=rows.lines,
        licence="Apache-2.0 (Qwen-Bailian, Wang et al., USENIX ATC 2025)",
        hash_block_size=BLOCK_TOKENS if hashed else None,
    )


def _sessions(rows: JsonRows, order: Ints) -> list[str]:
    """Name each chat's session after the first chat of its chain, even one outside the file."""
    chats, parents = rows.ints("chat_id").tolist(), rows.ints("parent_chat_id").tolist()
    root: dict[int, int] = {}
    for row in order.tolist():
        chat, parent = chats[row], parents[row]
        root[chat] = chat if parent == _FIRST else root.get(parent, parent)
    return [str(root[chat]) for chat in chats]


BAILIAN = Format(
    name="bailian",
    kind="jsonl",
    needs="chat_id, parent_chat_id, timestamp (s), input_length, output_length, "
    "optionally hash_ids",
    matches=_matches,
    read=_read,
    has_sessions=True,
)
