"""`mdi tune`: which scheduler settings serve a workload best, by simulation.

Interrupted, it shows what it has so far. Nothing is written but the plot asked for.

Read next: `describing.py` (most of its options), `minideepinfer/tune_report.py` (what is
shown), `mdi_sim/search/tune.py` (the search).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mdi_shared.errors import ConfigError, require_int
from mdi_shared.run_notes import run_notes
from mdi_sim.search.settings import DEFAULT_TRIALS
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import scheduler_options, takes_options
from minideepinfer.commands.describing import (
    MEMORY,
    SimulatedOptions,
    described,
    load_served,
    memory_options,
    notes_on,
)
from minideepinfer.commands.files import require_folder
from minideepinfer.commands.results import parse_slo
from minideepinfer.commands.screen import INTERRUPTED, progress, show_json, show_table, tell
from minideepinfer.commands.values import num_jobs

if TYPE_CHECKING:
    from mdi_analysis import SLO
    from minideepinfer.tune_report import TuneReport

GOAL = "Goal"


@dataclass(frozen=True, kw_only=True)
class TuneOptions(SimulatedOptions):
    """What `mdi tune` can be asked for."""

    slo: o.Bounds = None
    goal: Annotated[str | None, o.option(
        "--for", metavar="GOAL", panel=GOAL, help="throughput: most input and output tokens per "
        "second. Instead of --slo.")] = None  # fmt: skip
    trials: Annotated[int, o.option(
        "--trials", metavar="N", panel=GOAL,
        help=f"Most settings tried (default: {DEFAULT_TRIALS}).")] = DEFAULT_TRIALS  # fmt: skip
    jobs: o.Jobs = None
    plots: o.Plots = None
    json: o.Json = False


@takes_options(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Search chunk size, prefill attempts and seats for an SLO or for throughput, by simulation.

    Prints the settings that none beats in everything, and the recommended one with its gain over
    the default and the step-time model's error beside it. --set gives the default to start from.
    """
    slo = read_goal(options)
    jobs = num_jobs(options.jobs)
    require_int("trials", options.trials, 1)
    if options.plots is not None:
        require_folder("plots", options.plots)
    run = described(options, slo.tpot_ms if slo else None)
    work = load_served(run.served, run.seed)
    from minideepinfer.tune_report import TuneReport
    from minideepinfer.tuned import tune as run_tune

    with progress(options.trials, "settings") as on_trial:
        found = run_tune(work, run, slo=slo, jobs=jobs, trials=options.trials, on_trial=on_trial)
    notes = (*notes_on(work, run.policy), *run_notes(run), *found.notes)
    given = scheduler_options(options, MEMORY)
    pool = memory_options(options, given)
    _show(TuneReport(found, run, slo, notes, given, {"cost": options.cost, **pool}), options)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _show(report: "TuneReport", options: TuneOptions) -> None:
    """Draw and print what was found."""
    if options.plots is not None:
        report.plot(options.plots)
        tell(f"drew {options.plots}")
    if options.json:
        show_json(report.document())
    else:
        show_table(*report.tables())


def read_goal(options: TuneOptions) -> "SLO | None":
    """Return the SLO to meet, None for throughput. Raises `ConfigError` unless one is named."""
    if options.goal not in (None, "throughput"):
        raise ConfigError("for", options.goal, "must be throughput (or give --slo instead)")
    if (options.slo is None) == (options.goal is None):
        raise ConfigError("slo", options.slo, "say what to tune for: either --slo with bounds, "
                          "such as ttft=2000,tpot=50, or --for throughput")  # fmt: skip
    return parse_slo(options.slo)
