"""`mdi capacity`: the highest rate at which bounds hold, how sure that is, and what breaks first.

Runs are kept in the folder `--out` as those of `mdi lab` are: a killed search goes on.

Read next: `minideepinfer/capacity_result.py` (the same in Python), docs/lab.md,
`mdi_sim/search/capacity.py` (the search).
"""

from dataclasses import dataclass
from typing import Annotated

import typer

from mdi_shared.errors import ConfigError
from mdi_sim.search.settings import DEFAULT_TOLERANCE
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import takes_options
from minideepinfer.commands.files import require_folder
from minideepinfer.commands.lab import AXES, ExperimentOptions, described_lab
from minideepinfer.commands.screen import progress, show_json, show_table, tell
from minideepinfer.commands.values import num_jobs

RUNS_OF_ONE = 9  # of one search, as a rule; for the bar only


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(ExperimentOptions):
    """What `mdi capacity` can be asked for."""

    trace: Annotated[str | None, typer.Argument(
        metavar="TRACE", show_default=False,
        help="Workload preset (mdi generate-workload --list) or trace file.",
    )] = None  # fmt: skip
    load: Annotated[str | None, o.option(
        "--load", metavar="LOAD", panel=AXES,
        help="How the rate is applied: rate={rate} (the default) scales the trace's own times, "
        "arrivals=poisson:{rate} draws them, for each seed anew.")] = None  # fmt: skip
    start: Annotated[float | None, o.option(
        "--start", metavar="R", panel=AXES,
        help="Rate to begin with, per second (default: the trace's own).")] = None  # fmt: skip
    tolerance: Annotated[float, o.option(
        "--tolerance", metavar="X", panel=AXES,
        help=f"How near the search of one seed comes, as a ratio (default: {DEFAULT_TOLERANCE:g}).",
    )] = DEFAULT_TOLERANCE  # fmt: skip


@takes_options(CapacityOptions)
def capacity(options: CapacityOptions) -> None:
    """Search the highest rate at which a service level holds, with its uncertainty.

    By bisection, for each seed and policy; says which bound breaks first.
    """
    require_folder("out", options.out)
    jobs = num_jobs(options.jobs)
    if options.slo is None:
        raise ConfigError("slo", None, "say which bounds are to hold, such as "
                          "--slo 'ttft<=300,tpot<=30'")  # fmt: skip
    from mdi_sim.executors import require_cluster
    from mdi_sim.search.capacity import BY_RATE
    from minideepinfer.capacity_result import own_rate, search, tables

    require_cluster(options.cluster)
    traces = None if options.trace is None else [options.trace]
    wanted = described_lab(options, traces, None)
    start = own_rate(wanted) if options.start is None else options.start
    guess = RUNS_OF_ONE * len(wanted.variants) * len(wanted.seeds)
    with progress(guess, "runs") as on_run:
        found = search(
            wanted, options.out, start=start, load=options.load or BY_RATE,
            tolerance=options.tolerance, jobs=jobs, cluster=options.cluster, on_run=on_run,
        )  # fmt: skip
    tell(f"wrote {options.out / 'capacity.parquet'} ({len(found.rows)} runs)")
    if options.json:
        show_json(found.to_dict())
    else:
        show_table(*tables(found))
