"""`mdi simulate`: replay requests in virtual time and say what came of it.

It checks every option and output path before it begins, and writes no file before the simulation
has ended.

Read next: `describing.py` (from options to a run), `results.py`, `minideepinfer/simulated.py`.
"""

from dataclasses import dataclass
from typing import Annotated

from minideepinfer.commands import options as o
from minideepinfer.commands.declare import takes_options
from minideepinfer.commands.describing import SimulatedOptions, described, load_served
from minideepinfer.commands.results import RunResults, parse_slo, report_run
from minideepinfer.commands.screen import progress


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(RunResults, SimulatedOptions):
    """What `mdi simulate` can be asked for."""

    fast_forward: Annotated[bool, o.option(
        "--fast-forward/--no-fast-forward", panel=o.ENGINE,
        help="Advance unchanging decode batches as one event; the result is the same.",
    )] = True  # fmt: skip


@takes_options(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Replay a request trace, or a generated workload, in virtual time.

    Prints a summary; --out saves the run.
    Step times come from a roofline (uncalibrated), or from a model with --cost,
    fitted (mdi calibrate) or predicted (mdi transfer).
    """
    options.check()
    slo = parse_slo(options.slo)
    run = described(options, slo.tpot_ms if slo else None)
    work = load_served(run.served, run.seed)
    import minideepinfer.simulated as simulated

    with progress(len(work)) as on_progress:
        found = simulated.simulate(
            work, run, fast_forward=options.fast_forward, on_progress=on_progress
        )
    report_run(found, options, found.notes, wall_s=found.wall_s)
