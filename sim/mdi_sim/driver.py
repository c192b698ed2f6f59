"""Drives one rank's serving loop in virtual time: a process that answers effects.

It charges host time and device time by the timing law (docs/rules.md, R26) and decides
nothing about requests, blocks or tokens. `tests/parity` drives the same loop with a plain
blocking driver and expects the same plans.

Read next: `stretch.py` (the law, for many equal steps at once), `group.py` (ranks together).
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, NamedTuple

import simpy

from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost, decode_times
from mdi_shared.cost.tails import copies_ns
from mdi_shared.cost.work import DecodeWork, StepWork, step_work
from mdi_shared.loop import (
    Answer,
    AwaitStep,
    Launch,
    News,
    Poll,
    Report,
    Vote,
    serve,
)
from mdi_shared.plan import StepPlan, StepResult
from mdi_shared.request import Request
from mdi_shared.scheduler import Scheduler
from mdi_sim.group import Group
from mdi_sim.outcomes import Outcomes
from mdi_sim.source import Source
from mdi_sim.stretch import NEVER, Lane, Stretch
from mdi_traces.recorder import Launches, RankRecorder

NO_NEWS = News()
Waits = Generator[simpy.Event, Any, Answer]


class TimeIsUp(Exception):
    """Ends a run at its time limit, out of whichever rank reaches it first."""


class InFlight(NamedTuple):
    """A step that was launched and is not processed; processing it takes `process_ns`.

    It is the plan's, or a repetition of it with this `shift`.
    """

    plan: StepPlan
    shift: int
    start_ns: int
    end_ns: int
    process_ns: int


@dataclass(eq=False, kw_only=True)
class RankDriver:
    """One data-parallel rank of a simulated run.

    `request_of` builds the request of a trace row, given when it arrived unless that is the
    recorded time, and says where its model stops it early.
    `fast_forward` takes steps of one batch in one go; it changes no result. `on_progress` is told
    how many requests have ended.
    """

    rank: int = field(kw_only=False)
    group: Group
    scheduler: Scheduler
    source: Source
    outcomes: Outcomes
    recorder: RankRecorder
    request_of: Callable[[int, int | None], tuple[Request, int | None]]
    shape: ModelShape
    cost: StepCost
    fast_forward: bool = True
    on_progress: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.now = 0  # ns; of this rank, which runs ahead of the group's event queue
        self.poll_ns = 0
        self.wait_ns = 0  # spent at votes since the last poll
        self.ingress_ns = 0  # what taking in the arrivals of the last poll costs
        self._in_flight: deque[InFlight] = deque()  # oldest first
        self._drafts = self.outcomes.needs_lengths
        self._foresees = hasattr(self.cost, "decode_times")
        self._hosts: dict[int, tuple[int, int, int]] = {}  # of decode steps, by sequences
        # Arrivals that a loop polling every step would have queued, by the steps processed since
        # the last poll: (index of the first that saw so many, how many).
        self._due: list[tuple[int, int]] = []

    def run(self) -> Waits:
        """Answer the loop's effects until it ends; a SimPy process."""
        loop = serve(self.scheduler, num_ranks=self.group.size)
        answer: Answer = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                return None
            if type(effect) is Report:
                self._report(effect)
                answer = None
            elif type(effect) is AwaitStep:
                answer = self._await_step()
            elif type(effect) is Launch:
                answer = yield from self._launch(effect)
            elif type(effect) is Poll:
                if self.group.size > 1:
                    yield from self._catch_up()
                answer = self._poll()
            elif type(effect) is Vote:
                answer = yield from self._vote(effect)
            else:
                answer = yield from self._await_arrival()

    def _catch_up(self) -> Waits:
        """Let the event queue come up to this rank's time.

        All ranks have processed the last step by then, so a look at the world sees the turns that
        follow requests which ended on other ranks.
        """
        yield self.group.env.timeout(max(self.now - int(self.group.env.now), 0))
        return None

    # ---- effects -------------------------------------------------------------------------------

    def _poll(self) -> News:
        self.poll_ns, self.wait_ns, self.ingress_ns = self.now, 0, 0
        self._due.clear()
        if self.now >= self.group.until_ns:
            raise TimeIsUp
        if not self.source.count_due(self.now):
            # Only scheduling policies ask what time it is.
            return NO_NEWS if self.scheduler.decisions is None else News(now_ns=self.now)
        arrivals = []
        for row in self.source.take(self.now):
            request, stop = self.request_of(row, self.source.arrived_ns.get(row))
            seq_id = self.recorder.submitted(row)
            if stop is not None:
                self.outcomes.stops_at(seq_id, request, stop)
            arrivals.append(request)
        self.ingress_ns = self.cost.host.ingress(sum([new.prompt_len for new in arrivals]))
        return News(tuple(arrivals), now_ns=self.now)

    def _vote(self, vote: Vote) -> Waits:
        arrived = self.now
        verdict, self.now = yield from self.group.votes.meet(self.rank, (vote.ballot, arrived))
        self.wait_ns += self.now - arrived
        return bool(verdict)

    def _await_arrival(self) -> Waits:
        """Sleep with the whole group; what wakes one rank wakes all."""
        wake_ns, self.now = yield from self.group.arrivals.meet(
            self.rank, (self.source.next_ns(), self.now)
        )
        if wake_ns == NEVER:
            return False
        self.now = max(self.now, min(wake_ns, self.group.until_ns))
        return True

    def _launch(self, effect: Launch) -> Waits:
        plan, host = effect.plan, self.cost.host
        self.outcomes.planned(plan)
        prompt_tokens = plan.prompt_tokens
        schedule, launch, process = self._host_times(len(plan.batch.members), prompt_tokens)
        planned = self.now + self.ingress_ns + schedule
        horizon, in_flight = effect.horizon, self._in_flight
        if horizon.steps > 1:
            steps = self.outcomes.steps_before_stop(plan) if self.fast_forward else 1
            horizon = horizon if steps >= horizon.steps else horizon._replace(steps=steps)
        oldest = None
        if len(in_flight) == self.scheduler.keep:
            oldest = in_flight[0].process_ns if in_flight else process
        work, rows, device, is_certain = self._device_times(plan)
        if plan.copies:
            first_ns = next(device) + copies_ns(self.shape, self.cost, len(plan.copies))
            device = chain((first_ns,), device)
        lane = Lane(
            horizon, plan.is_prefill, rows, device, is_certain,
            ready_ns=planned + launch, queued_ns=planned + launch + host.queue(prompt_tokens),
            host_ns=schedule + launch, process_ns=process, oldest_ns=oldest,
            next_ns=self.source.next_ns(), met_ns=self.now,
            in_flight_ns=[step.end_ns for step in in_flight],
        )  # fmt: skip
        if self.group.size == 1:
            stretch = self.group.run([lane])
        else:
            stretch = yield from self.group.launches.meet(self.rank, lane)
        count = len(stretch.starts_ns)
        turns = stretch.met_ns[1:] if self.group.size == 1 else stretch.turns_ns(lane)
        times = Launches(self.poll_ns, planned, lane.ready_ns, self.wait_ns, lane.own_ns[0],
                         schedule, launch, oldest is not None)  # fmt: skip
        meetings = (stretch.met_ns[1:], lane.own_ns[1:]) if self.group.size > 1 else ()
        self.recorder.launched(plan, work, times, count, meetings)
        self._land(lane, plan, stretch, turns)
        return count

    def _await_step(self) -> StepResult:
        plan, shift, start, end, process = self._in_flight.popleft()
        self.now = max(self.now, end) + process
        self.recorder.landed_one(start, end, self.now, process)
        return self.outcomes.result(plan, shift)

    def _report(self, report: Report) -> None:
        if self._drafts and report.outcome is not None:
            self.outcomes.note_lengths(report.outcome)
        ended = self.recorder.reported(report, self.now, self._due)
        for row in ended:
            self.source.ended(row, self.now)
        if ended and self.on_progress is not None:
            self.on_progress(len(ended))

    # ---- steps ---------------------------------------------------------------------------------

    def _host_times(self, num_seqs: int, prompt_tokens: int) -> tuple[int, int, int]:
        """Return what planning, launching and processing a step take, ns."""
        known = None if prompt_tokens else self._hosts.get(num_seqs)
        if known is None:
            is_alone = self.group.size == 1
            known = self.cost.host.of_step(num_seqs, prompt_tokens, is_alone=is_alone)
            if not prompt_tokens:
                self._hosts[num_seqs] = known
        return known

    def _device_times(self, plan: StepPlan) -> tuple[StepWork | None, int, Iterator[int], bool]:
        """Return a step's work, where it is not one row each, its rows, and device times, ns.

        The times are those of the step and of further ones of the same batch. Asking a model of
        one's own for more than are used could change what it says next: the last is False then.
        """
        if not plan.batch.members:
            # A placeholder, but only in a group: for the others' sake.
            work = step_work(self.shape, plan)
            if self.group.size == 1:
                return work, 1, repeat(0), True
            if self._foresees:
                return work, 1, repeat(self.cost.device_ns(work)), True
            return work, 1, (self.cost.device_ns(work) for _ in repeat(None)), False
        if plan.is_prefill or plan.rows_each > 1:
            work = step_work(self.shape, plan)
            return work, work.rows, repeat(self.cost.device_ns(work)), True
        steps = DecodeWork(self.shape, plan.batch, plan.shift)
        times = decode_times(self.cost, steps)
        return None, steps.num_seqs, times, self._foresees

    def _land(self, lane: Lane, plan: StepPlan, stretch: Stretch, turns: list[int]) -> None:
        """Record the steps that the turns of a stretch have processed; keep those in flight."""
        in_flight, starts, ends = self._in_flight, stretch.starts_ns, stretch.all_ends_ns
        process = lane.process_ns
        if not turns:
            self.now = lane.ready_ns
            in_flight.append(InFlight(plan, plan.shift, starts[0], ends[-1], process))
            return
        landed, processes = turns, [process] * len(turns)
        if lane.oldest_ns is None:
            landed = turns[1:]
            processes.pop()
        elif in_flight:
            oldest = in_flight.popleft()
            starts = [oldest.start_ns, *starts]
            processes[0] = oldest.process_ns
        count = len(landed)
        self.recorder.landed(starts[:count], ends[:count], landed, processes)
        shift = plan.shift + len(stretch.starts_ns) - len(starts)
        in_flight += [
            InFlight(plan, shift + i, starts[i], ends[i], process)
            for i in range(count, len(starts))
        ]
        if self.source.next_ns() <= turns[-1]:
            self._count_due(turns, first=int(lane.oldest_ns is not None))
        self.poll_ns, self.wait_ns = turns[-1], stretch.met_ns[-1] - turns[-1]
        self.now = stretch.met_ns[-1] + lane.host_ns

    def _count_due(self, turns: list[int], first: int) -> None:
        """Note who arrived while steps were taken without a look at the world.

        What a turn processes sees the arrivals of the turn before it, from step `first` on.
        """
        for index, time_ns in enumerate(turns, start=first):
            due = self.source.count_due(time_ns)
            if due:
                self._due.append((index, due))
