"""What can go wrong by a caller's hand. Broken invariants are `assert`s and live where they hold.

Every message is one line that names the thing, its value and what is allowed; the command line
prints it as it is. An error's `args` are those of its constructor, so that it survives being
rebuilt in another process or by an event loop.
"""

from collections.abc import Iterable, Sequence
from typing import TypeGuard

MOST_SHOWN = 300  # characters of a value
MOST_SEED = 2**64 - 1  # as files hold it
Rule = tuple[str, bool, str]  # a field, whether its value is allowed, and what is allowed


class MiniDeepInferError(Exception):
    """Base of every mistake a caller can make and mend."""

    @property
    def message(self) -> str:
        """The one line to show."""
        return " ".join(str(arg) for arg in self.args)

    def __str__(self) -> str:
        return self.message


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python's limit on digits, a list inside itself
        text = f"a {type(value).__name__} too large to show"
    except Exception:  # noqa: BLE001 - an object of the caller's, whose own code this is
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; empty where it says nothing."""
    return (str(error).strip().splitlines() or [""])[0]


def raised(error: BaseException) -> str:
    """Say in one line what somebody else's code raised."""
    return f"raised {type(error).__name__}: {' '.join(str(error).split())}"


class ConfigError(MiniDeepInferError):
    """An option is unknown, out of range, or contradicts another one."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    @property
    def message(self) -> str:
        return f"{self.field} = {_shown(self.value)}: {self.allowed}"


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` unless `holds`."""
    if not holds:
        raise ConfigError(field, value, allowed)


def require_int(field: str, value: object, least: int, most: int | None = None) -> None:
    """Raise `ConfigError` unless `value` is an int, no bool, of `least` up to `most`."""
    holds = type(value) is int and least <= value and (most is None or value <= most)
    start = "must be" if type(value) is int else "must be an int,"
    end = "" if most is None else f", at most {most:,}"
    require(holds, field, value, f"{start} at least {least}{end}")


def require_number(field: str, value: object, most: float, *, above_zero: bool = False) -> None:
    """Raise `ConfigError` unless `value` is a number, no bool, from 0 (or above it) to `most`."""
    holds = is_number(value) and 0 <= value <= most and not (above_zero and value == 0)
    start = "a finite number above 0" if above_zero else "a finite number of at least 0"
    require(holds, field, value, f"must be {start}, at most {most:g}")


def is_number(value: object) -> TypeGuard[float]:
    """Say whether `value` is an int or a float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_rules(owner: object, rules: Iterable[Rule]) -> None:
    """Raise `ConfigError` for the first of `owner`'s fields whose rule does not hold."""
    for field, holds, allowed in rules:
        require(holds, field, getattr(owner, field), allowed)


class TraceError(MiniDeepInferError):
    """A trace file cannot be used; the message names file, row and column where they are known."""

    def __init__(
        self, file: str, problem: str, row: int | None = None, column: str | None = None
    ) -> None:
        super().__init__(file, problem, row, column)
        self.file = file
        self.problem = problem
        self.row = row
        self.column = column

    @property
    def message(self) -> str:
        row = f", row {self.row}" if self.row is not None else ""
        column = f", column {self.column!r}" if self.column is not None else ""
        return f"{self.file}{row}{column}: {self.problem}"


class SaveError(MiniDeepInferError):
    """A file cannot be written; what was there before is as it was."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(file, problem)
        self.file = file
        self.problem = problem

    @property
    def message(self) -> str:
        return f"{self.file}: {self.problem}"


class DeadlockError(MiniDeepInferError):
    """No step can ever change anything again; the message names who holds the blocks.

    `holders` are requests that wait, `leaked` those that ended and whose blocks were not returned,
    as (request id, blocks).
    """

    def __init__(
        self,
        reason: str,
        holders: Sequence[tuple[str, int]],
        leaked: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(reason, tuple(holders), tuple(leaked))
        self.reason = reason
        self.holders = tuple(holders)
        self.leaked = tuple(leaked)

    @property
    def message(self) -> str:
        held = ", ".join(f"{req_id} ({blocks} blocks)" for req_id, blocks in self.holders)
        lost = ", ".join(f"{req_id} ({blocks} blocks)" for req_id, blocks in self.leaked)
        end = f"; lost when these were aborted: {lost}" if lost else ""
        return f"deadlock: {self.reason}; blocks are held by: {held or 'nobody'}{end}"


class PolicyError(MiniDeepInferError):
    """A scheduling policy broke a rule of its interface, or raised."""

    def __init__(self, policy: str, hook: str, req_id: str, problem: str) -> None:
        super().__init__(policy, hook, req_id, problem)
        self.policy = policy
        self.hook = hook
        self.req_id = req_id
        self.problem = problem

    @property
    def message(self) -> str:
        about = f" for request {self.req_id!r}" if self.req_id else ""
        return f"policy {self.policy}: {self.hook}{about} {self.problem}"


class PlacementError(MiniDeepInferError):
    """A placement named a rank that does not exist, or raised."""

    def __init__(self, placement: str, req_id: str, problem: str) -> None:
        super().__init__(placement, req_id, problem)
        self.placement = placement
        self.req_id = req_id
        self.problem = problem

    @property
    def message(self) -> str:
        return f"placement {self.placement}: place for request {self.req_id!r} {self.problem}"


class UpstreamCheckError(MiniDeepInferError):
    """The production engine would end here by a check of its own; in `strict_upstream` only."""
