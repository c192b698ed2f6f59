"""When a data-parallel group may prefill, and how its ranks agree on it (docs/rules.md, R6).

A step is prefill or decode for the whole group. Each rank casts a ballot; the driver carries the
ballots between ranks and applies `decide`. Nothing here communicates.
"""

from collections.abc import Iterable
from typing import NamedTuple

NONE, ALL, ANY = "none", "all", "any"


class Ballot(NamedTuple):
    """One rank's part in a decision: the rule in force and what the rank wants."""

    rule: str
    want: bool


def rule_at(decode_step: int, attempt_interval: int, any_interval: int) -> str:
    """Return the rule that holds after `decode_step` decode steps in a row.

    Zero is an ALL point but never an ANY point; where both fall together ANY wins.
    """
    if decode_step != 0 and decode_step % any_interval == 0:
        return ANY
    return ALL if decode_step % attempt_interval == 0 else NONE


def steps_to_votes(decode_step: int, attempt_interval: int, any_interval: int) -> tuple[int, int]:
    """Count the decode steps after `decode_step` up to the next vote, and to the next ANY point."""
    to_any = any_interval - decode_step % any_interval
    return min(attempt_interval - decode_step % attempt_interval, to_any), to_any


def decide(rule: str, wants: Iterable[bool]) -> bool:
    """Combine the ranks' ballots."""
    if rule == NONE:
        return False
    return any(wants) if rule == ANY else all(wants)
