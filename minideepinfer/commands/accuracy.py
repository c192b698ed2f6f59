"""`mdi accuracy`: each recorded run against its simulation by a model that never saw it.

Read next: `minideepinfer/accuracy.py` (what is done), docs/accuracy.md (what came out).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minideepinfer.commands import options as o
from minideepinfer.commands.files import require_runs
from minideepinfer.commands.screen import progress, show_json, show_table
from minideepinfer.commands.values import num_jobs

if TYPE_CHECKING:
    from minideepinfer.accuracy import RunAccuracy

FIGURES = {"output_tok_s_gpu": "output\ntokens/s", "ttft_mean": "TTFT\nmean",
           "ttft_p99": "TTFT\nP99", "tpot_mean": "TPOT\nmean", "tpot_p99": "TPOT\nP99"}  # fmt: skip
HEADERS = ("run", "requests", *FIGURES.values(), "prefill steps\nP50 / P90",
           "decode steps\nP50 / P90")  # fmt: skip
SPREAD = "TTFT mean, step\ntimes off by 1 %"
# Title -> columns. On a screen of 100 characters the figures of the run and of its steps part.
TABLES = {
    "(simulated - recorded) / recorded; *: above 3 % (tokens/s), 5 % (means), 10 % (P99)":
        (0, 1, 2, 3, 4, 5, 6, 9),
    "single steps, |simulated - recorded| / recorded": (0, 7, 8),
}  # fmt: skip


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
    jobs: o.Jobs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Leave each recorded run out, fit step times to the others, and simulate it from arrivals.

    Errors are (simulated - recorded) / recorded; runs of the same requests are left out together.
    """
    require_runs(traces)
    from mdi_analysis.report import make_table
    from minideepinfer.accuracy import accuracy as judge

    runs = []
    with progress(len(only) if only else len(traces), "runs") as advance:
        for run in judge(traces, only, spread=spread, jobs=num_jobs(jobs)):
            runs.append(run)
            if advance is not None:
                advance(1)
    if as_json:
        show_json({"runs": [run.to_dict() for run in runs]})
    elif markdown:
        typer.echo("\n".join(as_markdown(runs)))
    else:
        headers, rows = table_of(runs, "{}*")
        for title, columns in TABLES.items():
            names, *lines = [[cells[i] for i in columns if i < len(cells)]
                             for cells in (headers, *rows)]  # fmt: skip
            show_table(make_table(title, names, lines))
        show_table(worst_of(runs))


def as_markdown(runs: Sequence["RunAccuracy"]) -> list[str]:
    """Return the table's lines, and which run is worst; a figure that misses its bar is bold."""
    headers, rows = table_of(runs, "**{}**")
    names = [header.replace("\n", " ") for header in headers]
    lines = [names, ("---", *["---:"] * (len(headers) - 1)), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), "", worst_of(runs)]


def table_of(
    runs: Sequence["RunAccuracy"], missed: str
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headers and rows, a figure beyond its bar written as `missed` says."""
    has_spread = any(run.ttft_range for run in runs)
    return (*HEADERS, SPREAD) if has_spread else HEADERS, [_cells(run, missed) for run in runs]


def _cells(run: "RunAccuracy", missed: str) -> tuple[str, ...]:
    relative = []
    for name in FIGURES:
        value = run.relative[name]
        text = "–" if value is None else f"{value:+.1%}"
        relative.append(missed.format(text) if name in run.beyond else text)
    steps = [
        f"{each.p50:.1%} / {each.p90:.1%}" if (each := run.steps.get(kind)) else "–"
        for kind in ("prefill", "decode")
    ]
    both = run.ttft_range
    spread = [] if both is None else [f"{both[0]:+.1%} to {both[1]:+.1%}"]
    return run.name, str(run.requests), *relative, *steps, *spread


def worst_of(runs: Sequence["RunAccuracy"]) -> str:
    """Return which run and figure is worst by its bar, and how many runs miss one."""
    worst = max(runs, key=lambda run: run.of_bar(run.worst))
    figure = FIGURES[worst.worst].replace("\n", " ")
    return (f"worst: {worst.name}, {figure} {worst.relative[worst.worst] or 0.0:+.1%}; "
            f"{sum(bool(run.beyond) for run in runs)} of {len(runs)} runs miss a bar")  # fmt: skip
