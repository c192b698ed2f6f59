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
from mdi_sim.source import NEVER


@dataclass(slots=True, eq=False)
class Lane:
    """One rank's part of a stretch.

    Its step has so many `rows`. `device` gives what its own device takes for each step, as far as
    it is asked; what it was asked for stays in `own_ns`. `is_certain` says that asking for more than
    is needed does no harm. Its host needs `host_ns` to plan and launch a step and is ready with the
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

    def turns_ns(self, stretch: "Stretch") -> list[int]:
        """When this rank had processed the oldest step, in each turn of a stretch but the last."""
        ends, host, process = stretch.all_ends_ns, self.host_ns, self.process_ns
        if len(stretch.met_ns) == 1:
            return []
        pairs = zip(stretch.met_ns[1:-1], ends[self.oldest_ns is not None :], strict=False)
        return [self.first_turn_ns(ends),
                *[max(met + host, end) + process for met, end in pairs]]  # fmt: skip


@dataclass(slots=True, eq=False)
class Stretch:
    """When the ranks met before each step, and when it started and ended, ns.

    `all_ends_ns` are the ends of steps that were in flight before, and of these.
    """

    met_ns: list[int]
    starts_ns: list[int]
    all_ends_ns: list[int]


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
        if len(lanes) == 1 and lanes[0].is_certain:
            return self._run_alone(lanes[0], certain, most, until_ns)
        return self._run_together(lanes, certain, most, until_ns)

    def _run_alone(self, lane: Lane, certain: int, most: int, until_ns: int) -> Stretch:
        """A rank without a group, whose device times do not fall: the law in closed form.

        With `busy` the host's time for a step, start[j + 1] is start[j] + max(device[j], busy)
        where the host works on one step while the device runs another, else + device[j] + busy.
        """
        process, busy = lane.process_ns, lane.host_ns + lane.process_ns
        device = next(lane.device)
        lane.own_ns.append(device)
        start = max(self.free_ns, lane.ready_ns)
        ends = [*lane.in_flight_ns, max(start + device, lane.queued_ns)]
        self.free_ns = ends[-1]
        if most == 1:
            return Stretch([lane.met_ns], [start], ends)
        turn = lane.first_turn_ns(ends)
        stop_ns = min(lane.next_ns, until_ns)
        if turn >= stop_ns and (certain == 1 or turn >= until_ns):
            return Stretch([lane.met_ns], [start], ends)
        overlaps = lane.oldest_ns is None or bool(lane.in_flight_ns)
        enough = (stop_ns - turn) // max(device, busy, 1) + 3
        devices = list(islice(lane.device, min(most, max(certain, enough)) - 1))
        gaps = map(max, devices, repeat(busy)) if overlaps else map(busy.__add__, devices)
        starts = list(accumulate(gaps, initial=max(self.free_ns, turn + lane.host_ns)))
        starts.pop()
        own_ends = list(map(add, starts, devices))
        met = [lane.met_ns, turn, *map(process.__add__, starts if overlaps else own_ends)]
        taken = max(bisect_left(met, stop_ns, 1), certain)
        taken = min(taken, bisect_left(met, until_ns, 1), most, len(met) - 1)
        self.free_ns = own_ends[taken - 2] if taken > 1 else self.free_ns
        return Stretch(met[:taken], [start, *starts[: taken - 1]], ends + own_ends[: taken - 1])

    def _run_together(
        self, lanes: Sequence[Lane], certain: int, most: int, until_ns: int
    ) -> Stretch:
        """The law turn by turn."""
        stop_ns = min([until_ns, *[lane.next_ns for lane in lanes]])
        now_ns = max([lane.met_ns for lane in lanes])
        met, starts, ends = [now_ns], [], [*lanes[0].in_flight_ns]
        free_ns, ready = self.free_ns, max([lane.ready_ns for lane in lanes])
        queued = max([lane.queued_ns for lane in lanes])
        host = max([lane.host_ns for lane in lanes])
        turn = max([lane.host_ns + lane.process_ns for lane in lanes])
        process = max([lane.process_ns for lane in lanes])
        oldest = 0 if lanes[0].oldest_ns is not None else -1  # what a turn processes, in `ends`
        for device_ns in self._times(lanes):
            start = free_ns if free_ns > ready else ready
            free_ns = max(start + device_ns, queued)
            starts.append(start)
            ends.append(free_ns)
            taken = len(starts)
            if taken == most:
                break
            if taken == 1:
                now_ns = max([lane.first_turn_ns(ends) for lane in lanes])
            else:
                now_ns = max(now_ns + turn, ends[oldest] + process)
            if now_ns >= stop_ns and (taken >= certain or now_ns >= until_ns):
                break
            met.append(now_ns)
            oldest += 1
            ready, queued = now_ns + host, 0
        self.free_ns = free_ns
        return Stretch(met, starts, ends)

    def _times(self, lanes: Sequence[Lane]) -> Iterator[int]:
        """Yield what the next steps take; each lane notes its own part."""
        rows = [lane.rows for lane in lanes]
        terms = None
        if self.cost is not None:
            terms = self.cost.prefill if lanes[0].is_prefill else self.cost.decode
        for own_ns in zip(*[lane.device for lane in lanes], strict=False):
            for lane, device_ns in zip(lanes, own_ns, strict=True):
                lane.own_ns.append(device_ns)
            yield max(own_ns) if terms is None else terms.device_ns(own_ns, rows)
