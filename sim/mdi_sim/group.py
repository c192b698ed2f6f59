"""Simulated data-parallel ranks together: they look, vote, sleep, and run their steps as one group.

A rank goes on until it needs the group, in its own time. Ranks that nothing happens to stay in
their launch (`stretch.py`) while others look, vote and plan; what they would have said is known.

Read next: `driver.py` (one rank), `stretch.py` (steps).
"""

from collections.abc import Iterable, Sequence

from mdi_shared.loop import POLL, Vote
from mdi_shared.vote import ANY, decide
from mdi_sim.driver import Meeting, RankDriver
from mdi_sim.stretch import Lane, Timeline


class Group:
    """The ranks of a run; `meetings` are what those that are awake wait for."""

    def __init__(self, drivers: Sequence[RankDriver], timeline: Timeline) -> None:
        self.drivers = drivers
        self.timeline = timeline
        self._meetings: dict[RankDriver, Meeting] = {}

    def run(self) -> None:
        """Let the ranks go on until all have ended."""
        if len(self.drivers) == 1:
            self._run_alone(self.drivers[0])
            return
        meetings = self._meetings
        for driver in self.drivers:
            meetings[driver] = driver.go_on(None)
        while True:
            first = next(iter(meetings.values()))
            if first is None:
                return
            if type(first) is Lane:
                self._launch()
            elif type(first) is Vote:
                self._vote(first)
            elif first is POLL:
                # By time: a look that comes after the run's end ends it.
                self._look(sorted(meetings, key=lambda driver: driver.now))
            else:
                self._await_arrival()

    def _run_alone(self, driver: RankDriver) -> None:
        """A rank of its own meets nobody."""
        timeline, asked = self.timeline, driver.go_on(None)
        while asked is not None:
            if type(asked) is Lane:
                timeline.lanes = [asked]
                timeline.run(timeline.lanes)
                asked = driver.go_on(driver.landed(timeline))
            else:
                asked = driver.go_on(driver.wakes(driver.source.next_ns(), driver.now))

    def _launch(self) -> None:
        timeline, meetings = self.timeline, self._meetings
        timeline.lanes = [driver.lane for driver in self.drivers if driver.lane is not None]
        woken = timeline.run([driver.lane for driver in meetings if driver.lane is not None])
        meetings.clear()
        self._wake([driver for driver in self.drivers if driver.lane in woken])

    def _wake(self, drivers: Iterable[RankDriver]) -> None:
        for driver in drivers:
            self._meetings[driver] = driver.go_on(driver.landed(self.timeline))

    def _look(self, drivers: Iterable[RankDriver]) -> None:
        for driver in drivers:
            self._meetings[driver] = driver.go_on(driver.look())

    def _asleep(self) -> list[RankDriver]:
        return [driver for driver in self.drivers if driver not in self._meetings]

    def _vote(self, vote: Vote) -> None:
        """Combine ballots; ranks that are in their launch have none of their own to cast."""
        meetings, asleep = self._meetings, self._asleep()
        rule, is_start = vote.ballot.rule, vote.topic == "unfinished"
        wants = [cast.ballot.want for cast in meetings.values() if isinstance(cast, Vote)]
        if is_start:
            wants += [not driver.lane.horizon.is_idle for driver in asleep if driver.lane]
            verdict = any(wants)
            matters = not verdict
        else:
            waits = [driver.lane.horizon.has_waiting for driver in asleep if driver.lane]
            verdict = matters = decide(rule, wants) and (rule == ANY or all(waits))
        if matters and asleep:
            self._wake_up_to(vote.topic, asleep)
            return
        now = self.timeline.now_ns if asleep else 0
        now = max(now, max([driver.now for driver in meetings]))
        for driver in meetings:
            meetings[driver] = driver.go_on(driver.met(verdict, now))

    def _wake_up_to(self, topic: str, drivers: list[RankDriver]) -> None:
        """Wake ranks in the midst of a turn and let them come to its vote on `topic`."""
        self._wake(drivers)
        self._look(drivers)
        for driver in drivers if topic != "unfinished" else ():
            driver.met(verdict=True, now_ns=self.timeline.now_ns)
            self._meetings[driver] = driver.go_on(True)

    def _await_arrival(self) -> None:
        """Sleep together: a rank that looked on its own could miss what another just took."""
        meetings = self._meetings
        wake_ns = min([driver.source.next_ns() for driver in meetings])
        now = max([driver.now for driver in meetings])
        for driver in meetings:
            meetings[driver] = driver.go_on(driver.wakes(wake_ns, now))
