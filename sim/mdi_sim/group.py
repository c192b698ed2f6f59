"""What simulated data-parallel ranks do together: vote, sleep, and run their steps as one group.

A rank keeps its own time, which runs ahead of the event queue's, and comes back to it where ranks
meet. A group of one meets nobody and needs no event.
"""

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import simpy

from mdi_shared.cost.group import GroupCost
from mdi_shared.vote import Ballot, decide
from mdi_sim.stretch import NEVER, Devices, Lane, Stretch

Value = TypeVar("Value")
Common = TypeVar("Common")


class Barrier(Generic[Value, Common]):
    """A rendezvous of all ranks; `combine` makes of their values, by rank, what all leave with."""

    def __init__(
        self, env: simpy.Environment, size: int, combine: Callable[[list[Value]], Common]
    ) -> None:
        self._env = env
        self._size = size
        self._combine = combine
        self._values: dict[int, Value] = {}
        self._full = env.event()

    def meet(self, rank: int, value: Value) -> Generator[simpy.Event, Common, Common]:
        """Bring a value; all leave when the last rank has come."""
        if self._size == 1:
            return self._combine([value])
        self._values[rank] = value
        full, values = self._full, self._values
        if len(values) == self._size:
            self._values, self._full = {}, self._env.event()
            full.succeed(self._combine([values[rank] for rank in range(self._size)]))
        return (yield full)


class Group:
    """The ranks' common state: where they meet, and their devices.

    `looks_cost` says that taking arrivals in takes time. The run ends at `until_ns`.
    """

    def __init__(
        self, env: simpy.Environment, size: int, cost: GroupCost | None = None, *,
        until_ns: int = NEVER, looks_cost: bool = False,
    ) -> None:  # fmt: skip
        self.env = env
        self.size = size
        self.until_ns = until_ns
        self.devices = Devices(cost if size > 1 else None, looks_cost=looks_cost)
        self.votes: Barrier[tuple[Ballot, int], tuple[bool, int]] = Barrier(env, size, _decide)
        self.launches: Barrier[Lane, Stretch] = Barrier(env, size, self.run)
        # The ranks meet for the next arrival: one that looked on its own could miss what another
        # just took, and go home while the others wait for it in their next vote.
        self.arrivals: Barrier[tuple[int, int], tuple[int, int]] = Barrier(env, size, _earliest)

    def run(self, lanes: list[Lane]) -> Stretch:
        """Run a stretch of all ranks' steps."""
        return self.devices.run(lanes, until_ns=self.until_ns)


def _decide(votes: list[tuple[Ballot, int]]) -> tuple[bool, int]:
    """Return the verdict on (ballot, time) of each rank, and when all had voted."""
    verdict = decide(votes[0][0].rule, [ballot.want for ballot, _ in votes])
    return verdict, max([time_ns for _, time_ns in votes])


def _earliest(looks: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the next arrival, of (arrival, time) of each rank, and when all had looked."""
    return min([next_ns for next_ns, _ in looks]), max([time_ns for _, time_ns in looks])
