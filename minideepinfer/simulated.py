"""`simulate` for users: a trace or its file in, a run that can be summed up, drawn and saved out.

The simulation itself is `mdi_sim`. Nothing here changes a result: same trace, options and seed,
same tables.

Read next: `mdi_sim/simulate.py` (the simulation), `mdi_shared/config.py` (scheduler options).
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack

from mdi_shared.describe_run import RunOptions, describe_run
from mdi_shared.run_description import RunDescription
from mdi_shared.run_notes import run_notes
from mdi_sim.many import run_many
from mdi_sim.simulate import simulate as run_simulation
from mdi_traces.formats import load_requests
from mdi_traces.pacing import unused_note
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run

if TYPE_CHECKING:
    from mdi_analysis import SLO
    from minideepinfer.run_summary import RunSummary


Result = TypeVar("Result")


class SimulatedRun(Run):
    """Steps, items and requests of a simulation, and the description it followed.

    `wall_s` is the real time it took, s; `notes` say what speaks against its figures.
    """

    def __init__(self, run: Run, description: RunDescription, wall_s: float) -> None:
        super().__init__(run.step_pieces, run.requests_table, run.metadata, run.item_pieces,
                         spans=run.token_spans)  # fmt: skip
        self.description = description
        trace = RequestTrace(run.requests_table, run.metadata)
        reuses = description.scheduler.enable_prefix_cache
        unused = unused_note(trace, description.policy, reuses_prefixes=reuses)
        of_trace = run.metadata.notes if unused is None else (*run.metadata.notes, unused)
        self.notes = (*of_trace, *run_notes(description))
        self.wall_s = wall_s

    def summary(self, slo: "SLO | None" = None, *, itl: bool = True) -> "RunSummary":
        """Return every metric; with `slo` the goodput, too.

        `itl=False` leaves inter-token latency out.
        """
        from minideepinfer.run_summary import summarize

        return summarize(self, slo, itl=itl, wall_s=self.wall_s)

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Draw latency, timeline, step times and throughput as PNG; return their paths."""
        from mdi_analysis import save_plots

        return save_plots(self, Path(directory))


def simulate(
    work: RequestTrace | str | os.PathLike[str],
    description: RunDescription | None = None,
    *,
    fast_forward: bool = True,
    on_progress: Callable[[int], None] | None = None,
    **options: Unpack[RunOptions],
) -> SimulatedRun:
    """Serve `work`, a request trace or the path of one in any known format, in virtual time.

    `options` are those of `RunOptions`: `cost`, `scheduler`, `ranks`, `shape`, `hardware`,
    `placement`, `seed`, `until_s` and so on; left out, they are chosen so that they can exist, and
    the summary begins with what was chosen. With a `description` they change it. The others are
    those of `mdi_sim.simulate`. Raises `ConfigError`, `TraceError` for a broken trace file, and
    `DeadlockError`.
    """
    run = describe_run(description, **options)
    trace = work if isinstance(work, RequestTrace) else load_requests(work)
    began = time.perf_counter()
    found = run_simulation(trace, run, fast_forward=fast_forward, on_progress=on_progress)
    return SimulatedRun(found, run, time.perf_counter() - began)


def simulate_many(
    work: RequestTrace | str | os.PathLike[str],
    changes: Mapping[str, RunOptions],
    description: RunDescription | None = None,
    *,
    measure: Callable[[SimulatedRun], Result],
    jobs: int = 1,
    **options: Unpack[RunOptions],
) -> dict[str, Result]:
    """Serve the same `work` as described, once for each entry of `changes`, `jobs` at a time.

    An entry names a run and gives the options that differ from `options`. Returns by these names,
    in their order, what `measure` makes of each run: `SimulatedRun.summary`, or a function that
    saves the run. It is called where the run was made, in a process of its own if `jobs` > 1, so
    that the run's tables need not leave it. Raises as `simulate` does; errors of a simulation begin
    with the run's name.
    """
    base = describe_run(description, **options)
    tasks = [(name, describe_run(base, **changed)) for name, changed in changes.items()]
    trace = work if isinstance(work, RequestTrace) else load_requests(work)
    job = _Measured(trace, measure)
    return dict(zip(changes, run_many(job, tasks, jobs=jobs), strict=True))


@dataclass(frozen=True, slots=True)
class _Measured(Generic[Result]):
    """Simulates and measures one of many runs."""

    trace: RequestTrace
    measure: Callable[[SimulatedRun], Result]

    def __call__(self, description: RunDescription) -> Result:
        return self.measure(simulate(self.trace, description))
