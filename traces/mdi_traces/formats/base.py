"""What every format offers, and what every importer hands over.

Read next: `mooncake.py` (the shortest format), `__init__.py` (which format is it?).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mdi_traces.columns import Ints, numbers
from mdi_traces.distributions import ArrivalProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller of `load_requests` asked of a reader.

    `limit` rows are read at most; `arrivals` and `seed` make times where a file has none;
    `closed_loop` turns gaps between the turns of a session into think times.
    """

    limit: int | None = None
    arrivals: ArrivalProcess | None = None
    seed: int = 0
    closed_loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Columns of the request schema as read, the line of each row, and metadata to add."""

    columns: dict[str, Any]
    lines: Ints
    licence: str | None = None
    hash_block_size: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One foreign format: how it is recognised and read.

    `matches` gets the keys of a JSONL file's first object, or the names of a CSV header.
    """

    name: str
    kind: str  # jsonl | csv
    needs: str  # for people: the fields it must have
    matches: Callable[[frozenset[str]], bool]
    read: Callable[[str, Options], Imported]
    has_times: bool = True
    has_sessions: bool = False


@dataclass(slots=True)
class Turns:
    """Session, turn and think time of each row, built in order of time.

    `ended_ns` is when the previous turn of the session is known to have ended, or was sent, where
    the end is not known.
    """

    ended_ns: dict[str, int] = field(default_factory=dict)
    next_turn: dict[str, int] = field(default_factory=dict)

    def add(self, session: str, arrival_ns: int, ended_ns: int) -> tuple[int, int | None]:
        """Return (turn, think_ns) of the session's next turn; a first turn has no think time."""
        turn = self.next_turn.get(session, 0)
        think = None if turn == 0 else max(0, arrival_ns - self.ended_ns[session])
        self.next_turn[session] = turn + 1
        self.ended_ns[session] = ended_ns
        return turn, think


def left_out(count: int, what: str) -> tuple[str, ...]:
    """Return the note about rows an importer left out; none when there were none."""
    return (f"{count} {what}{'s' if count > 1 else ''} left out",) if count else ()


def length_columns(arrival_ns: Ints, prompt: Ints, output: Ints) -> dict[str, Any]:
    """Return the three columns every request has, as Arrow arrays."""
    return {
        "arrival_ns": numbers(arrival_ns, pa.int64()),
        "prompt_len": numbers(prompt, pa.int32()),
        "output_len": numbers(output, pa.int32()),
    }


def think_column(values: list[int | None]) -> pa.Array:
    """Return think times as an Arrow column; None is null."""
    valid = np.array([value is not None for value in values], dtype=bool)
    return numbers(np.array([value or 0 for value in values]), pa.int64(), valid)
