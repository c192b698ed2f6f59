"""A page of charts that answer to mouse and finger: the answer first, then charts, then tables.

One file without a network: plotly.js and the charts' data lie in it, packed, and the browser
unpacks them. Whatever comes from names is escaped; charts are JSON, never code.

Read next: `charts.py` (a run's charts), `pages.py` (tables and style).
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape

from mdi_analysis.charts import Panel, run_panels
from mdi_analysis.frames import RunLike
from mdi_analysis.metrics import Distribution
from mdi_analysis.pages import STYLE, details
from mdi_analysis.report import Sheet, number, percent
from mdi_analysis.summary import Summary, describe_counts, describe_origin

LIVE_STYLE = """
:root { color-scheme: light dark }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: .7rem;
  margin: 1.2rem 0 }
.tiles div { border: 1px solid rgba(128,128,128,.35); border-radius: 8px; padding: .55rem .8rem }
.tiles b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums }
.tiles span { font-size: .85rem; opacity: .75 }
p.answer { font-size: 1.15rem; margin: .5rem 0 }
section p { margin: 0 0 .2rem; max-width: 75ch }
.sheets, .wide { overflow-x: auto }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e4e4e4 } p.basis { color: #b8b8b8 }
}
@media (max-width: 600px) { body { margin: 1rem auto; padding: 0 .7rem } h1 { font-size: 1.25rem } }
"""
# What a click on a request does, and how the library and its charts get out of their packing.
SCRIPT = """
const unpack = async id => {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()),
                                 c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};
const show = async () => {
  const library = document.createElement("script");
  library.textContent = await unpack("library");
  document.head.append(library);
  const charts = JSON.parse(await unpack("charts"));
  const ink = getComputedStyle(document.body).color;
  for (const [id, chart] of Object.entries(charts)) {
    chart.layout.font.color = ink;
    if (matchMedia("(pointer: coarse)").matches) chart.layout.dragmode = false;  // a finger scrolls
    await Plotly.newPlot(id, chart.data, chart.layout, {responsive: true, displayModeBar: false});
  }
  const lives = document.getElementById("lives");
  const focus = event => {
    const line = charts.lives.rows.indexOf(event.points[0].customdata);
    if (line < 0) return;
    let first = Infinity, last = -Infinity;
    for (const trace of charts.lives.data) trace.y.forEach((y, i) => {
      if (y !== line) return;
      first = Math.min(first, trace.base[i]);
      last = Math.max(last, trace.base[i] + trace.x[i]);
    });
    if (first > last) return;
    const room = (last - first) * 0.05 + 1e-6;
    Plotly.relayout(lives, {
      "xaxis.range": [first - room, last + room], "yaxis.range": [line + 8.5, line - 8.5],
      shapes: [{type: "rect", xref: "paper", x0: 0, x1: 1, y0: line - 0.5, y1: line + 0.5,
                fillcolor: "rgba(230,159,0,.25)", line: {width: 0}, layer: "below"}]});
    if (event.event.target.closest("#requests"))
      lives.scrollIntoView({behavior: "smooth", block: "center"});
  };
  if (lives) for (const id of ["requests", "lives"])
    document.getElementById(id).on("plotly_click", focus);
};
show().catch(error => {
  document.getElementById("failed").textContent = "The charts cannot be shown: " + error;
});
"""


@dataclass(frozen=True)
class LivePage:
    """What stands on a page: a title, the answer, figures in tiles, charts, and tables behind.

    `panels` are charts by the ids of their elements, which are no names of others; `notes` are
    sentences on what the figures rest on.
    """

    title: str
    answer: str
    tiles: Mapping[str, str]
    panels: Mapping[str, Panel]
    sheets: Sequence[Sheet] = ()
    notes: Sequence[str] = ()

    def html(self) -> str:
        """Return the page as text."""
        tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
                        for name, value in self.tiles.items())  # fmt: skip
        parts = [f"<h1>{escape(self.title)}</h1>", f"<p class='answer'>{escape(self.answer)}</p>",
                 f"<div class='tiles'>{tiles}</div>", "<p id='failed'></p>"]  # fmt: skip
        for element, panel in self.panels.items():
            parts.append(f"<section><h2>{escape(panel.title)}</h2><p>{escape(panel.reading)}</p>"
                         f"<div id='{element}'></div></section>")  # fmt: skip
        if self.sheets:
            parts.append(details("Tables", self.sheets))
        parts += [f"<p class='basis'>{escape(note)}</p>" for note in self.notes]
        charts = json.dumps({element: panel.chart for element, panel in self.panels.items()})
        parts += [_packed("library", _library()), _packed("charts", charts),
                  f"<script>{SCRIPT}</script>"]  # fmt: skip
        head = (
            "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
            f"<title>{escape(self.title)}</title><style>{STYLE}{LIVE_STYLE}</style>"
        )
        return (f"<!doctype html>\n<html lang='en'>\n<head>{head}</head>\n<body>\n"
                + "\n".join(parts) + "\n</body>\n</html>\n")  # fmt: skip


def run_page(run: RunLike, summary: Summary, *, title: str, basis: Sequence[str] = ()) -> str:
    """Return one run's page as HTML text; `basis` are sentences on what its figures rest on."""
    return LivePage(
        title, _answer(summary), _tiles(summary), run_panels(run), summary.sheets(),
        [describe_origin(summary.origin), *basis, *summary.remarks()],
    ).html()  # fmt: skip


def _answer(summary: Summary) -> str:
    """Say in one sentence how requests fared."""
    ttft, e2e = summary.latency.ttft_ms, summary.latency.e2e_ms
    told = describe_counts(summary.requests)
    if not ttft.n:
        return f"{told}."
    return (f"{told}. Half had their first token within {_time(ttft.p50)} and all of it within "
            f"{_time(e2e.p50)}; 99 % within {_time(ttft.p99)} and {_time(e2e.p99)}.")  # fmt: skip


def _tiles(summary: Summary) -> dict[str, str]:
    latency, engine, good = summary.latency, summary.engine, summary.goodput
    found = {
        "time to first token, P50 / P99": _pair(latency.ttft_ms),
        "per output token, P50 / P99": _pair(latency.tpot_ms),
        "output tokens/s per GPU": number(summary.throughput.output_tok_s_gpu),
        "KV occupancy, mean": percent(engine.kv_occupancy_mean),
        "preemptions": f"{engine.preemptions:,}",
    }
    return found if good is None else {"within the bounds": percent(good.goodput_share), **found}


def _pair(values: Distribution) -> str:
    return f"{_time(values.p50)} / {_time(values.p99)}"


def _time(ms: float | None) -> str:
    if ms is None:
        return number(ms)
    return f"{number(ms / 1_000)} s" if ms >= 1_000 else f"{number(ms)} ms"


def _packed(name: str, text: str) -> str:
    # Level 9 without a time: equal pages are equal bytes. Base64 holds nothing that HTML reads.
    data = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")
    return f"<script type='text/plain' id='{name}'>{data}</script>"


@cache
def _library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
