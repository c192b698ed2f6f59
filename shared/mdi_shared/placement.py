"""Which data-parallel rank serves a request.

A placement is asked once per request. Most watch the ranks: they are asked when the request
arrives and see a snapshot of all ranks as of the group's last poll. Those that do not (`watches`)
balance what they gave out themselves, and may be asked long before. Either is deterministic: no
clock, no chance but hashes of request ids. docs/policies.md has them in a table.

Read next: `rank_view.py` (what they see).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from mdi_shared.by_name import check_parameters, named, number
from mdi_shared.errors import ConfigError, MiniDeepInferError, PlacementError, raised
from mdi_shared.policies.prediction import hashed
from mdi_shared.rank_view import RankView
from mdi_shared.request import Request


class Placement:
    """Chooses ranks. Override `place`, and set `watches` to False if it looks at no rank's state.

    A run that cannot show the ranks refuses a placement that watches them (docs/parallel.md).
    """

    watches: bool = True

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        """Return the rank of `request`: an index of `ranks`. May remember what it gave to whom."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        check_parameters("placement", self)


@dataclass(eq=False)
class RoundRobin(Placement):
    """Rank after rank."""

    watches = False
    _next: int = field(default=0, init=False)

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        rank = self._next % len(ranks)
        self._next += 1
        return rank


@dataclass(eq=False)
class RandomRank(Placement):
    """By a hash of the request's id and `seed`."""

    watches = False
    seed: int = number(0)

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        return hashed(f"{self.seed} {request.req_id}") % len(ranks)


@dataclass(eq=False)
class _LeastGiven(Placement):
    """The rank that was given the least so far; of equals the lowest."""

    watches = False
    _given: dict[int, int] = field(default_factory=dict, init=False)

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        rank = min(range(len(ranks)), key=lambda r: (self._given.get(r, 0), r))
        self._given[rank] = self._given.get(rank, 0) + self.amount(request)
        return rank

    def amount(self, request: Request) -> int:
        raise NotImplementedError


@dataclass(eq=False)
class LeastTokens(_LeastGiven):
    """The rank that was given the fewest prompt tokens so far: balances prefill work."""

    def amount(self, request: Request) -> int:
        return request.prompt_len


@dataclass(eq=False)
class LeastKV(_LeastGiven):
    """The rank with the least KV cache over time promised to it.

    A request holds its prompt's entries for every token it puts out, and each output token's
    entry for those after it: max_tokens * (prompt_len + max_tokens / 2) token-steps.
    """

    def amount(self, request: Request) -> int:
        return request.max_tokens * (2 * request.prompt_len + request.max_tokens)  # whole: doubled


@dataclass(eq=False)
class ShortestQueue(Placement):
    """The rank with the fewest requests that have not ended (JSQ), of equals the lowest.

    Source: join the shortest queue; `lor` (least outstanding requests) of Vidur.
    """

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        return _least([rank.outstanding for rank in ranks])


@dataclass(eq=False)
class LeastKVHeld(Placement):
    """The rank that holds the fewest tokens, those that wait there counted as if they were held.

    What was put out so far counts, what is still to come does not.
    """

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        return _least([rank.kv_tokens + rank.queued_tokens for rank in ranks])


@dataclass(eq=False)
class PowerOfTwo(Placement):
    """Of two ranks chosen by a hash of the request's id, the one with fewer requests.

    Source: the power of two choices (Mitzenmacher 2001).
    """

    seed: int = number(0)

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        draw, size = hashed(f"{self.seed} {request.req_id}"), len(ranks)
        first = draw % size
        other = (first + 1 + draw // size % max(size - 1, 1)) % size
        return other if ranks[other].outstanding < ranks[first].outstanding else first


@dataclass(eq=False)
class Balance(Placement):
    """The rank where the request makes the group's imbalance grow least, now and `horizon` later.

    A step of the group lasts as long as that of its fullest rank. A request of s tokens fills the
    gap to it, which is worth s, or raises it by x, for which all N ranks wait: s - N x. A rank's
    fullness is its tokens, held and waiting, and grows by one per request and decode step; the
    score is summed over five steps spread evenly from now to `horizon` steps ahead. Of equals, the
    least full. Source: BalanceRoute (arXiv 2605.06113), whose horizon knows who is about to end,
    and which matches a whole queue of requests with the ranks; here each is placed as it comes.
    """

    horizon: int = number(128)

    def place(self, request: Request, ranks: Sequence[RankView]) -> int:
        tokens = [rank.kv_tokens + rank.queued_tokens for rank in ranks]
        growth = [rank.outstanding for rank in ranks]
        scores = [0] * len(ranks)
        for point in range(5):
            steps = self.horizon * point // 4
            loads = [held + steps * each for held, each in zip(tokens, growth, strict=True)]
            fullest, own = max(loads), request.prompt_len + steps
            for rank, load in enumerate(loads):
                scores[rank] += len(ranks) * max(load + own - fullest, 0) - own
        return min(range(len(ranks)), key=lambda rank: (scores[rank], tokens[rank], rank))


def _least(loads: Sequence[int]) -> int:
    return loads.index(min(loads))


PLACEMENTS: Mapping[str, type[Placement]] = {
    "round_robin": RoundRobin, "random": RandomRank, "least_tokens": LeastTokens,
    "least_kv": LeastKV, "jsq": ShortestQueue, "least_kv_held": LeastKVHeld,
    "power_of_two": PowerOfTwo, "balance": Balance,
}  # fmt: skip


def new_placement(given: str | Placement) -> Placement:
    """Return a placement that has placed nothing yet: a copy of the caller's, or one by its name.

    Raises `ConfigError` naming what is known.
    """
    if isinstance(given, Placement):
        return deepcopy(given)
    if not isinstance(given, str):
        raise ConfigError("placement", given, "must be a text such as power_of_two:seed=1, or a "
                          "Placement")  # fmt: skip
    return named("placement", given, given, PLACEMENTS, "a placement")


def placement_name(given: str | Placement) -> str:
    """Return what a run's metadata calls a placement."""
    return type(given).__name__ if isinstance(given, Placement) else given


class Placer:
    """Gives each request its rank: the one it names, that of its session, or what is placed.

    `ranks` are the views to place by, where they are seen. Raises `PlacementError` for what a
    placement does wrong, and `ConfigError` for one that watches ranks which nobody sees.
    """

    def __init__(self, placement: Placement, ranks: Sequence[RankView]) -> None:
        self.placement = placement
        self.ranks = ranks
        self._of_session: dict[int, int] = {}

    def place(self, request: Request, named: int = -1, session: int = -1) -> int:
        """Return the request's rank; `named` rank and `session` are -1 where there is none."""
        rank = named
        if rank < 0 and session >= 0:
            rank = self._of_session.get(session, -1)
        if rank < 0:
            rank = self._ask(request) if len(self.ranks) > 1 else 0
        if session >= 0:
            self._of_session[session] = rank
        return rank

    def _ask(self, request: Request) -> int:
        try:
            rank = self.placement.place(request, self.ranks)
        except MiniDeepInferError:
            raise
        except Exception as error:  # whatever a placement raises, one line names it
            raise self._wrong(request, raised(error)) from error
        if type(rank) is not int or not 0 <= rank < len(self.ranks):
            raise self._wrong(request, f"returned {rank!r}, but the ranks are 0 to "
                              f"{len(self.ranks) - 1}")  # fmt: skip
        return rank

    def _wrong(self, request: Request, problem: str) -> PlacementError:
        return PlacementError(type(self.placement).__name__, request.req_id, problem)


def require_ranks(req_ids: Sequence[str], named: Sequence[int], num_ranks: int) -> None:
    """Raise `ConfigError` for a request that names a rank which does not exist."""
    for req_id, rank in zip(req_ids, named, strict=True):
        if rank >= num_ranks:
            raise ConfigError("rank", rank, f"request {req_id!r} is assigned to it, but the run "
                              f"has ranks 0 to {num_ranks - 1}")  # fmt: skip
