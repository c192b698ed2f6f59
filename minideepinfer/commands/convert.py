"""`mdi convert`: a request trace in any known format into one of this project's.

Read next: `mdi_traces/formats/__init__.py` (what is read), `mdi_traces/io.py` (what is written).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from minideepinfer.commands import options as o
from minideepinfer.commands.declare import takes_options
from minideepinfer.commands.describing import TraceOptions, load_served, served_by
from minideepinfer.commands.files import TRACE_ENDINGS, make_folder, require_output
from minideepinfer.commands.screen import tell


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(TraceOptions):
    """What `mdi convert` can be asked for."""

    trace: o.TracePath
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help=f"Ends in {', '.join(TRACE_ENDINGS)}.")
    ]
    arrivals: o.Arrivals = None
    closed_loop: o.ClosedLoop = None
    speed: o.Speed = None
    max_prompt: o.MaxPrompt = None
    max_output: o.MaxOutput = None
    seed: o.Seed = None


@takes_options(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Convert a request trace to Parquet, JSON lines or CSV, by the ending of OUT.

    CSV does not carry the metadata (source, licence). --closed-loop turns gaps inside sessions into
    think times, --open-loop drops think times.
    """
    target = options.target
    require_output("OUT", target, TRACE_ENDINGS)
    trace = load_served(served_by(options), options.seed)
    verb = "replaced" if target.exists() else "wrote"
    make_folder(target)
    trace.save(target)
    tell(f"{verb} {target}: {len(trace):,} requests")
    for note in trace.metadata.notes:
        tell(f"note: {note}")
