"""`mdi simulate`: replay requests in virtual time and say what came of it.

It checks every option and output path before it begins, and writes no file before the simulation
has ended.

Read next: `simulate_options.py` (what can be asked for), `minideepinfer/simulated.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mdi_shared.chunking import fallback_note
from mdi_shared.placement import placement_by_name
from minideepinfer.commands.declare import Given, takes_options
from minideepinfer.commands.files import require_folder, require_output
from minideepinfer.commands.screen import progress, show_json, show_table, tell
from minideepinfer.commands.simulate_options import SimulateOptions, settle
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
    from minideepinfer.simulated import SimulatedRun

MOST_ITEMS = 5_000_000  # above, inter-token latency would take longer than the simulation


@takes_options(SimulateOptions)
def simulate(given: Given) -> None:
    """Replay a request trace, or a generated workload, in virtual time.

    Prints a summary; --out saves the run.
    Step times come from a roofline (uncalibrated), or from a model with --cost,
    fitted (mdi calibrate) or predicted (mdi transfer).
    """
    options, scheduler_options = settle(given, SimulateOptions)
    fitted = read_cost(options)
    shape = make_shape(options, fitted)
    config = make_scheduler(options, scheduler_options, shape, options.slo_tpot_ms)
    config.require_pool_fits()
    cost = make_cost(options, fitted, shape)
    placement = placement_by_name(options.placement)
    check_outputs(options)
    work = make_work(options)
    from minideepinfer.simulated import simulate as run_simulation

    with progress(len(work)) as on_progress:
        run = run_simulation(
            work,
            cost=cost,
            scheduler=config,
            ranks=options.ranks,
            shape=shape,
            placement=placement,
            seed=options.seed,
            draft_accept_rate=accept_rate(options),
            until_s=options.until_s,
            fast_forward=options.fast_forward,
            on_progress=on_progress,
        )
    notes = [memory_note(cost, shape, config), model_note(cost, shape),
             ranks_note(cost, options.ranks), fallback_note(config, cost)]  # fmt: skip
    report(run, options, [*work.metadata.notes, *(note for note in notes if note is not None)])


def check_outputs(options: SimulateOptions) -> None:
    """Raise `ConfigError` for bounds and paths that could not serve, before any work."""
    make_slo(options)
    if options.out is not None:
        require_output("out", options.out.with_name(f"{options.out.name}.steps.parquet"))
    if options.plots is not None:
        require_folder("plots", options.plots)
    if options.perfetto is not None:
        require_output("perfetto", options.perfetto, (".json", ".json.gz"))


def make_slo(options: SimulateOptions) -> "SLO | None":
    """Return the bounds for goodput, None when there are none."""
    if options.slo_ttft_ms is None and options.slo_tpot_ms is None:
        return None
    from mdi_analysis import SLO

    return SLO(ttft_ms=options.slo_ttft_ms, tpot_ms=options.slo_tpot_ms)


def report(run: "SimulatedRun", options: SimulateOptions, notes: list[str]) -> None:
    """Save, draw and export the run as asked, then print its summary."""
    from mdi_traces.columns import ints

    written = write_outputs(run, options)
    items = int(ints(run.steps_table["n_seqs"]).sum())
    if items > MOST_ITEMS:
        notes.append(f"inter-token latency is left out: {items:,} rows would be needed")
    summary = run.summary(make_slo(options), itl=items <= MOST_ITEMS)
    if options.json:
        show_json({
            "summary": summary.to_dict(),
            "config": run.metadata.config,
            "notes": notes,
            "written": [str(path) for path in written],
        })  # fmt: skip
    else:
        show_table(summary.table(), *(f"note: {note}" for note in notes))


def write_outputs(run: "SimulatedRun", options: SimulateOptions) -> list[Path]:
    """Write what the options name, telling what was replaced; return the paths."""
    from minideepinfer.saving import run_files

    written: list[Path] = []
    if options.out is not None:
        verb = "replaced" if run_files(options.out) else "saved"
        written += run.save(options.out)
        tell(f"{verb} run {options.out} ({len(written)} files)")
    if options.plots is not None:
        written += run.plot(options.plots)
        tell(f"drew {options.plots}")
    if options.perfetto is not None:
        from mdi_analysis import export_perfetto

        verb = "replaced" if options.perfetto.exists() else "wrote"
        written.append(export_perfetto(run, options.perfetto))
        tell(f"{verb} {options.perfetto}")
    return written
