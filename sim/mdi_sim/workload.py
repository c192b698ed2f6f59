"""Turns a request trace into what the drivers need: requests by row, and arrivals by rank."""

from collections.abc import Sequence

from mdi_shared.placement import Placement, Placer, require_ranks
from mdi_shared.rank_view import RankView, SchedulerState, UnseenRank
from mdi_shared.request import Request
from mdi_shared.scheduler import Scheduler
from mdi_sim.source import Arrivals, Front, Source, make_sources
from mdi_traces.columns import codes, ints
from mdi_traces.hints import trace_hints
from mdi_traces.prefixes import prefix_contents
from mdi_traces.requests import RequestTrace


class Workload:
    """The requests of `trace` split over `num_ranks`, turns of a session on one rank.

    Rows that name a rank keep it. A turn with a think time follows the turn before it; all other
    requests come at their recorded time. With `has_prefixes` the trace says what blocks hold
    (`with_prefix_ids`). Raises `ConfigError` when the trace names a rank that does not exist.
    """

    def __init__(
        self, trace: RequestTrace, num_ranks: int, placement: Placement, *,
        has_prefixes: bool = False,
    ) -> None:  # fmt: skip
        table = trace.table
        self._req_ids = table["req_id"].to_pylist()
        self._prompt_lens, self._max_tokens, self._output_lens, self._cached_lens, self._times = (
            ints(table[name]).tolist()
            for name in ("prompt_len", "max_tokens", "output_len", "cached_len", "arrival_ns")
        )
        self._hints = trace_hints(trace)
        self._contents = prefix_contents(trace) if has_prefixes else [None] * len(trace)
        self._think = ints(table["think_ns"], null=-1).tolist()
        self._sessions = codes(table["session_id"])[0].tolist()
        self._named = ints(table["rank"], null=-1).tolist()
        require_ranks(self._req_ids, self._named, num_ranks)
        self._num_ranks = num_ranks
        self._placement = placement

    @property
    def watches(self) -> bool:
        """Whether it matters when requests are placed: the ranks are looked at then."""
        return self._num_ranks > 1 and self._placement.watches

    def sources(self, schedulers: Sequence[Scheduler]) -> tuple[list[Source], Source | None]:
        """Return where each rank's requests come from, and whoever holds those not placed yet.

        A placement that watches the ranks sees `schedulers`; another places all before the run.
        """
        rows = range(len(self._req_ids))
        if not self.watches:
            ranks = [UnseenRank() for _ in range(self._num_ranks)]
            placer = Placer(self._placement, ranks)
            is_one = self._num_ranks == 1
            return make_sources(self._arrivals(
                [0] * len(rows) if is_one else [self._place(placer, row) for row in rows]
            )), None  # fmt: skip
        views = [RankView(SchedulerState(scheduler)) for scheduler in schedulers]
        placer = Placer(self._placement, views)

        def place(row: int, time_ns: int) -> int:
            rank = self._place(placer, row, time_ns)
            views[rank].sent(self._prompt_lens[row] - self._cached_lens[row])
            return rank

        front = Front(self._arrivals([0] * len(rows))[0], self._num_ranks, place)
        return list(front.ranks), front

    def _place(self, placer: Placer, row: int, time_ns: int | None = None) -> int:
        request, _ = self.request(row, time_ns)
        return placer.place(request, self._named[row], self._sessions[row])

    def request(self, row: int, arrived_ns: int | None = None) -> tuple[Request, int | None]:
        """Build the request of a trace row, and say at which output length its model stops.

        None: it runs to `max_tokens`, which the scheduler knows. `arrived_ns` is when it arrived,
        where that was not the recorded time.
        """
        output_len, max_tokens = self._output_lens[row], self._max_tokens[row]
        request = Request(
            req_id=self._req_ids[row], prompt_len=self._prompt_lens[row],
            max_tokens=max_tokens, cached_len=self._cached_lens[row], hints=self._hints[row],
            contents=self._contents[row],
            arrived_ns=self._times[row] if arrived_ns is None else arrived_ns,
        )  # fmt: skip
        return request, (output_len if output_len < max_tokens else None)

    def _arrivals(self, ranks: Sequence[int]) -> list[Arrivals]:
        """Return the arrivals of each rank, given every row's rank.

        A turn waits for the one before on whatever rank.
        """
        by_rank = [Arrivals() for _ in range(self._num_ranks)]
        last_of: dict[int, int] = {}
        for row, rank in enumerate(ranks):
            session, think = self._sessions[row], self._think[row]
            before = last_of.get(session) if session >= 0 and think >= 0 else None
            if before is None:
                by_rank[rank].recorded.append((self._times[row], row))
            else:
                by_rank[rank].awaited.append(row)
                earlier = by_rank[ranks[before]]
                earlier.follows[before] = (row, think)
                if earlier is not by_rank[rank]:
                    earlier.elsewhere[row] = rank
            if session >= 0:
                last_of[session] = row
        return by_rank
