"""`mdi convert`: a request trace in any known format into one of this project's.

Read next: `mdi_traces/formats/__init__.py` (what is read), `mdi_traces/io.py` (what is written).
"""

from pathlib import Path
from typing import Annotated

import typer

from minideepinfer.commands.files import TRACE_ENDINGS, read_requests, require_output
from minideepinfer.commands.screen import tell


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Trace in any known format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help=f"Ends in {', '.join(TRACE_ENDINGS)}.")
    ],
    *,
    format: Annotated[str | None, typer.Option(help="Format of IN.")] = None,
    limit: Annotated[int | None, typer.Option(help="First N rows only.", metavar="N")] = None,
    speed: Annotated[float | None, typer.Option(help="Divide all times by X.", metavar="X")] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="Arrival times for a trace without any, like poisson:5.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrival times.", metavar="N")] = 0,
    closed_loop: Annotated[
        bool | None,
        typer.Option(
            "--closed-loop/--open-loop",
            help="Turn gaps inside sessions into think times, or drop think times.",
        ),
    ] = None,
    sort: Annotated[bool, typer.Option("--sort", help="Order the rows by arrival.")] = False,
) -> None:
    """Convert a request trace to Parquet, JSON lines or CSV, by the ending of OUT.

    CSV does not carry the metadata (source, licence).
    """
    require_output("OUT", target, TRACE_ENDINGS)
    trace = read_requests(
        source, format=format, limit=limit, sort=sort, arrivals=arrivals, seed=seed,
        closed_loop=bool(closed_loop),
    )  # fmt: skip
    if closed_loop is False:
        trace = trace.to_open_loop()
    if speed is not None:
        trace = trace.scaled(speed)
    verb = "replaced" if target.exists() else "wrote"
    trace.save(target)
    tell(f"{verb} {target}: {len(trace):,} requests")
    for note in trace.metadata.notes:
        tell(f"note: {note}")
