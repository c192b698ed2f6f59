"""`mdi accuracy`: each recorded run against its simulation by a model that never saw it.

Read next: `minideepinfer/accuracy.py` (what is done), docs/accuracy.md (what came out).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minideepinfer.commands.files import require_runs
from minideepinfer.commands.screen import progress, show_json, show_table

if TYPE_CHECKING:
    from minideepinfer.accuracy import RunAccuracy

HEADERS = ("run", "requests", "output tokens/s", "TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99",
           "prefill steps P50 / P90", "decode steps P50 / P90")  # fmt: skip
SPREAD = "TTFT mean, step times off by 1 %"


def accuracy(
    traces: Annotated[list[Path], typer.Argument(help="Runs, by prefix or one of their files.")],
    *,
    only: Annotated[
        list[str] | None, typer.Option(help="Judge these runs only; all others are fitted to.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
    spread: Annotated[
        bool, typer.Option("--spread", help="Also: mean TTFT with device times off by up to 1 %.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Leave each recorded run out, fit step times to the others, and simulate it from arrivals.

    Errors are (simulated - recorded) / recorded; runs of the same requests are left out together.
    """
    require_runs(traces)
    from mdi_analysis.report import make_table
    from minideepinfer.accuracy import accuracy as judge

    found = []
    with progress(len(only) if only else len(traces), "runs") as advance:
        for each in judge(traces, only, spread=spread):
            found.append(each)
            if advance is not None:
                advance(1)
    if as_json:
        show_json({"runs": [each.to_dict() for each in found]})
    elif markdown:
        typer.echo("\n".join(as_markdown(found)))
    else:
        headers = (*HEADERS, SPREAD) if spread else HEADERS
        show_table(make_table("errors of the simulation", headers, [cells(run) for run in found]))


def as_markdown(found: Iterable["RunAccuracy"]) -> list[str]:
    """Return the table's lines; a figure that misses its bar is bold."""
    rows = [cells(run) for run in found]
    headers = (*HEADERS, SPREAD) if rows and len(rows[0]) > len(HEADERS) else HEADERS
    lines = [headers, ("---", *["---:"] * (len(headers) - 1)), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def cells(run: "RunAccuracy") -> tuple[str, ...]:
    """Return a run's row of the table."""
    relative = []
    for name in ("output_tok_s_gpu", "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99"):
        value = run.relative[name]
        text = "–" if value is None else f"{value:+.1%}"
        relative.append(f"**{text}**" if name in run.beyond else text)
    steps = [
        f"{found.p50:.1%} / {found.p90:.1%}" if (found := run.steps.get(kind)) else "–"
        for kind in ("prefill", "decode")
    ]
    both = run.ttft_range
    spread = [] if both is None else [f"{both[0]:+.1%} to {both[1]:+.1%}"]
    return run.name, str(run.requests), *relative, *steps, *spread
