"""When the steps of a group start and end (docs/rules.md, R26), as many in one go as are certain.

Ranks meet before each step, launch it when their hosts are ready, and process the oldest step in
flight. While nothing else happens to a rank, it stays in its launch and others go on: a few sums
per step are all there is, whatever the batches hold and however many ranks there are.

Read next: `group.py` (where ranks bring their lanes), `driver.py` (who reads the result).
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add
from typing import NamedTuple

from mdi_shared.clock import FAR
from mdi_shared.cost.group import GroupCost
from mdi_shared.repeat import Horizon

NEVER = 2**63 - 1  # ns, the last time that a trace can hold


class Part(NamedTuple):
    """A lane from its step `turn` on: rows of a step, host times, ns, and device times to come."""

    turn: int
    rows: int
    schedule_ns: int
    launch_ns: int
    process_ns: int
    device: Iterator[int]


@dataclass(slots=True, eq=False)
class Lane:
    """One rank's part in its group's steps, from a launch until it is woken.

    Its steps have so many rows; the device's own times are asked for when a step is taken. Its host
    needs `host_ns` to plan and launch a step and is ready with the first one at `ready_ns`; the
    device cannot end that before `queued_ns`. Processing a step takes `process_ns`, that which the
    first turn processes `oldest_ns`, None when there is none yet; `num_in_flight` steps are not
    processed. `next_ns` says when the next arrival comes. The ranks met at `met_ns`. `parts` are
    what becomes of it as its batch shrinks.
    """

    horizon: Horizon
    is_prefill: bool
    part: Part
    parts: Iterator[Part]
    ready_ns: int
    queued_ns: int
    oldest_ns: int | None
    num_in_flight: int
    next_ns: Callable[[], int]
    met_ns: int
    first: int = 0  # the group's steps before it
    stop: int = 0  # and those before the first that is not certain
    event: int = 0  # and those before the next that is not like the one before it
    host_ns: int = 0
    process_ns: int = 0  # of the step that is processed now, which may be of the part before
    taken: list[Part] = field(default_factory=list)
    _coming: Part | None = None

    def begin(self, first: int) -> None:
        """Note where its steps begin."""
        self.first, self.stop = first, first + self.horizon.steps
        self.host_ns = self.part.schedule_ns + self.part.launch_ns
        self.process_ns = self.part.process_ns
        self.taken.append(self.part)
        self._coming = next(self.parts, None)
        self._note_event()

    def go_on(self, index: int, keep: int) -> None:
        """Become what it is from step `index` on, whose turn processes the step `keep` before."""
        coming, processed = self._coming, index - self.first - keep
        if coming is not None and self.first + coming.turn == index:
            self.part, self.host_ns = coming, coming.schedule_ns + coming.launch_ns
            self.taken.append(coming)
            self._coming = next(self.parts, None)
        for part in reversed(self.taken):
            if part.turn <= processed:
                self.process_ns = part.process_ns
                break
        self._note_event()
        if self.part.turn > processed:
            self.event = min(self.event, self.first + self.part.turn + keep)

    def _note_event(self) -> None:
        self.event = FAR if self._coming is None else self.first + self._coming.turn

    def spread(self, values: Sequence[int], count: int) -> list[int]:
        """Return the value of its part for each of `count` steps."""
        out = [values[0]] * count
        for part, value in zip(self.taken[1:], values[1:], strict=True):
            out[part.turn :] = [value] * (count - part.turn)
        return out


class Timeline:
    """The steps of a group, which run one after another, each for all ranks at once.

    A step starts when the slowest rank has launched it, and since ranks meet in each layer's expert
    exchange, it ends for all with the slowest one, or when `cost` says (R34). A group of one
    exchanges nothing. `keep` decode steps are in flight from one turn to the next. The run ends at
    `until_ns`. `looks_cost` says that taking arrivals in takes time.
    """

    def __init__(
        self, size: int, cost: GroupCost | None = None, *, keep: int = 1, until_ns: int = NEVER,
        looks_cost: bool = False,
    ) -> None:  # fmt: skip
        self.is_group = size > 1
        self.cost = cost if self.is_group else None
        self.until_ns = until_ns
        self.met_ns, self.starts_ns, self.ends_ns = array("q"), array("q"), array("q")
        self.own_ns = array("q")  # what each rank's own device takes, step by step; of groups only
        self.first_ns = 0  # what the device takes for the step launched last
        self.now_ns = 0  # when all ranks have processed what the last step's turn processes
        self.lanes: list[Lane] = []  # of all ranks, in order
        self._keep = keep
        self._is_patient = not (looks_cost or until_ns != NEVER)  # arrivals may wait for a vote
        self._oldest = 0  # steps that are processed
        self._free_ns = 0

    @property
    def columns(self) -> "dict[str, array[int]]":
        """What steps have in common, by the recorder's names."""
        columns = {"t_dev_start": self.starts_ns, "t_dev_end": self.ends_ns}
        return columns | ({"met_ns": self.met_ns, "own_ns": self.own_ns} if self.is_group else {})

    @property
    def num_steps(self) -> int:
        return len(self.starts_ns)

    def run(self, new: Sequence[Lane]) -> list[Lane]:
        """Take the steps that horizons and arrivals allow, at least one; return who has to wake.

        `new` are the lanes of ranks that launch a step now, among `lanes`; the others go on.
        Stops at the first look at the world that may see an arrival, or is not before `until_ns`.
        Where the next steps are certain anyway, arrivals wait, unless a look costs time or the run
        may end before it.
        """
        first = self.num_steps
        for lane in new:
            lane.begin(first)
        self._take_first(new)
        if new[0].is_prefill:
            return self.lanes
        certain, vote = self._bounds(first, new[0].horizon)
        stop = min(vote, min([lane.stop for lane in self.lanes]))
        if first + 1 < stop:
            next_ns = min(self.until_ns, min([lane.next_ns() for lane in self.lanes]))
            self._go_on(certain, stop, next_ns)
        return self._woken(certain, vote)

    def _bounds(self, first: int, horizon: Horizon) -> tuple[int, int]:
        """Return the steps before the next vote, and before one that may bring a prefill (R6).

        Where all must want a prefill, one rank with nobody waiting keeps the group decoding.
        """
        certain = first + (horizon.to_vote if self._is_patient else 1)
        waiting = [lane.horizon.has_waiting for lane in self.lanes]
        if all(waiting):
            return certain, first + horizon.to_vote
        if all([lane.horizon.is_idle for lane in self.lanes]):
            return first + 1, first + 1
        return certain, first + horizon.to_any if any(waiting) else FAR

    def _woken(self, certain: int, vote: int) -> list[Lane]:
        """Return the lanes whose rank has to look at the world, vote or plan another batch."""
        count, now = self.num_steps, self.now_ns
        if len(self.lanes) == 1 or now >= self.until_ns:
            return self.lanes
        is_idle = all([lane.horizon.is_idle for lane in self.lanes])
        return [
            lane for lane in self.lanes
            if lane.stop <= count or is_idle or (vote <= count and lane.horizon.has_waiting)
            or (certain <= count and lane.next_ns() <= now)
        ]  # fmt: skip

    def _take_first(self, new: Sequence[Lane]) -> None:
        """Take the step that has just been launched, and its turn."""
        first, ends, met = self.num_steps, self.ends_ns, new[0].met_ns
        going_on = [lane for lane in self.lanes if lane.first < first] if self.is_group else ()
        for lane in going_on:
            if lane.event <= first:
                lane.go_on(first, self._keep)
        ready = max([lane.ready_ns for lane in new])
        if going_on:
            ready = max(ready, met + max([lane.host_ns for lane in going_on]))
        start, device = max(self._free_ns, ready), next(self._devices())
        end = max(start + device, *[lane.queued_ns for lane in new])
        self.met_ns.append(met)
        self.starts_ns.append(start)
        ends.append(end)
        self.first_ns, self._free_ns, self._oldest = device, end, first - new[0].num_in_flight
        if new[0].oldest_ns is None:
            self.now_ns = ready
            return
        oldest = ends[self._oldest]
        self.now_ns = max([max(lane.ready_ns, oldest) + (lane.oldest_ns or 0) for lane in new])
        for lane in going_on:
            self.now_ns = max(self.now_ns, max(met + lane.host_ns, oldest) + lane.process_ns)
        self._oldest += 1

    def _go_on(self, certain: int, stop: int, next_ns: int) -> None:
        """Take steps until there are `stop`, or `certain` and a look would see something."""
        lanes, keep, met, starts, ends = (
            self.lanes, self._keep, self.met_ns, self.starts_ns, self.ends_ns)  # fmt: skip
        count, now, end, oldest = len(starts), self.now_ns, self._free_ns, self._oldest
        while count < stop and (count < certain or now < next_ns):
            for lane in lanes:
                if lane.event <= count:
                    lane.go_on(count, keep)
            until = min([lane.event for lane in lanes])
            until = min(until, certain if count < certain else stop, stop)
            host = max([lane.host_ns for lane in lanes])
            turn = max([lane.host_ns + lane.process_ns for lane in lanes])
            process = max([lane.process_ns for lane in lanes])
            enough_ns = NEVER if count < certain else next_ns
            for device in islice(self._devices(), until - count):
                start = now + host
                if start < end:
                    start = end
                end = start + device
                met.append(now)
                starts.append(start)
                ends.append(end)
                now += turn
                landed = ends[oldest] + process
                if now < landed:
                    now = landed
                oldest += 1
                if now >= enough_ns:
                    break
            count = len(starts)
        self.now_ns, self._free_ns, self._oldest = now, end, oldest

    def _devices(self) -> Iterator[int]:
        """Yield what the next steps take; nothing is asked before a step is taken."""
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0].part.device
        slowest = self._slowest()
        if self.cost is None:
            return slowest
        terms = self.cost.prefill if lanes[0].is_prefill else self.cost.decode
        return terms.times(slowest, [lane.part.rows for lane in lanes])

    def _slowest(self) -> Iterator[int]:
        note = self.own_ns.extend
        for own_ns in zip(*[lane.part.device for lane in self.lanes], strict=False):
            note(own_ns)
            yield max(own_ns)

    def turns_ns(self, lane: Lane, processes: Sequence[int]) -> Sequence[int]:
        """When a rank had processed the oldest step, in each turn of its lane but the last.

        `processes` are the times that takes, from the first turn on that processes a step.
        """
        first, met, ends = lane.first, self.met_ns, self.ends_ns
        count = self.num_steps - first
        if len(self.lanes) == 1 or count == 1:
            return met[first + 1 :]
        has_oldest = lane.oldest_ns is not None
        turns = [] if has_oldest else [lane.ready_ns]
        oldest = first - lane.num_in_flight
        hosts = lane.spread([part.schedule_ns + part.launch_ns for part in lane.taken], count)
        ready = list(map(add, met[first:], hosts))
        ready[0] = lane.ready_ns
        here = slice(len(turns), count - 1)
        landed = map(max, ready[here], ends[oldest:])
        return turns + list(map(add, landed, processes))
