"""Which data-parallel rank serves a request."""

from typing import Protocol

from mdi_shared.errors import ConfigError


class Placement(Protocol):
    """Chooses a rank when a request becomes known, in trace order."""

    def place(self, prompt_len: int, num_ranks: int) -> int:
        """Return a rank in [0, num_ranks); may remember what it gave to whom."""
        ...


class RoundRobin:
    """Rank after rank."""

    def __init__(self) -> None:
        self._next = 0

    def place(self, prompt_len: int, num_ranks: int) -> int:
        rank = self._next % num_ranks
        self._next += 1
        return rank


class LeastTokens:
    """The rank that was given the fewest prompt tokens so far; of equals the lowest.

    It balances work offered, not work left: it does not watch the ranks.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def place(self, prompt_len: int, num_ranks: int) -> int:
        rank = min(range(num_ranks), key=lambda r: (self._tokens.get(r, 0), r))
        self._tokens[rank] = self._tokens.get(rank, 0) + prompt_len
        return rank


PLACEMENTS: dict[str, type[RoundRobin] | type[LeastTokens]] = {
    "round_robin": RoundRobin,
    "least_tokens": LeastTokens,
}


def placement_by_name(name: str) -> Placement:
    """Return a fresh placement; raises `ConfigError` naming the known ones."""
    if name not in PLACEMENTS:
        raise ConfigError("placement", name, f"must be one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]()
