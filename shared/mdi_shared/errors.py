"""What can go wrong by a caller's hand. Broken invariants are `assert`s and live where they hold.

Every message is one line that names the thing, its value and what is allowed; the command line
prints it as it is.
"""

from collections.abc import Sequence


class MiniDeepInferError(Exception):
    """Base of every mistake a caller can make and mend."""


class ConfigError(MiniDeepInferError):
    """An option is unknown, out of range, or contradicts another one."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class TraceError(MiniDeepInferError):
    """A trace file cannot be used; the message names file, row and column where they are known."""

    def __init__(
        self, file: str, problem: str, *, row: int | None = None, column: str | None = None
    ) -> None:
        where = file
        if row is not None:
            where += f", row {row}"
        if column is not None:
            where += f", column {column!r}"
        super().__init__(f"{where}: {problem}")
        self.file = file
        self.row = row
        self.column = column


class DeadlockError(MiniDeepInferError):
    """No step can ever change anything again; the message names who holds the blocks."""

    def __init__(self, reason: str, holders: Sequence[tuple[str, int]]) -> None:
        held = ", ".join(f"{req_id} ({blocks} blocks)" for req_id, blocks in holders) or "nobody"
        super().__init__(f"deadlock: {reason}; blocks are held by: {held}")
        self.holders = tuple(holders)
