"""`mdi show`: what a file is, where it comes from, what is in it.

A run is summed up, with its slowest steps; a request trace gets its columns, lengths and time
span. It checks no laws.

Read next: `describe.py` (the facts), `check.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdi_shared.errors import ConfigError
from mdi_shared.served import Served
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import takes_options
from minideepinfer.commands.describe import (
    STEP_TIMES,
    columns,
    head_rows,
    origin,
    request_statistics,
    slowest_steps,
    step_times,
)
from minideepinfer.commands.describing import load_served
from minideepinfer.commands.files import is_run, read_run
from minideepinfer.commands.results import ViewOptions, parse_slo, write_views
from minideepinfer.commands.screen import facts_table, show_json, show_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mdi_traces.run import Run

SLOWEST = 5


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ViewOptions):
    """What `mdi show` can be asked for."""

    path: Annotated[Path, typer.Argument(help="Request trace, or a run by its prefix or a file.")]
    head: Annotated[int, typer.Option(help="Also show the first N rows.", metavar="N")] = 0
    format: o.Format = None
    arrivals: o.Arrivals = None


@takes_options(ShowOptions)
def show(options: ShowOptions) -> None:
    """Show what a trace file holds, or a run: origin, summary, pictures.

    A run, recorded or simulated, can also be drawn and exported, and held against bounds.
    """
    if options.head < 0:
        raise ConfigError("head", options.head, "must be at least 0 rows")
    options.check()
    if is_run(options.path):
        _show_run(read_run(options.path), options)
        return
    for name in ("plots", "perfetto", "html", "slo"):
        if getattr(options, name) is not None:
            raise ConfigError(name, str(getattr(options, name)), f"needs a run; {options.path} is "
                              "none")  # fmt: skip
    served = Served(trace=str(options.path), format=options.format, arrivals=options.arrivals)
    trace = load_served(served, 0)
    facts: dict[str, Any] = {
        "path": str(options.path),
        "table": "requests",
        "rows": len(trace),
        "origin": origin(trace.metadata),
        "columns": columns(trace.table, "requests"),
        "statistics": request_statistics(trace),
        "head": head_rows(trace.table, options.head),
    }
    if options.json:
        show_json(facts)
    else:
        show_table(*_request_tables(facts))


def _show_run(run: "Run", options: ShowOptions) -> None:
    from minideepinfer.run_summary import summarize

    summary = summarize(run, parse_slo(options.slo))
    tables = {"steps": run.steps_table, "items": run.items_table, "requests": run.requests_table}
    facts: dict[str, Any] = {
        "path": str(options.path),
        "table": "run",
        "rows": {name: len(table) for name, table in tables.items() if table is not None},
        "origin": origin(run.metadata),
        "step_times_ms": step_times(run.steps_table),
        "slowest_steps": slowest_steps(run, SLOWEST),
        "head": head_rows(run.steps_table, options.head),
        "written": [str(path) for path in write_views(run, options, summary)],
    }
    if options.json:
        show_json({**facts, "summary": summary.to_dict()})
        return
    show_table(
        *_origin_tables(facts),
        "",
        summary.table(),
        *_time_tables(facts["step_times_ms"]),
        "",
        _rows_table("Slowest steps", facts["slowest_steps"]),
        *_head_tables(facts),
    )


def _request_tables(facts: Mapping[str, Any]) -> list["RenderableType"]:
    from mdi_analysis.report import make_table, number

    statistics = dict(facts["statistics"])
    tokens = statistics.pop("tokens")
    stats = list(next(iter(tokens.values())))
    rows = [(name, *(number(values[s]) for s in stats)) for name, values in tokens.items()]
    columns = [tuple(column.values()) for column in facts["columns"]]
    return [
        *_origin_tables(facts),
        facts_table("", [(name, number(value)) for name, value in statistics.items()]),
        "",
        make_table("Lengths, tokens", ("column", *stats), rows),
        make_table("Columns", ("column", "type", "unit", "meaning"), columns, n_text=4),
        *_head_tables(facts),
    ]


def _origin_tables(facts: Mapping[str, Any]) -> list["RenderableType"]:
    rows = facts["rows"]
    counts = rows if isinstance(rows, Mapping) else {facts["table"]: rows}
    size = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    known = [(name, _text(value)) for name, value in facts["origin"].items()]
    return [facts_table(f"{facts['path']}: {size}", known)]


def _time_tables(times: Mapping[str, Mapping[str, float]]) -> list["RenderableType"]:
    """Return where a step's time goes, host and device side by side; nothing for a simulation."""
    from mdi_analysis.report import make_table, number

    if not times:
        return []
    names = [name.removesuffix("_ms") for name in STEP_TIMES]
    rows = [(kind, *(number(medians.get(name)) for name in STEP_TIMES))
            for kind, medians in times.items()]  # fmt: skip
    return ["", make_table("Medians of a step's times, ms", ("kind", *names), rows)]


def _head_tables(facts: Mapping[str, Any]) -> list["RenderableType"]:
    return ["", _rows_table("First rows", facts["head"])] if facts["head"] else []


def _rows_table(title: str, rows: list[dict[str, Any]]) -> "RenderableType":
    """Return rows as lines of name=value: a table of fifty columns fits no terminal."""
    lines = [
        (str(index), "  ".join(f"{name}={_text(value)}" for name, value in row.items()))
        for index, row in enumerate(rows)
    ]
    return facts_table(title, lines)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(v)}" for name, v in value.items()) or "defaults"
    if isinstance(value, list | tuple):
        return " ".join(_text(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
