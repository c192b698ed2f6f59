"""`simulate` for users: a trace or its file in, a run that can be summed up, drawn and saved out.

The simulation itself is `mdi_sim`. Nothing here changes a result: same trace, options and seed,
same tables.

Read next: `mdi_sim/simulate.py` (the simulation), `mdi_shared/config.py` (scheduler options).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import V41_FLASH, ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.placement import Placement
from mdi_sim.simulate import simulate as run_simulation
from mdi_traces.formats import load_requests
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run
from minideepinfer.saving import save_run

if TYPE_CHECKING:
    from mdi_analysis import SLO
    from minideepinfer.run_summary import RunSummary


class SimulatedRun(Run):
    """Steps, items and requests of a simulation; `wall_s` is the real time it took, s."""

    def __init__(self, run: Run, wall_s: float) -> None:
        super().__init__(run.steps_table, run.requests_table, run.metadata, lambda: run.items_table)
        self.wall_s = wall_s

    def summary(self, slo: "SLO | None" = None, *, itl: bool = True) -> "RunSummary":
        """Return every metric; with `slo` the goodput, too.

        `itl=False` leaves inter-token latency out, which needs one row per sequence and step.
        """
        from minideepinfer.run_summary import summarize

        return summarize(self, slo, itl=itl, wall_s=self.wall_s)

    def save(self, prefix: str | os.PathLike[str], *, items: bool = True) -> list[Path]:
        """Write the run's files and return their paths; see `saving.py`. Raises `TraceError`."""
        return save_run(self, prefix, items=items)

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Draw latency, timeline, step times and throughput as PNG; return their paths."""
        from mdi_analysis import save_plots

        return save_plots(self, Path(directory))


def simulate(
    work: RequestTrace | str | os.PathLike[str],
    *,
    cost: StepCost | None = None,
    scheduler: SchedulerConfig | None = None,
    ranks: int = 1,
    shape: ModelShape = V41_FLASH,
    placement: Placement | None = None,
    seed: int = 0,
    draft_accept_rate: float = 0.7,
    until_s: float | None = None,
    fast_forward: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> SimulatedRun:
    """Serve `work`, a request trace or the path of one in any known format, in virtual time.

    Left out, `cost` is an H200 roofline of `shape` with experts split over `ranks`. The run stops
    at `until_s` virtual seconds. Options are those of `mdi_sim.simulate`. Raises `ConfigError`,
    `TraceError` for a broken trace file, and `DeadlockError`.
    """
    trace = work if isinstance(work, RequestTrace) else load_requests(work)
    began = time.perf_counter()
    run = run_simulation(
        trace,
        scheduler=scheduler,
        cost=cost,
        shape=shape,
        ranks=ranks,
        placement=placement,
        seed=seed,
        draft_accept_rate=draft_accept_rate,
        until_s=until_s,
        fast_forward=fast_forward,
        on_progress=on_progress,
    )
    return SimulatedRun(run, time.perf_counter() - began)
