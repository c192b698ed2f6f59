"""`mdi tune`: which scheduler settings serve a workload best, by simulation.

Interrupted, it shows what it has so far. Nothing is written but the plot asked for.

Read next: `simulate_options.py` (most of its options), `minideepinfer/tune_report.py` (what is
shown), `mdi_sim/search/tune.py` (the search).
"""
# ruff: noqa: RUF009 - `option` returns a dataclass field, as `dataclasses.field` does

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mdi_shared.errors import ConfigError
from mdi_shared.placement import placement_by_name
from mdi_sim.search.settings import DEFAULT_TRIALS
from minideepinfer.commands.declare import Given, option, takes_options
from minideepinfer.commands.files import require_output
from minideepinfer.commands.screen import progress, show_json, show_table, tell
from minideepinfer.commands.simulate_options import RESULTS, ServingOptions, settle
from minideepinfer.commands.simulate_setup import (
    accept_rate,
    make_cost,
    make_scheduler,
    make_shape,
    make_work,
    memory_note,
    model_note,
    ranks_note,
    read_cost,
)

if TYPE_CHECKING:
    from mdi_analysis import SLO
    from minideepinfer.tune_report import TuneReport

GOAL = "Goal"
SLO_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(ServingOptions):
    """What `mdi tune` can be asked for."""

    slo: str | None = option(
        None, "--slo", metavar="BOUNDS", panel=GOAL,
        help="Serve most requests within these bounds, ms: ttft=2000,tpot=50 (also e2e).",
    )  # fmt: skip
    goal: str | None = option(
        None, "--for", metavar="GOAL", panel=GOAL,
        help="throughput: most input and output tokens per second. Instead of --slo.",
    )  # fmt: skip
    trials: int = option(
        DEFAULT_TRIALS, "--trials", metavar="N", panel=GOAL, help="Most settings tried."
    )
    jobs: int | None = option(
        None, "--jobs", "-j", metavar="N", panel=GOAL,
        help="Processes that simulate at the same time (default: all cores).",
    )  # fmt: skip
    plot: Path | None = option(
        None, "--plot", metavar="FILE.png", panel=RESULTS, in_file=False,
        help="Draw all settings: goal against latency.",
    )  # fmt: skip


@takes_options(TuneOptions)
def tune(given: Given) -> None:
    """Search chunk size, prefill attempts and seats for an SLO or for throughput, by simulation.

    Prints the settings that none beats in everything, and the recommended one with its gain over
    the default and the step-time model's error beside it. --set gives the default to start from.
    """
    options, scheduler_options = settle(given, TuneOptions, "tune")
    slo = read_goal(options)
    jobs = options.jobs if options.jobs is not None else os.cpu_count() or 1
    for name, value in (("jobs", jobs), ("trials", options.trials)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    if options.plot is not None:
        require_output("plot", options.plot, (".png",))
    fitted = read_cost(options)
    shape = make_shape(options, fitted)
    config = make_scheduler(options, scheduler_options, shape, slo.tpot_ms if slo else None)
    config.require_pool_fits()
    cost = make_cost(options, fitted, shape)
    work = make_work(options)
    from minideepinfer.tune_report import TuneReport
    from minideepinfer.tuned import tune as run_tune

    with progress(options.trials, "settings") as on_trial:
        found = run_tune(
            work,
            cost=cost,
            slo=slo,
            scheduler=config,
            ranks=options.ranks,
            shape=shape,
            placement=placement_by_name(options.placement),
            seed=options.seed,
            draft_accept_rate=accept_rate(options),
            until_s=options.until_s,
            jobs=jobs,
            trials=options.trials,
            on_trial=on_trial,
        )
    extra = [memory_note(cost, shape, config), model_note(cost, shape),
             ranks_note(cost, options.ranks)]  # fmt: skip
    notes = (*work.metadata.notes, *(note for note in extra if note is not None), *found.notes)
    report = TuneReport(found, slo, cost.describe(), notes, scheduler_options, options.cost,
                        options.kv_cache_memory_gb, options.ranks)  # fmt: skip
    _show(report, options)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _show(report: "TuneReport", options: TuneOptions) -> None:
    """Draw and print what was found."""
    if options.plot is not None:
        verb = "replaced" if options.plot.exists() else "drew"
        report.plot(options.plot)
        tell(f"{verb} {options.plot}")
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
    if options.slo is None:
        return None
    from mdi_analysis import SLO

    return SLO(**_bounds(options.slo))


def _bounds(text: str) -> Mapping[str, float]:
    """Read `name=ms` pairs with commas between them."""
    found: dict[str, float] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in SLO_NAMES:
            raise ConfigError("slo", pair, "must be NAME=MS with a name of "
                              f"{', '.join(SLO_NAMES)}")  # fmt: skip
        if SLO_NAMES[name] in found:
            raise ConfigError("slo", pair, f"{name} is set twice")
        try:
            found[SLO_NAMES[name]] = float(value)
        except ValueError:
            raise ConfigError("slo", pair, "must be a number of ms, without a unit") from None
    return found
