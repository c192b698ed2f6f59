"""`mdi retrace`: a run once more in the simulator, at the times it really had.

Read next: `mdi_sim/retrace.py`.
"""

from typing import TYPE_CHECKING

import typer

from minideepinfer.commands import options as o
from minideepinfer.commands.files import read_run, require_run_output
from minideepinfer.commands.results import save_out
from minideepinfer.commands.screen import show_json, show_table

if TYPE_CHECKING:
    from mdi_analysis import PlanIdentity


def retrace(run: o.RunPath, *, out: o.MaybeOut = None, json: o.Json = False) -> None:
    """Replay a recorded run in the simulator: does it make the same decisions?

    Polls, launches and results happen when the record says; what differs then is a decision.
    Says so in one sentence, then compares. Exits with 1 when a decision differs.
    """
    if out is not None:
        require_run_output("out", out)
    first = read_run(run)
    import mdi_analysis
    from mdi_sim.retrace import replay_recorded

    again = replay_recorded(first)
    if out is not None:
        save_out(again, out)
    was = "simulated" if first.metadata.source == "simulator" else "real"
    names = (was, "retraced")
    found = mdi_analysis.compare(first, again, names)
    sentence = verdict(found.plans, was)
    if json:
        show_json({"verdict": sentence, **found.to_dict()})
    else:
        show_table(sentence, "", found.table())
    if not found.plans.identical:
        raise typer.Exit(1)


def verdict(plans: "PlanIdentity", was: str) -> str:
    """Say in one sentence whether the decisions are the same, or where they first differ."""
    where = plans.difference
    if where is None:
        return (f"identical: the retraced run makes all {plans.identical_steps:,} decisions of the "
                f"{was} one (compared: {plans.basis})")  # fmt: skip
    return (f"the decisions differ: after {plans.identical_steps:,} equal steps, step {where.step} "
            f"of rank {where.rank} has another {where.what}: {was} {where.a}, retraced "
            f"{where.b}")  # fmt: skip
