"""Drives one rank's serving loop in virtual time: a SimPy process that answers effects.

It charges host time and device time by the timing law (docs/rules.md, R26) and decides
nothing about requests, blocks or tokens. `tests/parity` drives the same loop with a plain
blocking driver and expects the same plans.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import simpy

from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.cost.work import DecodeWork, StepWork, step_work
from mdi_shared.loop import (
    Answer,
    AwaitArrival,
    AwaitStep,
    Effect,
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
from mdi_sim.group import DeviceStep, Group, Waits
from mdi_sim.outcomes import Outcomes
from mdi_sim.source import Source
from mdi_traces.recorder import RankRecorder

NEVER = 2**63 - 1  # ns, the last time that a trace can hold


class TimeIsUp(Exception):
    """Ends a run at its time limit, out of whichever rank reaches it first."""


@dataclass(eq=False, kw_only=True)
class RankDriver:
    """One data-parallel rank of a simulated run.

    `request_of` builds the request of a trace row, given when it arrived unless that is the
    recorded time, and says where its model stops it early. The run
    ends at `until_ns`. `fast_forward` takes steps of one batch in one go; it changes no
    result. `on_progress` is told how many requests have ended.
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
    until_ns: int = NEVER
    fast_forward: bool = True
    on_progress: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.poll_ns = 0
        self.wait_ns = 0  # spent at barriers since the last poll
        self.ingress_ns = 0  # what taking in the arrivals of the last poll costs
        self._in_flight: deque[tuple[StepPlan, DeviceStep]] = deque()  # oldest first
        self._due_waiting: list[int] = []  # since the poll, per repeat: arrivals not yet polled

    def run(self) -> Generator[simpy.Event, None, None]:
        """Answer the loop's effects until it ends; a SimPy process."""
        loop = serve(self.scheduler, num_ranks=self.group.size)
        answer: Answer = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                return
            answer = yield from self._answer(effect)

    def _answer(self, effect: Effect) -> Generator[simpy.Event, None, Answer]:
        if isinstance(effect, Report):
            self._report(effect)
            return None
        if isinstance(effect, Poll):
            return self._poll()
        if isinstance(effect, Launch):
            return (yield from self._launch(effect))
        if isinstance(effect, AwaitStep):
            return (yield from self._await_step())
        if isinstance(effect, Vote):
            arrived = self.now
            verdict = yield from self.group.vote(effect.ballot)
            self.wait_ns += self.now - arrived
            return verdict
        assert isinstance(effect, AwaitArrival), effect
        return (yield from self._await_arrival())

    @property
    def now(self) -> int:
        return int(self.group.env.now)

    def _sleep_until(self, time_ns: int) -> Waits:
        if time_ns > self.now:
            yield self.group.env.timeout(time_ns - self.now)

    # ---- effects -------------------------------------------------------------------------------

    def _poll(self) -> News:
        self.poll_ns, self.wait_ns = self.now, 0
        self._due_waiting.clear()
        if self.now >= self.until_ns:
            raise TimeIsUp
        arrivals = []
        for row in self.source.take(self.now):
            request, stop = self.request_of(row, self.source.arrived_ns.get(row))
            seq_id = self.recorder.submitted(row)
            if stop is not None:
                self.outcomes.stops[seq_id] = stop
            arrivals.append(request)
        self.ingress_ns = self.cost.host.ingress(sum(new.prompt_len for new in arrivals))
        return News(tuple(arrivals), now_ns=self.now)

    def _await_arrival(self) -> Generator[simpy.Event, None, bool]:
        """Sleep with the whole group; what wakes one rank wakes all."""
        wake = yield from self.group.next_arrival(self.source.next_ns())
        if wake is not None:
            yield from self._sleep_until(min(wake, self.until_ns))
        return wake is not None

    def _launch(self, effect: Launch) -> Generator[simpy.Event, None, int]:
        plan = effect.plan
        schedule, launch, _ = self._host_times(plan)
        planned = self.now + self.ingress_ns + schedule
        yield from self._sleep_until(planned + launch)
        if plan.is_prefill or not self.fast_forward or effect.repeats_if_quiet == 1:
            self._launch_one(plan, step_work(self.shape, plan), planned, self.now)
            return 1
        return (yield from self._launch_many(effect, planned))

    def _await_step(self) -> Generator[simpy.Event, None, StepResult]:
        plan, step = self._in_flight.popleft()
        if step.end_ns < 0:
            yield step.known
        process = self._host_times(plan)[2]
        yield from self._sleep_until(max(self.now, step.end_ns) + process)
        self.recorder.landed(step.start_ns, step.end_ns, self.now, process)
        return self.outcomes.result(plan)

    def _report(self, report: Report) -> None:
        if self.outcomes.needs_lengths:
            self._note_lengths(report)
        ended = self.recorder.reported(report, self.now, self._due_waiting)
        for row in ended:
            self.source.ended(row, self.now)
        if ended and self.on_progress is not None:
            self.on_progress(len(ended))

    def _note_lengths(self, report: Report) -> None:
        lengths = self.outcomes.output_lens
        if report.outcome is not None:
            for seq_id, new in zip(report.outcome.seq_ids, report.outcome.tokens, strict=True):
                lengths[seq_id] = lengths.get(seq_id, 0) + len(new)
        if report.advance is not None:
            for seq_id in self._in_flight[-1][0].seq_ids:
                lengths[seq_id] = lengths.get(seq_id, 0) + report.advance.count

    # ---- steps ---------------------------------------------------------------------------------

    def _host_times(self, plan: StepPlan) -> tuple[int, int, int]:
        """Return what planning, launching and processing a step take, ns."""
        return self.cost.host.of_step(
            len(plan.seq_ids), plan.prompt_tokens, is_alone=self.group.size == 1
        )

    def _launch_one(
        self, plan: StepPlan, work: StepWork, planned_ns: int, launched_ns: int, repeat: int = 0
    ) -> None:
        # Without rows a rank runs a placeholder, but only in a group: for the others' sake.
        is_nothing = not plan.seq_ids and self.group.size == 1
        device_ns = 0 if is_nothing else self.cost.device_ns(work)
        queued_ns = launched_ns + self.cost.host.queue(plan.prompt_tokens)
        step = self.group.launch(self.rank, launched_ns, device_ns, work, queued_ns)
        self._in_flight.append((plan, step))
        times = (self.poll_ns, planned_ns, launched_ns, self.wait_ns, device_ns)
        if repeat == 0:
            self.recorder.launched(plan, work, times)
        else:
            self.recorder.repeated(work, times)

    def _launch_many(self, effect: Launch, planned_ns: int) -> Generator[simpy.Event, None, int]:
        """Run one batch step after step, as far as the loop and the trace allow.

        The same sums as single steps, without the loop and the event queue in between.
        """
        plan = effect.plan
        works = DecodeWork(self.shape, plan.ks) if plan.seq_ids else None
        idle = None if plan.seq_ids else step_work(self.shape, plan)
        schedule, launch, process = self._host_times(plan)
        launched, taken = self.now, 0
        most = min(effect.repeats_if_quiet, self.outcomes.steps_before_stop(plan))
        while True:
            work = works.at(taken) if works is not None else idle
            assert work is not None, "an idle step has the work of its placeholder row"
            self._launch_one(plan, work, planned_ns, launched, taken)
            taken += 1
            if taken >= most:
                break
            oldest, step = self._in_flight[0]
            spent = process if oldest is plan else self._host_times(oldest)[2]
            done = max(launched, step.end_ns) + spent
            due = self.source.count_due(done)
            # Where taking arrivals in takes time, each look at the world must be a real one.
            is_news = due and (taken >= effect.repeats or self.cost.host.ingress_ns_per_token)
            if is_news or done >= self.until_ns:
                break
            self._due_waiting.append(due)
            self._in_flight.popleft()
            self.recorder.landed(step.start_ns, step.end_ns, done, spent)
            self.poll_ns = done
            planned_ns = done + schedule
            launched = planned_ns + launch
        yield from self._sleep_until(launched)
        return taken
