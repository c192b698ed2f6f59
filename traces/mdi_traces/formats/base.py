"""What every format offers, and what every importer hands over.

Read next: `mooncake.py` (a format), `__init__.py` (which format is it?).
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mdi_shared.errors import ConfigError
from mdi_traces.columns import Ints, numbers, texts
from mdi_traces.distributions import ArrivalProcess
from mdi_traces.formats.rows import Rows
from mdi_traces.schema import Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller of `load_requests` asked of a reader.

    `arrivals` and `seed` make times where a file has none; `closed_loop` turns gaps between the
    turns of a session into think times.
    """

    arrivals: ArrivalProcess | None = None
    seed: int = 0
    closed_loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Columns of the request schema as read, and metadata to add.

    `kept` are the 0-based rows of the file that the columns hold, None for all. `metadata`
    replaces what would be made of the other fields; `sort` asks for order of arrival.
    """

    columns: dict[str, Any]
    kept: Ints | None = None
    licence: str | None = None
    hash_block_size: int | None = None
    notes: tuple[str, ...] = ()
    metadata: Metadata | None = None
    sort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format: how it is recognised by the names of its fields, and read."""

    name: str
    needs: str  # for people: the fields it must have
    matches: Callable[[Set[str]], bool]
    read: Callable[[Rows, Options], Imported]
    has_times: bool = True
    no_sessions: str | None = None  # why closed_loop cannot be asked for


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
    """Return the note about what an importer left out; none when there was nothing."""
    return (f"{count} {what}{'s' if count > 1 else ''} left out",) if count else ()


def length_columns(arrival_ns: Ints, prompt: Ints, output: Ints) -> dict[str, Any]:
    """Return the three columns every request has, as Arrow arrays."""
    return {
        "arrival_ns": numbers(arrival_ns, pa.int64()),
        "prompt_len": numbers(prompt, pa.int32()),
        "output_len": numbers(output, pa.int32()),
    }


def session_columns(
    names: Sequence[str | None], turn: Sequence[int | None], think: Sequence[int | None] | None
) -> dict[str, Any]:
    """Return sessions, turns and think times (None: an open loop) as Arrow arrays."""
    columns = {"session_id": texts(names), "turn": _nullable(turn, pa.int32())}
    return columns | ({} if think is None else {"think_ns": _nullable(think, pa.int64())})


def require_sessions(rows: Rows, name: str, options: Options) -> bool:
    """Say whether the file has sessions. Raises `ConfigError` when a closed loop needs them."""
    if options.closed_loop and not rows.has(name):
        raise ConfigError("closed_loop", True, f"{rows.file} records no sessions: it has no "
                          f"column {name!r}")  # fmt: skip
    return rows.has(name)


def _nullable(cells: Sequence[int | None], dtype: pa.DataType) -> pa.Array:
    valid = np.array([cell is not None for cell in cells], dtype=bool)
    return numbers(np.array([cell or 0 for cell in cells], dtype=np.int64), dtype, valid)
