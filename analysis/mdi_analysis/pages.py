"""The HTML page of two runs: pictures first, the tables behind them.

A page needs no other file and no network: pictures are PNG inside it, style is a few lines. It
holds what `Comparison.sheets` says and computes nothing.

Read next: `overlay.py` (the pictures), `compare.py` (the tables), `live_page.py` (one run).
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mdi_analysis.compare import Comparison, Pair, pair_sheet
from mdi_analysis.drawing import BLUE, VERMILION, save_figure
from mdi_analysis.frames import OWN_KINDS, RunLike
from mdi_analysis.names import name_of
from mdi_analysis.overlay import overlay_figure, overlay_rows
from mdi_analysis.report import Sheet, counted, percent
from mdi_traces.saving import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 90
CLASSES = {1: " class='better'", -1: " class='worse'", 0: ""}
SIGNS = {1: "▲ ", -1: "▼ ", 0: ""}  # beside the colours, for those who do not see them
STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px;
  padding: 0 1rem; color: #222; background: #fff }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .5rem }}
img {{ width: 100%; height: auto }} p.basis {{ margin: .2rem 0; color: #444 }}
summary {{ cursor: pointer; font-size: 1.15rem; font-weight: 600; margin: 1.5rem 0 .5rem }}
.sheets {{ display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start }}
table {{ border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .3rem; white-space: pre-line }}
th, td {{ padding: .15rem .7rem .15rem 0; text-align: right }}
th {{ border-bottom: 1px solid #999 }} th.text, td.text {{ text-align: left }}
.better td:last-child, b.better {{ color: {BLUE} }}
.worse td:last-child, b.worse {{ color: {VERMILION} }}
"""


def overlay_page(
    found: Comparison, a: RunLike, b: RunLike, *, basis: Mapping[str, str | None] | None = None
) -> str:
    """Return the page of two runs as HTML text, for the two that `found` compares.

    `basis` says of a run, by its name, what its times rest on; None says nothing.
    """
    first, second = map(escape, found.names)
    parts = [
        *(_basis(run, name, (basis or {}).get(name))
          for name, run in zip(found.names, (a, b), strict=True)),
        f"<p class='basis'><b>decisions</b>: {escape(str(found.plans))}</p>",
        _table(found.options_sheet()),
        *(f"<p class='basis'>{escape(sentence)}</p>" for sentence in _step_errors(found)),
        _table(_headline(found)),
        f"<p class='basis'>Differences are ({second} − {first}) / {first}; "
        f"<b class='better'>▲ {second} is better</b>, <b class='worse'>▼ worse</b>.</p>",
    ]  # fmt: skip
    for title, figure in overlay_rows(a, b, found.names).items():
        parts.append(f"<h2>{escape(title)}</h2>\n{_picture(figure, title)}")
    return _page(" and ".join(found.names), [*parts, details("All figures", found.sheets()[1:])])


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

    Each takes the place of an earlier file when it is whole. Raises `SaveError` when the system
    refuses to write there.
    """
    written = []
    if html is not None:
        written.append(save_page(overlay_page(found, a, b, basis=basis), html))
    if png is not None:
        written.append(save_figure(overlay_figure(a, b, found.names), png, dpi=DPI))
    return written


def save_page(page: str, path: str | Path) -> Path:
    """Write a page that takes the place of `path` when it is whole. Raises `SaveError`."""
    with atomic_file(path) as file:
        file.write(page.encode("utf-8"))
    return Path(path)


def _headline(found: Comparison) -> Sheet:
    """Return the figures most read: throughput, TTFT and TPOT, steps by kind, the host's gap."""
    keys = [name for name in ("output_tok_s_gpu", "goodput_share") if name in found.rates]
    entries: list[tuple[str, str, Pair]] = [
        (name_of(name), name, found.rates[name]) for name in keys
    ]
    entries += [(name_of(name, stat), name, found.latency[name][stat])
                for name in ("ttft_ms", "tpot_ms") for stat in ("mean", "p99")]  # fmt: skip
    kinds = {kind: k for kind, k in found.kinds.items() if kind in OWN_KINDS}
    entries += [(name_of(kind, "mean"), kind, k.device_ms["mean"]) for kind, k in kinds.items()]
    entries.append((name_of("gap_ms", "mean"), "gap_ms", found.host["gap_ms"]["mean"]))
    return pair_sheet("at a glance", ("figure", *found.names, "difference"), entries)


def _step_errors(found: Comparison) -> list[str]:
    return [
        f"{kind} steps {'paired' if k.paired else 'by percentile'}: differ by "
        f"{percent(k.error.p50)} in the median, {percent(k.error.p90)} at P90"
        for kind, k in found.kinds.items()
        if kind in OWN_KINDS
    ]


def _page(title: str, parts: Sequence[str]) -> str:
    head = (f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<title>"
            f"{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>")  # fmt: skip
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *parts, "</body>", "</html>", ""])


def details(title: str, sheets: Sequence[Sheet]) -> str:
    """Return tables that open on a click, as HTML text."""
    tables = "".join(_table(sheet) for sheet in sheets)
    return (f"<details><summary>{escape(title)}</summary>\n<div class='sheets'>{tables}</div>"
            "</details>")  # fmt: skip


def _basis(run: RunLike, name: str, basis: str | None) -> str:
    meta = run.metadata
    facts = [meta.model, meta.hardware, basis or meta.source]
    facts += [counted(len(run.steps), "step"), counted(len(run.requests), "request")]
    known = ", ".join(fact for fact in facts if fact)
    return f"<p class='basis'><b>{escape(name)}</b>: {escape(known)}</p>"


def _table(sheet: Sheet) -> str:
    cells = _cells("th", sheet.headers, sheet.n_text) if sheet.headers else ""
    verdicts = [*sheet.verdicts, *[0] * (len(sheet.rows) - len(sheet.verdicts))]
    rows = "\n".join(
        f"<tr{CLASSES[sign]}>"
        f"{_cells('td', (*row[:-1], f'{SIGNS[sign]}{row[-1]}'), sheet.n_text)}</tr>"
        for row, sign in zip(sheet.rows, verdicts, strict=True)
    )
    return f"<table><caption>{escape(sheet.title)}</caption>\n<tr>{cells}</tr>\n{rows}\n</table>"


def _cells(tag: str, cells: Sequence[str], n_text: int) -> str:
    kinds = [" class='text'" if index < n_text else "" for index in range(len(cells))]
    return "".join(
        f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
    )


def _picture(figure: "Figure", title: str) -> str:
    png = BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    data = base64.b64encode(png.getvalue()).decode("ascii")
    return f"<img alt='{escape(title)}' src='data:image/png;base64,{data}'>"
