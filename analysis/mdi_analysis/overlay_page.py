"""One HTML page of two runs: the tables of a comparison between the overlaid pictures.

The page needs no other file and no network: pictures are PNG inside it, style is a few lines. It
holds what `Comparison.sheets` says and computes nothing.

Read next: `overlay.py` (the pictures), `compare.py` (the tables).
"""

import base64
from collections.abc import Mapping
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mdi_analysis.compare import Comparison
from mdi_analysis.drawing import save_figure
from mdi_analysis.frames import OWN_KINDS, RunLike
from mdi_analysis.overlay import overlay_figure, overlay_rows
from mdi_analysis.report import Sheet, change, counted, number, percent
from mdi_traces.io import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 90
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
img { width: 100%; height: auto } p.basis { margin: .2rem 0; color: #444 }
.sheets { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; white-space: pre-line }
th, td { padding: .15rem .7rem .15rem 0; text-align: right } th { border-bottom: 1px solid #999 }
th:first-child, td:first-child { text-align: left }
"""


def overlay_page(
    found: Comparison, a: RunLike, b: RunLike, *, basis: Mapping[str, str | None] | None = None
) -> str:
    """Return the page as HTML text, for the two runs that `found` compares.

    `basis` says of a run, by its name, what its times rest on; None says nothing.
    """
    names = " and ".join(found.names)
    parts = [
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<title>"
        f"{escape(names)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(names)}</h1>",
        *(_basis(run, name, (basis or {}).get(name))
          for name, run in zip(found.names, (a, b), strict=True)),
        f"<p class='basis'><b>plans</b>: {escape(str(found.plans))}</p>",
        f"<p class='basis'>Differences are ({escape(found.names[1])} − {escape(found.names[0])}) / "
        f"{escape(found.names[0])}.</p>",
        _table(_headline(found)),
        "<div class='sheets'>", *(_table(sheet) for sheet in found.sheets()), "</div>",
    ]  # fmt: skip
    for title, figure in overlay_rows(a, b, found.names).items():
        parts.append(f"<h2>{escape(title)}</h2>\n{_picture(figure, title)}")
    return "\n".join([*parts, "</body>", "</html>", ""])


def save_overlay(
    found: Comparison,
    a: RunLike,
    b: RunLike,
    *,
    html: str | Path | None = None,
    png: str | Path | None = None,
    basis: Mapping[str, str | None] | None = None,
) -> list[Path]:
    """Write the page, the picture, or both; return their paths.

    Each takes the place of an earlier file when it is whole. Raises `TraceError` when the system
    refuses to write there.
    """
    written = []
    if html is not None:
        page = overlay_page(found, a, b, basis=basis)
        with atomic_file(html) as file:
            file.write(page.encode("utf-8"))
        written.append(Path(html))
    if png is not None:
        written.append(save_figure(overlay_figure(a, b, found.names), png, dpi=DPI))
    return written


def _headline(found: Comparison) -> Sheet:
    """Return the figures most read: steps by kind, throughput, TTFT and TPOT, the host's gap."""
    steps = [
        (f"{kind} step, {how}", number(k.device_ms["mean"].a), number(k.device_ms["mean"].b),
         f"median {percent(k.error.p50)}, P90 {percent(k.error.p90)}")
        for kind, k in found.kinds.items() if kind in OWN_KINDS
        for how in ["paired" if k.paired else "by percentile"]
    ]  # fmt: skip
    pairs = [(name, found.rates[name]) for name in ("output_tok_s_gpu", "input_tok_s_gpu")]
    pairs += [(f"{name} {stat}", found.latency[name][stat])
              for name in ("ttft_ms", "tpot_ms") for stat in ("mean", "p99")]  # fmt: skip
    pairs.append(("gap_ms mean", found.host["gap_ms"]["mean"]))
    rows = [(name, number(pair.a), number(pair.b), change(pair.relative)) for name, pair in pairs]
    return Sheet("at a glance (steps: mean ms, and the size of the errors)",
                 ("figure", *found.names, "difference"), [*steps, *rows])  # fmt: skip


def _basis(run: RunLike, name: str, basis: str | None) -> str:
    meta = run.metadata
    facts = [meta.model, meta.hardware, basis or meta.source]
    facts += [counted(len(run.steps), "step"), counted(len(run.requests), "request")]
    known = ", ".join(fact for fact in facts if fact)
    return f"<p class='basis'><b>{escape(name)}</b>: {escape(known)}</p>"


def _table(sheet: Sheet) -> str:
    cells = "".join(f"<th>{escape(header)}</th>" for header in sheet.headers)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in sheet.rows
    )
    return f"<table><caption>{escape(sheet.title)}</caption>\n<tr>{cells}</tr>\n{rows}\n</table>"


def _picture(figure: "Figure", title: str) -> str:
    png = BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    data = base64.b64encode(png.getvalue()).decode("ascii")
    return f"<img alt='{escape(title)}' src='data:image/png;base64,{data}'>"
