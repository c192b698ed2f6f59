"""Equal steps of a group in one go: when each began and ended (docs/rules.md, R26).

A stretch is the step that every rank has just planned and as many of the same batch as are certain.
Ranks meet before each of them, launch it when their hosts are ready, and process the oldest step in
flight; nothing else happens, so a few sums per step are all there is, whatever the batches hold.

Read next: `group.py` (where ranks bring their lanes), `driver.py` (who reads the result).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from operator import add

from mdi_shared.cost.group import GroupCost
from mdi_shared.repeat import Horizon, common_repeats

NEVER = 2**63 - 1  # ns, the last time that a trace can hold


@dataclass(slots=True, eq=False)
class Lane:
    """One rank's part of a stretch.

    Its step has so many `rows`. `device` gives what its own device takes for each step, as far as
    it is asked; what it was asked for stays in `own_ns`. `is_certain`: asking for more than is
    needed does no harm. Its host needs `host_ns` to plan and launch a step and is ready with the
    first one at `ready_ns`; the device cannot end that before `queued_ns`. Processing takes
    `process_ns`; `oldest_ns` that of the step the first turn processes, None when there is none
    yet. The next arrival comes at `next_ns`. The ranks met at `met_ns`, and `in_flight_ns` are the
    ends of their steps that are not processed.
    """

    horizon: Horizon
    is_prefill: bool
    rows: int
    device: Iterator[int]
    is_certain: bool
    ready_ns: int
    queued_ns: int
    host_ns: int
    process_ns: int
    oldest_ns: int | None
    next_ns: int
    met_ns: int
    in_flight_ns: list[int]
    own_ns: list[int] = field(default_factory=list)

    def first_turn_ns(self, all_ends_ns: list[int]) -> int:
        """When this rank has processed the oldest step in the first turn."""
        if self.oldest_ns is None:
            return self.ready_ns
        return max(self.ready_ns, all_ends_ns[0]) + self.oldest_ns


@dataclass(slots=True, eq=False)
class Stretch:
    """When the ranks met before each step, and when it started and ended, ns.

    `all_ends_ns` are the ends of steps that were in flight before, and of these.
    """

    met_ns: list[int]
    starts_ns: list[int]
    all_ends_ns: list[int]
    _turns: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)

    def turns_ns(self, lane: Lane) -> list[int]:
        """When a rank had processed the oldest step, in each turn but the last."""
        if len(self.met_ns) == 1:
            return []
        ends, host, process = self.all_ends_ns, lane.host_ns, lane.process_ns
        first = lane.first_turn_ns(ends)
        key = (first, host, process)  # ranks that have as much to do share the times
        if key not in self._turns:
            pairs = zip(self.met_ns[1:-1], ends[lane.oldest_ns is not None :], strict=False)
            self._turns[key] = [first, *[max(met + host, end) + process for met, end in pairs]]
        return self._turns[key]


class Devices:
    """The ranks' devices, which run one step after another, each for all ranks at once.

    A step starts when the slowest rank has launched it, and since ranks meet in each layer's expert
    exchange, it ends for all with the slowest one, or when `cost` says (R34). A group of one
    exchanges nothing. `looks_cost` says that taking arrivals in takes time.
    """

    def __init__(self, cost: GroupCost | None = None, *, looks_cost: bool = False) -> None:
        self.cost = cost
        self.looks_cost = looks_cost
        self.free_ns = 0

    def run(self, lanes: Sequence[Lane], *, until_ns: int = NEVER) -> Stretch:
        """Take the steps that the ranks' horizons and arrivals allow, at least one.

        Stops at the first look at the world that may see an arrival, or is not before `until_ns`.
        Where the next steps are certain anyway, arrivals wait, unless a look costs time or the run
        may end before it.
        """
        certain, most = common_repeats([lane.horizon for lane in lanes])
        if self.looks_cost or until_ns != NEVER:
            certain = 1
        device = next(self._times(lanes, 1))
        start = max(self.free_ns, *[lane.ready_ns for lane in lanes])
        end = max(start + device, *[lane.queued_ns for lane in lanes])
        stretch = Stretch([lanes[0].met_ns], [start], [*lanes[0].in_flight_ns, end])
        if most > 1:
            turn = max([lane.first_turn_ns(stretch.all_ends_ns) for lane in lanes])
            stop_ns = min([until_ns, *[lane.next_ns for lane in lanes]])
            if turn < stop_ns or certain > 1:
                busy = max([lane.host_ns + lane.process_ns for lane in lanes])
                enough = (stop_ns - turn) // max(device, busy, 1) + 3  # since times do not fall
                limit = min(most, max(certain, enough)) - 1
                go_on = _sum_up if len(lanes) == 1 and lanes[0].is_certain else _turn_by_turn
                go_on(lanes, stretch, self._times(lanes, limit), (turn, stop_ns, certain, limit))
                for lane in lanes:
                    del lane.own_ns[len(stretch.starts_ns) :]
        self.free_ns = stretch.all_ends_ns[-1]
        return stretch

    def _times(self, lanes: Sequence[Lane], count: int) -> Iterator[int]:
        """Yield what the next steps take, `count` at most; each lane notes its own part."""
        slowest: Iterator[int]
        if not all([lane.is_certain for lane in lanes]):
            slowest = islice(_one_by_one(lanes), count)
        else:
            own = [list(islice(lane.device, count)) for lane in lanes]
            for lane, times in zip(lanes, own, strict=True):
                lane.own_ns += times
            slowest = map(max, *own) if len(own) > 1 else iter(own[0])
        if self.cost is None:
            return slowest
        terms = self.cost.prefill if lanes[0].is_prefill else self.cost.decode
        return terms.times(slowest, [lane.rows for lane in lanes])


def _one_by_one(lanes: Sequence[Lane]) -> Iterator[int]:
    """Yield the slowest lane's time, asking each lane only when the step is taken."""
    for own_ns in zip(*[lane.device for lane in lanes], strict=False):
        for lane, device_ns in zip(lanes, own_ns, strict=True):
            lane.own_ns.append(device_ns)
        yield max(own_ns)


# What bounds a stretch: the end of its first turn, the first news, ns; how many steps are certain
# whatever comes, and how many more than the first are enough.
Bounds = tuple[int, int, int, int]


def _sum_up(lanes: Sequence[Lane], stretch: Stretch, times: Iterator[int], bounds: Bounds) -> None:
    """Go on with a rank that has no group, in closed form; its device times do not fall.

    With `busy` the host's time for a step, start[j + 1] is start[j] + max(device[j], busy) where
    the host works on one step while the device runs another, else start[j] + device[j] + busy.
    """
    lane, (turn, stop_ns, certain, _) = lanes[0], bounds
    busy, devices = lane.host_ns + lane.process_ns, list(times)
    overlaps = lane.oldest_ns is None or bool(lane.in_flight_ns)
    gaps = map(max, devices, repeat(busy)) if overlaps else map(busy.__add__, devices)
    first = max(stretch.all_ends_ns[-1], turn + lane.host_ns)
    starts = list(accumulate(gaps, initial=first))
    ends = list(map(add, starts, devices))
    turns = [turn, *map(lane.process_ns.__add__, starts[:-1] if overlaps else ends)]
    more = min(max(bisect_left(turns, stop_ns), certain - 1), len(devices))
    stretch.met_ns += turns[:more]
    stretch.starts_ns += starts[:more]
    stretch.all_ends_ns += ends[:more]


def _turn_by_turn(
    lanes: Sequence[Lane], stretch: Stretch, times: Iterator[int], bounds: Bounds
) -> None:
    """Go on step by step, asking for a device time only when the step is taken."""
    now_ns, stop_ns, certain, limit = bounds
    met, starts, ends = stretch.met_ns, stretch.starts_ns, stretch.all_ends_ns
    host = max([lane.host_ns for lane in lanes])
    turn = max([lane.host_ns + lane.process_ns for lane in lanes])
    process = max([lane.process_ns for lane in lanes])
    oldest = 1 if lanes[0].oldest_ns is not None else 0  # what the next turn processes, in `ends`
    end = ends[-1]
    while len(starts) <= limit and (now_ns < stop_ns or len(starts) < certain):
        start = max(end, now_ns + host)
        end = start + next(times)
        met.append(now_ns)
        starts.append(start)
        ends.append(end)
        now_ns = max(now_ns + turn, ends[oldest] + process)
        oldest += 1
