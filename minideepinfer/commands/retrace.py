"""`mdi retrace`: a recorded run once more in the simulator, at the times it really had.

Read next: `mdi_sim/retrace.py`.
"""

from pathlib import Path
from typing import Annotated

import typer

from minideepinfer.commands.files import read_run, require_output
from minideepinfer.commands.screen import show_json, show_table, tell


def retrace(
    run: Annotated[Path, typer.Argument(help="Recorded run, by its prefix or one of its files.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Save the simulated run.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Replay a recorded run in the simulator: does it make the same decisions?

    Polls, launches and results happen when the record says; what differs then is a decision.
    Exits with 1 when one differs.
    """
    if out is not None:
        require_output("out", out.with_name(f"{out.name}.steps.parquet"))
    real = read_run(run)
    import mdi_analysis
    from mdi_sim.retrace import replay_recorded

    simulated = replay_recorded(real)
    if out is not None:
        simulated.save(out)
        tell(f"saved run {out}")
    found = mdi_analysis.compare(real, simulated, ("real", "simulated"))
    if json:
        show_json(found.to_dict())
    else:
        show_table(found.table())
    if not found.plans.identical:
        tell(f"the decisions differ: {found.plans}")
        raise typer.Exit(1)
