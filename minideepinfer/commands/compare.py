"""`mdi compare`: two runs side by side, and whether they made the same decisions.

Read next: `mdi_analysis/compare.py`.
"""

from typing import Annotated

import typer

from minideepinfer.commands import options as o
from minideepinfer.commands.files import make_folder, read_run, require_folder, require_output
from minideepinfer.commands.results import parse_slo
from minideepinfer.commands.screen import show_json, show_table, tell


def compare(
    a: o.RunPath,
    b: o.RunPath,
    *,
    names: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Names of the two in the tables. (default: a b)", show_default=False),
    ] = None,
    slo: o.Bounds = None,
    expect_identical: Annotated[
        bool, typer.Option("--expect-identical", help="Exit with 1 when a decision differs.")
    ] = False,
    html: o.Html = None,
    plots: o.Plots = None,
    json: o.Json = False,
) -> None:
    """Compare two runs: latencies, step times, rates, decisions.

    Differences are (b - a) / a.
    """
    bounds = parse_slo(slo)
    if html is not None:
        require_output("html", html, (".html",))
    if plots is not None:
        require_folder("plots", plots)
    first, second = read_run(a), read_run(b)
    import mdi_analysis
    from mdi_analysis.drawing import make_plot_folder
    from minideepinfer.run_summary import label

    shown = ("a", "b") if names is None else names
    found = mdi_analysis.compare(first, second, shown, slo=bounds)
    bases = {shown[0]: label(first.metadata), shown[1]: label(second.metadata)}
    if html is not None:
        make_folder(html)
    png = None if plots is None else make_plot_folder(plots) / "comparison.png"
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
