"""`mdi generate-workload`: a synthetic request trace from a preset.

Read next: `mdi_traces/generate.py` (the presets and how near they come to their sources).
"""

from pathlib import Path
from typing import Annotated

import typer

from mdi_shared.errors import MiniDeepInferError
from mdi_shared.served import Served
from minideepinfer.commands import options as o
from minideepinfer.commands.describing import load_served
from minideepinfer.commands.files import TRACE_ENDINGS, make_folder, require_output
from minideepinfer.commands.screen import facts_table, show_table, tell


def generate_workload(
    preset: Annotated[
        str | None, typer.Argument(help="Name of the preset; see --list.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Argument(help=f"Ends in {', '.join(TRACE_ENDINGS)}.", show_default=False),
    ] = None,
    *,
    requests: o.Requests = None,
    seed: o.Seed = None,
    rate: o.Rate = None,
    arrivals: o.Arrivals = None,
    listed: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
) -> None:
    """Write a synthetic request trace."""
    if listed:
        show_table(facts_table("Presets", describe_presets()))
        return
    if preset is None or out is None:
        raise MiniDeepInferError("give a preset and a file to write: mdi generate-workload PRESET "
                                 "OUT (--list shows the presets)")  # fmt: skip
    require_output("OUT", out, TRACE_ENDINGS)
    served = Served(workload=preset, requests=requests, rate=rate, arrivals=arrivals)
    trace = load_served(served, seed)
    verb = "replaced" if out.exists() else "wrote"
    make_folder(out)
    trace.save(out)
    tell(f"{verb} {out}: {len(trace):,} requests of {preset}, seed {seed or 0}")


def describe_presets() -> list[tuple[str, str]]:
    """Return name and description of each preset: source, arrivals, lengths, tolerance."""
    from mdi_traces.generate import PUBLISHED, WORKLOADS

    presets = []
    for name, workload in WORKLOADS.items():
        lines = [workload.source, f"arrivals {workload.arrivals}"]
        if name in PUBLISHED:
            prompt, output = PUBLISHED[name]
            lines.append(
                f"mean prompt {prompt.mean:,.0f} tokens (within {prompt.mean_tolerance:.0%}), "
                f"mean output {output.mean:,.0f} (within {output.mean_tolerance:.0%}), "
                "medians and upper quantiles as published"
            )
        presets.append((name, "\n".join(lines)))
    return presets
