"""Which data-parallel rank serves a request.

A policy balances what it is given, in the order requests become known. It does not watch the ranks,
so that a simulation and a real group place equal traces equally.
"""

from collections.abc import Sequence
from typing import Protocol

from mdi_shared.errors import ConfigError


class Placement(Protocol):
    """Chooses a rank when a request becomes known, in trace order."""

    def place(self, prompt_len: int, max_tokens: int, num_ranks: int) -> int:
        """Return a rank in [0, num_ranks); may remember what it gave to whom. Lengths: tokens."""
        ...


class RoundRobin:
    """Rank after rank."""

    def __init__(self) -> None:
        self._next = 0

    def place(self, prompt_len: int, max_tokens: int, num_ranks: int) -> int:
        rank = self._next % num_ranks
        self._next += 1
        return rank


class _Least:
    """The rank that was given the least so far; of equals the lowest."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}

    def _give(self, amount: int, num_ranks: int) -> int:
        rank = min(range(num_ranks), key=lambda r: (self._given.get(r, 0), r))
        self._given[rank] = self._given.get(rank, 0) + amount
        return rank


class LeastTokens(_Least):
    """The rank that was given the fewest prompt tokens so far: balances prefill work."""

    def place(self, prompt_len: int, max_tokens: int, num_ranks: int) -> int:
        return self._give(prompt_len, num_ranks)


class LeastKV(_Least):
    """The rank with the least KV cache over time promised to it.

    A request holds its prompt's entries for every token it puts out, and each output token's
    entry for those after it: max_tokens * (prompt_len + max_tokens / 2) token-steps, doubled here
    to stay whole.
    """

    def place(self, prompt_len: int, max_tokens: int, num_ranks: int) -> int:
        return self._give(max_tokens * (2 * prompt_len + max_tokens), num_ranks)


PLACEMENTS: dict[str, type[RoundRobin] | type[LeastTokens] | type[LeastKV]] = {
    "round_robin": RoundRobin,
    "least_tokens": LeastTokens,
    "least_kv": LeastKV,
}


def placement_by_name(name: str) -> Placement:
    """Return a fresh placement; raises `ConfigError` naming the known ones."""
    if name not in PLACEMENTS:
        raise ConfigError("placement", name, f"must be one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]()


def place_rows(
    placement: Placement,
    num_ranks: int,
    *,
    req_ids: Sequence[str],
    lengths: Sequence[tuple[int, int]],
    named: Sequence[int],
    sessions: Sequence[int],
) -> list[int]:
    """Place the rows of a request trace: each keeps the rank it names, a session stays together.

    `lengths` are (prompt_len, max_tokens); `named` ranks and `sessions` are -1 where there is
    none. Raises `ConfigError` for a rank that does not exist.
    """
    ranks: list[int] = []
    of_session: dict[int, int] = {}
    for row, (rank, session) in enumerate(zip(named, sessions, strict=True)):
        if rank >= num_ranks:
            raise ConfigError("rank", rank, f"request {req_ids[row]!r} is assigned to it, but the "
                              f"run has ranks 0 to {num_ranks - 1}")  # fmt: skip
        if rank < 0 and session >= 0 and session in of_session:
            rank = of_session[session]
        elif rank < 0:
            rank = placement.place(*lengths[row], num_ranks)
        if session >= 0:
            of_session[session] = rank
        ranks.append(rank)
    return ranks
