"""Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon): chats of a production service.

`timestamp` is seconds. A session is a chain of chats: `parent_chat_id` names the chat before, -1
the first; a chat whose parent is not in the file starts there. `turn` is numbered anew from 0 in
order of time, parents before children, because parts of chains are missing. `hash_ids` are one id
per 16 prompt tokens. When a turn was answered is not recorded: a closed loop takes the whole gap
between two turns as think time, an upper bound.
"""

from collections.abc import Set

import numpy as np

from mdi_traces.columns import int_lists, texts
from mdi_traces.formats.base import (
    Format,
    Imported,
    Options,
    Turns,
    length_columns,
    session_columns,
)
from mdi_traces.formats.rows import NS_PER_S, Rows

BLOCK_TOKENS = 16
_FIRST = "-1"  # parent of a chat that starts a session


def _matches(names: Set[str]) -> bool:
    return names >= {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"}


def _read(rows: Rows, options: Options) -> Imported:
    arrival = rows.times_ns("timestamp", NS_PER_S)
    columns = length_columns(arrival, rows.tokens("input_length"), rows.tokens("output_length"))
    chats, parents = rows.texts("chat_id"), rows.texts("parent_chat_id")
    columns["req_id"] = texts(chats)
    sessions, depths = _chains(rows, chats, parents)
    turn: list[int | None] = [None] * len(rows)
    think: list[int | None] = [None] * len(rows)
    turns = Turns()
    for row in np.lexsort((np.array(depths), arrival)).tolist():
        time = int(arrival[row])
        turn[row], think[row] = turns.add(sessions[row], time, time)
    columns |= session_columns(sessions, turn, think if options.closed_loop else None)
    hash_ids = rows.some_int_lists("hash_ids")
    hashed = any(ids is not None for ids in hash_ids)
    return Imported(
        columns=columns | ({"hash_ids": int_lists(hash_ids)} if hashed else {}),
        licence="Apache-2.0 (Qwen-Bailian, Wang et al., USENIX ATC 2025)",
        hash_block_size=BLOCK_TOKENS if hashed else None,
    )


def _chains(rows: Rows, chats: list[str], parents: list[str]) -> tuple[list[str], list[int]]:
    """Return each chat's session and its place in the chain.

    A session is named after the first chat of its chain, even one outside the file.
    """
    parent_of = dict(zip(chats, parents, strict=True))
    if len(parent_of) < len(chats):
        row = next(row for row, chat in enumerate(chats) if chat in chats[:row])
        rows.fail(row, "chat_id", f"{chats[row]!r} is also the id of an earlier chat")
    known: dict[str, tuple[str, int]] = {}
    for row, start in enumerate(chats):
        path: dict[str, None] = {}
        chat = start
        while chat not in known and chat in parent_of and parent_of[chat] != _FIRST:
            if chat in path:
                rows.fail(row, "parent_chat_id", f"chat {start} comes after itself")
            path[chat] = None
            chat = parent_of[chat]
        root, depth = known.setdefault(chat, (chat, 0))
        for distance, each in enumerate(reversed(path), start=1):
            known[each] = (root, depth + distance)
    return [known[chat][0] for chat in chats], [known[chat][1] for chat in chats]


BAILIAN = Format(
    name="bailian",
    needs="chat_id, parent_chat_id, timestamp (s), input_length, output_length, "
    "optionally hash_ids",
    matches=_matches,
    read=_read,
)
