"""What comes out of a run, wherever it came from: saved, drawn, exported, summed up.

Everything is checked before any work begins, and written after it has ended.

Read next: `minideepinfer/run_summary.py` (the summary), `screen.py` (what is printed where).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mdi_shared.errors import ConfigError
from minideepinfer.commands import options as o
from minideepinfer.commands.files import (
    make_folder,
    require_folder,
    require_output,
    require_run_output,
)
from minideepinfer.commands.screen import show_json, show_table, tell

if TYPE_CHECKING:
    from mdi_analysis import SLO
    from mdi_traces.run import Run
    from minideepinfer.run_summary import RunSummary

SLO_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Ways to look at a run."""

    plots: o.Plots = None
    perfetto: o.Perfetto = None
    html: o.Html = None
    slo: o.Bounds = None
    json: o.Json = False

    def check(self) -> None:
        """Raise `ConfigError` for bounds and paths that could not serve, before any work."""
        parse_slo(self.slo)
        if self.plots is not None:
            require_folder("plots", self.plots)
        if self.perfetto is not None:
            require_output("perfetto", self.perfetto, (".json", ".json.gz"))
        if self.html is not None:
            require_output("html", self.html, (".html",))


@dataclass(frozen=True, kw_only=True)
class RunResults(ViewOptions):
    """The same for a run that was not there before."""

    out: o.MaybeOut = None

    def check(self) -> None:
        super().check()
        if self.out is not None:
            require_run_output("out", self.out)


def parse_slo(text: str | None) -> "SLO | None":
    """Read `name=ms` pairs with commas between them; None for None. Raises `ConfigError`."""
    if text is None:
        return None
    from mdi_analysis import SLO

    found: dict[str, float] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in SLO_NAMES:
            raise ConfigError("slo", pair, "must be NAME=MS with a name of "
                              f"{', '.join(SLO_NAMES)}")  # fmt: skip
        if SLO_NAMES[name] in found:
            raise ConfigError("slo", pair, f"{name} is set twice")
        try:
            found[SLO_NAMES[name]] = float(value)
        except ValueError:
            raise ConfigError("slo", pair, "must be a number of ms, without a unit") from None
    return SLO(**found)


def save_out(run: "Run", prefix: Path, verb: str | None = None) -> list[Path]:
    """Save a run in place of an earlier one, and say so; return the paths."""
    from mdi_traces.saving import run_files

    verb = verb or ("replaced" if run_files(prefix) else "saved")
    written = run.save(prefix)
    tell(f"{verb} run {prefix} ({len(written)} files)")
    return written


def write_views(
    run: "Run", options: ViewOptions, summary: "RunSummary", notes: Sequence[str] = ()
) -> list[Path]:
    """Draw and export a run as asked; return the paths."""
    written: list[Path] = []
    if options.plots is not None:
        from mdi_analysis import save_plots

        written += save_plots(run, options.plots)
        tell(f"drew {options.plots}")
    if options.perfetto is not None:
        from mdi_analysis import export_perfetto

        verb = "replaced" if options.perfetto.exists() else "wrote"
        make_folder(options.perfetto)
        written.append(export_perfetto(run, options.perfetto))
        tell(f"{verb} {options.perfetto}")
    if options.html is not None:
        from mdi_analysis import run_page, save_page

        make_folder(options.html)
        basis = [*summary.sentences(), *notes]
        page = run_page(run, summary, title=options.html.stem, basis=basis)
        written.append(save_page(page, options.html))
        tell(f"wrote {options.html}")
    return written


def report_run(
    run: "Run",
    options: RunResults,
    notes: Sequence[str] = (),
    *,
    wall_s: float | None = None,
    verb: str | None = None,
) -> None:
    """Save, draw and export a new run as asked, then print its summary.

    `wall_s` is the time a simulation took, s; `verb` what is said of saving, where it is known.
    """
    from minideepinfer.run_summary import summarize

    written = [] if options.out is None else save_out(run, options.out, verb)
    summary = summarize(run, parse_slo(options.slo), wall_s=wall_s)
    written += write_views(run, options, summary, notes)
    if not options.json:
        show_table(summary.table(), *(f"note: {note}" for note in notes))
        return
    show_json({"summary": summary.to_dict(), "config": run.metadata.config, "notes": list(notes),
               "written": [str(path) for path in written]})  # fmt: skip
