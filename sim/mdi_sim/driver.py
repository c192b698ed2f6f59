"""Drives one rank's serving loop in virtual time: it answers the loop's effects.

It charges host time and device time by the timing law (docs/rules.md, R26) and decides
nothing about requests, blocks or tokens. `tests/parity` drives the same loop with a plain
blocking driver and expects the same plans.

Read next: `group.py` (ranks together), `stretch.py` (the law, for many steps at once).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost, decode_times
from mdi_shared.cost.tails import copies_ns
from mdi_shared.cost.work import DecodeWork, StepWork, step_work
from mdi_shared.loop import (
    Answer,
    AwaitArrival,
    AwaitStep,
    Launch,
    News,
    Poll,
    Report,
    Vote,
    serve,
)
from mdi_shared.plan import Batch, StepPlan, StepResult
from mdi_shared.repeat import Horizon
from mdi_shared.request import Request
from mdi_shared.scheduler import Scheduler
from mdi_sim.outcomes import Outcomes
from mdi_sim.source import Source
from mdi_sim.stretch import NEVER, Lane, Part, Timeline
from mdi_traces.recorder import Launches, RankRecorder

NO_NEWS = News()
Meeting = Poll | Vote | AwaitArrival | Lane | None  # what a rank needs its group for


class TimeIsUp(Exception):
    """Ends a run at its time limit, out of whichever rank reaches it first."""


class InFlight(NamedTuple):
    """A step that was launched and is not processed; processing it takes `process_ns`.

    It is the plan's, or a repetition of it with this `shift` and `batch`.
    """

    plan: StepPlan
    shift: int
    batch: Batch
    end_ns: int
    process_ns: int


@dataclass(eq=False, kw_only=True)
class RankDriver:
    """One data-parallel rank, of `size`, of a simulated run.

    `request_of` builds the request of a trace row, given when it arrived unless that is the
    recorded time, and says where its model stops it early.
    `fast_forward` takes many steps in one go; it changes no result. `on_progress` is told
    how many requests have ended. The run ends at `until_ns`.
    """

    rank: int = field(kw_only=False)
    size: int
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
        self.now = 0  # ns; of this rank
        self.poll_ns = 0
        self.wait_ns = 0  # spent at votes since the last poll
        self.ingress_ns = 0  # what taking in the arrivals of the last poll costs
        self.lane: Lane | None = None  # of its launch
        self._launch_of: tuple[Launch, StepWork | None, int] | None = None
        self._loop = serve(self.scheduler, num_ranks=self.size)
        self._in_flight: deque[InFlight] = deque()  # oldest first
        self._drafts = self.outcomes.needs_lengths
        self._hosts: dict[int, tuple[int, int, int]] = {}  # of decode steps, by sequences
        # Arrivals that a loop polling every step would have queued, by the steps processed since
        # the last poll: (index of the first that saw so many, how many).
        self._due: list[tuple[int, int]] = []

    def go_on(self, answer: Answer) -> Meeting:
        """Answer the loop's effects up to one that needs the group; None when the loop has ended.

        `answer` is that to the effect it stopped at before.
        """
        send = self._loop.send
        while True:
            try:
                effect = send(answer)
            except StopIteration:
                return None
            if type(effect) is Report:
                self._report(effect)
                answer = None
            elif type(effect) is AwaitStep:
                answer = self._await_step()
            elif type(effect) is Launch:
                launched = self._launch(effect)
                if isinstance(launched, Lane):
                    return launched
                answer = launched
            elif type(effect) is Poll and self.size == 1:
                answer = self.look()
            else:
                assert isinstance(effect, Poll | Vote | AwaitArrival), effect
                return effect

    # ---- effects -------------------------------------------------------------------------------

    def look(self) -> News:
        """Look at the world."""
        now, source = self.now, self.source
        self.poll_ns, self.wait_ns, self.ingress_ns = now, 0, 0
        self._due.clear()
        if now >= self.until_ns:
            raise TimeIsUp
        if not source.count_due(now):
            # Only scheduling policies ask what time it is.
            return NO_NEWS if self.scheduler.decisions is None else News(now_ns=now)
        arrivals = []
        for row in source.take(now):
            request, stop = self.request_of(row, source.arrived_ns.get(row))
            seq_id = self.recorder.submitted(row)
            if stop is not None:
                self.outcomes.stops_at(seq_id, request, stop)
            arrivals.append(request)
        self.ingress_ns = self.cost.host.ingress(sum([new.prompt_len for new in arrivals]))
        return News(tuple(arrivals), now_ns=now)

    def met(self, verdict: bool, now_ns: int) -> bool:
        """Return the group's verdict, which it came to at `now_ns`."""
        self.wait_ns += now_ns - self.now
        self.now = now_ns
        return verdict

    def wakes(self, wake_ns: int, now_ns: int) -> bool:
        """Sleep until the next arrival on any rank, NEVER = none; all ranks meet at `now_ns`."""
        self.now = now_ns
        if wake_ns == NEVER:
            return False
        self.now = max(now_ns, min(wake_ns, self.until_ns))
        return True

    def _launch(self, effect: Launch) -> Lane | int:
        plan, host = effect.plan, self.cost.host
        self.outcomes.planned(plan)
        tokens, size = plan.prompt_tokens, len(plan.batch.members)
        schedule, launch, process = self._host_times(size, tokens)
        planned = self.now + self.ingress_ns + schedule
        ready, in_flight = planned + launch, self._in_flight
        oldest = None
        if len(in_flight) == self.scheduler.keep:
            oldest = in_flight[0].process_ns if in_flight else process
        work, rows, device = self._device_times(plan)
        if plan.copies:
            first_ns = next(device) + copies_ns(self.shape, self.cost, len(plan.copies))
            device = chain((first_ns,), device)
        horizon = effect.horizon
        if horizon.steps > 1:
            horizon = self._cut(horizon, plan)
        self.lane = Lane(
            horizon, plan.is_prefill, Part(0, rows, schedule, launch, process, device),
            self._parts(plan, horizon), ready, ready + host.queue(tokens), oldest,
            len(in_flight), self.source.next_ns, self.now,
        )  # fmt: skip
        self._launch_of = effect, work, planned
        return self.lane

    def landed(self, timeline: Timeline) -> int:
        """Record what its launch has become; return how many steps it took."""
        lane, self.lane = self.lane, None
        assert lane is not None, "a rank that wakes was in a launch"
        assert self._launch_of is not None, "and in a plan's"
        effect, work, planned = self._launch_of
        plan, in_flight, first = effect.plan, self._in_flight, lane.first
        count = timeline.num_steps - first
        times = Launches(self.poll_ns, planned, lane.ready_ns, self.wait_ns, timeline.first_ns,
                         lane.oldest_ns is not None)  # fmt: skip
        paces = [(part.turn, part.schedule_ns, part.launch_ns) for part in lane.taken]
        self.recorder.launched(plan, work, times, count, paces)
        if count == 1:
            self.now = lane.ready_ns
            end = timeline.ends_ns[first]
            in_flight.append(InFlight(plan, plan.shift, plan.batch, end, lane.part.process_ns))
            return 1
        processes = lane.spread([part.process_ns for part in lane.taken], count)
        processes[:0] = [step.process_ns for step in in_flight]
        turns = timeline.turns_ns(lane, processes)
        landed = turns if lane.oldest_ns is not None else turns[1:]
        self.recorder.landed(landed, processes[: len(landed)])
        self._keep_in_flight(effect, timeline, count, processes[len(landed) :])
        if self.source.next_ns() <= turns[-1]:
            self._count_due(turns, first=int(lane.oldest_ns is not None))
        self.now = timeline.met_ns[-1] + lane.host_ns
        return count

    def _keep_in_flight(
        self, effect: Launch, timeline: Timeline, count: int, processes: Sequence[int]
    ) -> None:
        """Note the last steps of a launch, as many as there are times to process them."""
        plan = effect.plan
        changes = effect.horizon.outlook.until(count - 1)
        self._in_flight.clear()
        for turn, process in enumerate(processes, start=count - len(processes)):
            batch = next((c.batch for c in reversed(changes) if c.turn <= turn), plan.batch)
            end = timeline.ends_ns[turn - count]
            self._in_flight.append(InFlight(plan, plan.shift + turn, batch, end, process))

    def _await_step(self) -> StepResult:
        plan, shift, batch, end, process = self._in_flight.popleft()
        self.now = max(self.now, end) + process
        self.recorder.landed((self.now,), (process,))
        return self.outcomes.result(plan, shift, batch)

    def _report(self, report: Report) -> None:
        if self._drafts and report.outcome is not None:
            self.outcomes.note_lengths(report.outcome)
        ended = self.recorder.reported(report, self.now, self._due)
        for row in ended:
            self.source.ended(row, self.now)
        if self.on_progress is not None:
            departures = report.advance.departures if report.advance is not None else ()
            self.on_progress(len(ended) + sum([len(each.ended) for each in departures]))

    # ---- steps ---------------------------------------------------------------------------------

    def _cut(self, horizon: Horizon, plan: StepPlan) -> Horizon:
        """Shorten what is certain to what this driver foresees."""
        if not self.fast_forward:
            return horizon._replace(steps=1)
        steps = min(horizon.steps, self.outcomes.steps_before_stop(plan))
        change = horizon.outlook.change(0) if self.source.has_later_turns else None
        steps = steps if change is None else min(steps, change.turn)  # a turn may follow an end
        return horizon if steps == horizon.steps else horizon._replace(steps=steps)

    def _parts(self, plan: StepPlan, horizon: Horizon) -> Iterator[Part]:
        """Yield what the steps of a batch become as it shrinks, one part when it is asked for."""
        index = 0
        while (change := horizon.outlook.change(index)) is not None:
            turn, batch = change.turn, change.batch
            schedule, launch, process = self._host_times(len(batch.members), 0)
            work = DecodeWork(self.shape, batch, plan.shift + turn)
            device = decode_times(self.cost, work)
            yield Part(turn, work.num_seqs, schedule, launch, process, device)
            index += 1

    def _host_times(self, num_seqs: int, prompt_tokens: int) -> tuple[int, int, int]:
        """Return what planning, launching and processing a step take, ns."""
        known = None if prompt_tokens else self._hosts.get(num_seqs)
        if known is None:
            is_alone = self.size == 1
            known = self.cost.host.of_step(num_seqs, prompt_tokens, is_alone=is_alone)
            if not prompt_tokens:
                self._hosts[num_seqs] = known
        return known

    def _device_times(self, plan: StepPlan) -> tuple[StepWork | None, int, Iterator[int]]:
        """Return a step's work, where it is not one row each, its rows, and device times, ns.

        The times are those of the step and of further ones of the same batch. A model of one's own
        is asked for each when the step is taken.
        """
        if not plan.batch.members:
            # A placeholder, but only in a group: for the others' sake.
            work = step_work(self.shape, plan)
            if self.size == 1:
                return work, 1, repeat(0)
            if hasattr(self.cost, "decode_times"):
                return work, 1, repeat(self.cost.device_ns(work))
            return work, 1, (self.cost.device_ns(work) for _ in repeat(None))
        if plan.is_prefill or plan.rows_each > 1:
            work = step_work(self.shape, plan)
            return work, work.rows, repeat(self.cost.device_ns(work))
        steps = DecodeWork(self.shape, plan.batch, plan.shift)
        return None, steps.num_seqs, decode_times(self.cost, steps)

    def _count_due(self, turns: Sequence[int], first: int) -> None:
        """Note who arrived while steps were taken without a look at the world.

        What a turn processes sees the arrivals of the turn before it, from step `first` on.
        """
        for index, time_ns in enumerate(turns, start=first):
            due = self.source.count_due(time_ns)
            if due:
                self._due.append((index, due))
