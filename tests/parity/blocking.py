"""A plain blocking driver: one thread per rank, a runner with launch and wait, virtual durations.

It is written the way a driver of real devices is: straight-line code that blocks, with no event
queue. Each rank keeps its own clock; ranks meet at votes and in their steps. Only durations are
taken from the cost model, so that its run can be compared with the simulator's, time by time.
"""

import threading
from collections import deque

from mdi_shared.cost.work import step_work
from mdi_shared.loop import (
    AwaitArrival,
    AwaitStep,
    Launch,
    News,
    Poll,
    Report,
    Vote,
    serve,
)
from mdi_shared.vote import decide
from mdi_sim.stretch import NEVER
from mdi_traces.recorder import Launches


class FakeDevices:
    """The ranks' devices: a step starts when all ranks have launched it and the last one ended."""

    def __init__(self, size):
        self.size = size
        self.lock = threading.Condition()
        self.launched = {}  # step number -> {rank: (ready, duration, queued)}
        self.times = {}  # step number -> (start, end)
        self.free_at = 0
        self.failed = False

    def launch(self, rank, step, ready, duration, queued):
        with self.lock:
            ranks = self.launched.setdefault(step, {})
            ranks[rank] = (ready, duration, queued)
            if len(ranks) == self.size:
                start = max(self.free_at, *(r for r, _, _ in ranks.values()))
                end = start + max(d for _, d, _ in ranks.values())
                end = max(end, *(q for _, _, q in ranks.values()))
                self.times[step] = (start, end)
                self.free_at = end
                self.lock.notify_all()

    def wait(self, step):
        with self.lock:
            self.lock.wait_for(lambda: step in self.times or self.failed, timeout=300)
            assert step in self.times, "the other ranks never launched this step"
            return self.times[step]


class Exchange:
    """An all-gather between threads."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.values = [None] * size

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait(timeout=300)
        values = list(self.values)
        self.barrier.wait(timeout=300)
        return values


class BlockingRank:
    """One rank: `run` blocks until everything is served."""

    def __init__(self, rank, *, scheduler, sources, devices, exchange, recorder, parts, front):
        self.rank = rank
        self.scheduler = scheduler
        self.sources = sources
        self.devices = devices
        self.exchange = exchange
        self.front = front
        self.recorder = recorder
        self.request_of, self.outcomes, self.shape, self.cost = parts
        self.now = 0
        self.flights = deque()

    def run(self):
        loop = serve(self.scheduler, num_ranks=len(self.sources))
        answer = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                return
            answer = self.answer(effect)

    def answer(self, effect):
        if isinstance(effect, Poll):
            return self.poll()
        if isinstance(effect, Vote):
            before = self.now
            votes = self.exchange.gather(self.rank, (effect.ballot, self.now))
            self.now = max(now for _, now in votes)
            self.waited += self.now - before
            return decide(effect.ballot.rule, [ballot.want for ballot, _ in votes])
        if isinstance(effect, Launch):
            return self.launch(effect.plan)
        if isinstance(effect, AwaitStep):
            return self.await_step()
        if isinstance(effect, AwaitArrival):
            next_ns = self.sources[self.rank].next_ns()
            both = self.exchange.gather(self.rank, (next_ns, self.now))
            self.now = max(now for _, now in both)
            coming = min(t for t, _ in both)
            self.now = max(self.now, 0 if coming == NEVER else coming)
            return coming != NEVER
        assert isinstance(effect, Report)
        self.report(effect)
        return None

    def poll(self):
        self.polled, self.waited = self.now, 0
        if self.front is not None:
            # All have processed the step before: whoever comes first places for everybody.
            latest = max(self.exchange.gather(self.rank, self.now))
            with self.devices.lock:
                self.front.hand_out(latest)
        requests = []
        for row in self.sources[self.rank].take(self.now):
            request, stop = self.request_of(row, self.sources[self.rank].arrived_ns.get(row))
            seq_id = self.recorder.submitted(row)
            if stop is not None:
                self.outcomes.stops_at(seq_id, request, stop)
            requests.append(request)
        self.ingress = self.cost.host.ingress(sum(request.prompt_len for request in requests))
        return News(tuple(requests), now_ns=self.now)

    def launch(self, plan):
        is_alone = len(self.sources) == 1
        schedule, launch, _ = self.cost.host.of_step(
            len(plan.seq_ids), plan.prompt_tokens, is_alone=is_alone
        )
        planned = self.now + self.ingress + schedule
        self.now = planned + launch
        work = step_work(self.shape, plan)
        duration = self.cost.device_ns(work) if plan.seq_ids or not is_alone else 0
        queued = self.now + self.cost.host.queue(plan.prompt_tokens)
        self.devices.launch(self.rank, plan.step, self.now, duration, queued)
        times = Launches(self.polled, planned, self.now, self.waited, duration)
        self.outcomes.planned(plan)
        self.recorder.launched(plan, work, times)
        self.flights.append(plan)
        return 1

    def await_step(self):
        plan = self.flights.popleft()
        start, end = self.devices.wait(plan.step)
        is_alone = len(self.sources) == 1
        process = self.cost.host.of_step(len(plan.seq_ids), plan.prompt_tokens, is_alone=is_alone)[
            2
        ]
        self.now = max(self.now, end) + process
        self.recorder.landed_one(start, end, self.now, process)
        return self.outcomes.result(plan, plan.shift)

    def report(self, report):
        if self.outcomes.needs_lengths and report.outcome is not None:
            self.outcomes.note_lengths(report.outcome)
        for row in self.recorder.reported(report, self.now):
            self.sources[self.rank].ended(row, self.now)


def run_threads(ranks):
    """Run all ranks, each in its thread; re-raise the first failure."""
    failures = []

    def guarded(rank):
        try:
            rank.run()
        except BaseException as error:  # noqa: BLE001 - re-raised by the main thread
            failures.append(error)
            rank.devices.failed = True
            rank.exchange.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
