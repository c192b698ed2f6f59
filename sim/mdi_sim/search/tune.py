"""Chooses scheduler settings by simulation: `tune(trace, …) -> Tuning`.

A coarse grid finds the region, then the best setting moves to its best neighbour until none is
better, first in steps of two and then of the root of two. Trials of a round run in parallel
processes; the result does not depend on how many. Default and best are simulated again with step
times off by the model's error, and a gain counts only where the two ranges do not overlap.

Read next: `settings.py` (what is tried), `model_error.py` (the error bars), docs/tuning.md.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

from mdi_shared.config import SchedulerConfig
from mdi_shared.describe_run import RunOptions, describe_run
from mdi_shared.errors import ConfigError, DeadlockError, MiniDeepInferError, require_int
from mdi_shared.run_description import RunDescription
from mdi_sim.many import run_many
from mdi_sim.search.model_error import held_out_error, unfit_kinds
from mdi_sim.search.settings import DEFAULT_TRIALS, changes_of, coarse_grid, mean_of, neighbours
from mdi_sim.search.tuning import OBJECTIVES, THROUGHPUT, Measured, Range, Trial, Tuning, merit
from mdi_sim.simulate import simulate
from mdi_traces.columns import ints
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run

NEGLIGIBLE = 0.001  # a relative difference this small is none
STEP_FACTORS = (2.0, 2.0**0.5)
# A setting, and whether all steps take longer or shorter by the model's error; None: as it says.
_Task = tuple[SchedulerConfig, bool | None]


def tune(
    trace: RequestTrace,
    description: RunDescription | None = None,
    *,
    measure: Callable[[Run], Measured],
    objective: str = THROUGHPUT,
    jobs: int = 1,
    trials: int = DEFAULT_TRIALS,
    on_trial: Callable[[int], None] | None = None,
    **options: Unpack[RunOptions],
) -> Tuning:
    """Search the settings that serve `trace` best, starting from the run as described.

    `measure` turns a run into numbers and must be picklable when `jobs` > 1, the number of
    processes. "throughput" maximises tokens per second, "goodput" the share of requests within
    the SLO that `measure` knows, ties by tokens per second. At most `trials` settings are tried;
    where the grid is larger, the run's seed draws which part of it. `on_trial` is called with the
    number of settings that were just tried. `options` are those of `describe_run`.

    A `KeyboardInterrupt` ends the search; what it has so far is returned. Raises `ConfigError`
    for bad options, and the error of the trials when not one of them could run.
    """
    if objective not in OBJECTIVES:
        raise ConfigError("objective", objective, f"must be one of {', '.join(OBJECTIVES)}")
    for name, value in (("jobs", jobs), ("trials", trials)):
        require_int(name, value, 1)
    run = describe_run(description, **options)
    run.scheduler.require_pool_fits()
    return _Search(_Job(trace, run, measure), objective, jobs, trials, on_trial).run()


@dataclass(frozen=True, slots=True)
class _Job:
    """What all trials share; sent to the processes that run them."""

    trace: RequestTrace
    description: RunDescription
    measure: Callable[[Run], Measured]

    def __call__(self, task: _Task) -> Trial:
        """Simulate one setting, on request with the model's error added or taken off."""
        config, slower = task
        known = cost = self.description.step_cost
        error = held_out_error(cost)
        if slower is not None:
            assert error is not None, "only a model that states its error is scaled by it"
            cost = error.scale(cost, slower=slower)
        trial = replace(self.description, scheduler=config, cost=cost)
        try:
            run = simulate(self.trace, trial, chunk_cost=known)
        except DeadlockError as stuck:
            return Trial(config, None, str(stuck))
        return Trial(config, self.measure(run))


@dataclass(slots=True)
class _Search:
    """The search as it goes: what was tried, and what is the best of it."""

    job: _Job
    objective: str
    jobs: int
    most: int
    on_trial: Callable[[int], None] | None
    tried: dict[SchedulerConfig, Trial] = field(default_factory=dict)

    @property
    def base(self) -> SchedulerConfig:
        return self.job.description.scheduler

    def run(self) -> Tuning:
        ranges: list[Range | None] = [None, None]
        interrupted = False
        try:
            self._search()
            ranges = self._ranges()
        except KeyboardInterrupt:
            interrupted = True
            if not any(trial.measured for trial in self.tried.values()):
                raise  # there is nothing to show
        return Tuning(
            self.objective, tuple(self.tried.values()), self.best, ranges[0], ranges[1],
            interrupted, self._notes(),
        )  # fmt: skip

    @property
    def best(self) -> Trial:
        """The best trial so far; raises when none could run.

        Of those that are nearly as good as the very best, the one that changes least: a budget
        that gains a thousandth is no reason to touch it.
        """
        ran = [trial for trial in self.tried.values() if trial.measured is not None]
        if not ran:
            raise MiniDeepInferError(f"no setting could run; the default: "
                                     f"{self.tried[self.base].error}")  # fmt: skip
        for which in range(len(merit(self.objective, ran[0].measured))):
            merits = [merit(self.objective, trial.measured)[which] for trial in ran]
            least = max(merits) * (1 - NEGLIGIBLE)
            ran = [trial for trial, own in zip(ran, merits, strict=True) if own >= least]

        def order(trial: Trial) -> tuple[int, float]:
            merits = merit(self.objective, trial.measured)
            return len(changes_of(self.base, trial.config)), -merits[-1]

        return min(ran, key=order)

    def _search(self) -> None:
        self._try([self.base])
        contexts = ints(self.job.trace.table["prompt_len"]).tolist()
        grid = coarse_grid(self.job.description, mean_of(contexts) // 2)
        room = self.most - len(self.tried)
        if len(grid) > room:
            chosen = sorted(random.Random(self.job.description.seed).sample(range(len(grid)), room))
            grid = [grid[index] for index in chosen]
        self._try(grid)
        for factor in STEP_FACTORS:
            while len(self.tried) < self.most:
                before = self.best
                self._try(neighbours(self.base, before.config, factor))
                if self.best is before:
                    break

    def _try(self, configs: Sequence[SchedulerConfig]) -> None:
        """Simulate settings that were not tried yet, as many as are allowed."""
        fresh = [config for config in configs if config not in self.tried]
        for trial in self._simulate([(c, None) for c in fresh[: self.most - len(self.tried)]]):
            self.tried[trial.config] = trial
            if self.on_trial is not None:
                self.on_trial(1)

    def _ranges(self) -> list[Range | None]:
        """Simulate default and best with the model's error; None where there is no such range."""
        if held_out_error(self.job.description.step_cost) is None:
            return [None, None]
        configs = [self.base, self.best.config]
        tasks: list[_Task] = [(config, slower) for config in configs for slower in (True, False)]
        found = [trial.measured for trial in self._simulate(tasks)]
        pairs = (found[:2], found[2:])
        return [Range(a, b) if a is not None and b is not None else None for a, b in pairs]

    def _simulate(self, tasks: Sequence[_Task]) -> Iterator[Trial]:
        """Yield the trials of `tasks`, in their order."""
        named = [(f"setting {number}", task) for number, task in enumerate(tasks, 1)]
        return run_many(self.job, named, jobs=self.jobs)

    def _notes(self) -> tuple[str, ...]:
        notes = [
            f"the model's errors on {kind} steps are too large to choose settings by"
            for kind in unfit_kinds(self.job.description.step_cost)
        ]
        failed = [trial for trial in self.tried.values() if trial.error is not None]
        if failed:
            notes.append(f"{len(failed)} settings could not run, the first: {failed[0].error}")
        best = self.best
        for name, trial in (("default", self.tried[self.base]), ("best", best)):
            measured = trial.measured
            if measured is not None and measured.extrapolated:
                notes.append(f"{measured.extrapolated:,} of {measured.steps:,} steps of the {name} "
                             "setting lie outside what the model was fitted on")  # fmt: skip
            if best is self.tried[self.base]:
                break
        return tuple(notes)
