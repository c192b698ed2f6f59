"""What simulated data-parallel ranks do together: vote, and run each step as one group."""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import simpy

from mdi_shared.cost.group import GroupCost
from mdi_shared.cost.step_cost import group_device_ns
from mdi_shared.cost.work import StepWork
from mdi_shared.vote import Ballot, decide

Waits = Generator[simpy.Event, None, None]


Value = TypeVar("Value")


class Barrier(Generic[Value]):
    """A rendezvous of all ranks that hands everyone all the values brought to it."""

    def __init__(self, env: simpy.Environment, size: int) -> None:
        self._env = env
        self._size = size
        self._values: list[Value] = []
        self._full = env.event()

    def meet(self, value: Value) -> Generator[simpy.Event, list[Value], list[Value]]:
        """Bring a value; all leave, with all the values, when the last rank has come."""
        self._values.append(value)
        full, values = self._full, self._values
        if len(values) == self._size:
            self._values, self._full = [], self._env.event()
            full.succeed(values)
        return (yield full)


@dataclass(slots=True, eq=False)
class DeviceStep:
    """One step of the group on its devices; times are known once all ranks have launched it."""

    known: simpy.Event
    device_ns: list[int] = field(default_factory=list)  # by rank, in the order of launches
    works: list[StepWork] = field(default_factory=list)
    ready_ns: int = 0  # when the last rank was ready to start it
    queued_ns: int = 0
    start_ns: int = -1
    end_ns: int = -1


class Group:
    """The ranks' common state: where they meet, and their devices.

    Every device start waits for the slowest rank (docs/rules.md, R26), and since ranks meet in
    each layer's expert exchange, the step ends for all with the slowest one, or when `cost` says
    (R34). A group of one exchanges nothing.
    """

    def __init__(self, env: simpy.Environment, size: int, cost: GroupCost | None = None) -> None:
        self.env = env
        self.size = size
        self.cost = cost if size > 1 else None
        self._votes: Barrier[Ballot] = Barrier(env, size)
        self._arrivals: Barrier[int | None] = Barrier(env, size)
        self._open: deque[DeviceStep] = deque()  # oldest first: steps that not all have launched
        self._launched = [0] * size  # of them, per rank
        self._device_free_ns = 0

    def vote(self, ballot: Ballot) -> Generator[simpy.Event, list[Any], bool]:
        """Combine the ranks' ballots; all leave when the last one has voted."""
        ballots = yield from self._votes.meet(ballot)
        return decide(ballot.rule, [b.want for b in ballots])

    def next_arrival(self, next_ns: int | None) -> Generator[simpy.Event, list[Any], int | None]:
        """Return the earliest arrival known to any rank; None when no rank knows of one.

        The ranks meet for it: one that looked on its own could miss what another just took, and
        go home while the others wait for it in their next vote.
        """
        times = yield from self._arrivals.meet(next_ns)
        return min((time for time in times if time is not None), default=None)

    def launch(
        self, rank: int, ready_ns: int, device_ns: int, work: StepWork, queued_ns: int
    ) -> DeviceStep:
        """Enter a rank's next step, ready to start at `ready_ns` and taking `device_ns` alone.

        It cannot end before `queued_ns`, when its host has given it all of its work.
        """
        index = self._launched[rank]
        self._launched[rank] += 1
        if index == len(self._open):
            self._open.append(DeviceStep(self.env.event()))
        step = self._open[index]
        step.device_ns.append(device_ns)
        step.works.append(work)
        step.ready_ns = max(step.ready_ns, ready_ns)
        step.queued_ns = max(step.queued_ns, queued_ns)
        if len(step.works) == self.size:  # then it is the oldest
            step.start_ns = max(self._device_free_ns, step.ready_ns)
            step.end_ns = max(step.start_ns + self._device_ns(step), step.queued_ns)
            self._device_free_ns = step.end_ns
            step.known.succeed()
            self._open.popleft()
            self._launched = [count - 1 for count in self._launched]
        return step

    def _device_ns(self, step: DeviceStep) -> int:
        if self.cost is None:
            return group_device_ns(step.device_ns)
        return self.cost.device_ns(step.device_ns, step.works)
