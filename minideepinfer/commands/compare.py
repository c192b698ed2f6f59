"""`mdi compare`: two runs side by side, and whether they made the same decisions.

Read next: `mdi_analysis/compare.py`.
"""

from pathlib import Path
from typing import Annotated

import typer

from minideepinfer.commands.files import read_run, require_output
from minideepinfer.commands.screen import show_json, show_table, tell


def compare(
    a: Annotated[Path, typer.Argument(help="Run, by its prefix or one of its files.")],
    b: Annotated[Path, typer.Argument(help="The other run.")],
    *,
    names: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Names of the two in the tables. (default: a b)", show_default=False),
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Bound on TTFT for goodput.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Bound on TPOT for goodput.")] = None,
    expect_identical: Annotated[
        bool, typer.Option("--expect-identical", help="Exit with 1 when a decision differs.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write tables and overlaid plots as one page.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw both runs over each other.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare two runs: latencies, step times, rates, decisions.

    Differences are (b - a) / a.
    """
    for name, path, ending in (("html", html, ".html"), ("png", png, ".png")):
        if path is not None:
            require_output(name, path, (ending,))
    first, second = read_run(a), read_run(b)
    import mdi_analysis
    from minideepinfer.labels import label

    bounded = slo_ttft_ms is not None or slo_tpot_ms is not None
    slo = mdi_analysis.SLO(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms) if bounded else None
    shown = ("a", "b") if names is None else names
    found = mdi_analysis.compare(first, second, shown, slo=slo)
    bases = {shown[0]: label(first.metadata), shown[1]: label(second.metadata)}
    written = mdi_analysis.save_overlay(found, first, second, html=html, png=png, basis=bases)
    for path in written:
        tell(f"wrote {path}")
    if json:
        show_json({**found.to_dict(), "basis": bases, "written": [str(path) for path in written]})
    else:
        rests = [f"{name}: {basis}" for name, basis in bases.items() if basis is not None]
        show_table(found.table(), *rests)
    if expect_identical and not found.plans.identical:
        tell(f"the runs differ: {found.plans}")
        raise typer.Exit(1)
