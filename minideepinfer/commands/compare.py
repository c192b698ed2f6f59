"""`mdi compare`: two runs side by side, and whether they made the same decisions.

Read next: `mdi_analysis/compare.py`.
"""

from dataclasses import dataclass
from typing import Annotated

import typer

from minideepinfer.commands import options as o
from minideepinfer.commands.declare import takes_options
from minideepinfer.commands.files import make_folder, read_run, require_folder, require_output
from minideepinfer.commands.results import parse_slo
from minideepinfer.commands.screen import show_json, show_table, tell


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What `mdi compare` can be asked for."""

    a: o.RunPath
    b: o.RunPath
    names: Annotated[tuple[str, str] | None, o.option(
        "--names", help="Names of the two in the tables (default: a b).")] = None  # fmt: skip
    slo: o.Bounds = None
    expect_identical: Annotated[bool, o.option(
        "--expect-identical", help="Exit with 1 when a decision differs.")] = False  # fmt: skip
    html: o.Html = None
    plots: o.Plots = None
    json: o.Json = False


@takes_options(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compare two runs: latencies, step times, rates, decisions.

    Differences are (b - a) / a.
    """
    bounds, html, plots = parse_slo(options.slo), options.html, options.plots
    if html is not None:
        require_output("html", html, (".html",))
    if plots is not None:
        require_folder("plots", plots)
    first, second = read_run(options.a), read_run(options.b)
    import mdi_analysis
    from mdi_analysis.drawing import make_plot_folder
    from minideepinfer.run_summary import label

    names = options.names or ("a", "b")
    found = mdi_analysis.compare(first, second, names, slo=bounds)
    bases = {names[0]: label(first.metadata), names[1]: label(second.metadata)}
    if html is not None:
        make_folder(html)
    png = None if plots is None else make_plot_folder(plots) / "comparison.png"
    written = mdi_analysis.save_overlay(found, first, second, html=html, png=png, basis=bases)
    for path in written:
        tell(f"wrote {path}")
    if options.json:
        show_json({**found.to_dict(), "basis": bases, "written": [str(path) for path in written]})
    else:
        rests = [f"{name}: {basis}" for name, basis in bases.items() if basis is not None]
        show_table(found.table(), *rests)
    if options.expect_identical and not found.plans.identical:
        tell(f"the runs differ: {found.plans}")
        raise typer.Exit(1)
