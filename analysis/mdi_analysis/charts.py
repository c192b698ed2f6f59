"""Charts of a run to hover over, zoom into and click, as plain data for plotly.js.

A chart is a dict of `data` and `layout`, as `Plotly.newPlot` takes it; no plotly is imported here.
Times are s since the run's start, colours those of every other picture.

Read next: `pages.py`, which puts charts on a page, `lives.py` (spans of requests).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mdi_analysis.binning import bin_edges, binned, nice_window_s, window_rates
from mdi_analysis.drawing import BLUE, COLOURS, GREEN, GREY, NO_SPAN, ORANGE, SKY, VERMILION
from mdi_analysis.frames import (
    KINDS,
    NS_PER_MS,
    NS_PER_S,
    Floats,
    RunLike,
    device_ns,
    floats,
    is_kind,
    kind_codes,
    span_ns,
)
from mdi_analysis.lives import DECODE, PREEMPTED, PREFILL, STATES, WAITING, spans_of
from mdi_analysis.metrics import request_latencies
from mdi_analysis.plots import rate_curves
from mdi_analysis.usage import kv_occupancy

Chart = dict[str, Any]


class Panel(NamedTuple):
    """A chart on a page, under its title and a sentence on how to read it."""

    title: str
    reading: str
    chart: Chart


MOST_LIVES = 400  # requests whose spans a page holds: those around the longest wait
MOST_POINTS = 4_000  # of a scatter
CDF_POINTS = 400
OF_STATE = {WAITING: "#BBBBBB", PREFILL: BLUE, DECODE: GREEN, PREEMPTED: VERMILION}
SERIES = (BLUE, VERMILION, GREEN, ORANGE, SKY, "#CC79A7", GREY, "#8A6D00")
FAINT = "rgba(128,128,128,.25)"
LOG = {"type": "log", "dtick": "D2"}  # labels at 1, 2 and 5
MARGIN = {"l": 55, "r": 12, "t": 40, "b": 45}
LATENCY_AXES = {"ttft_ms": "time to first token (ms)", "e2e_ms": "end-to-end latency (ms)",
                "tpot_ms": "time per output token (ms)"}  # fmt: skip


def run_panels(run: RunLike) -> dict[str, Panel]:
    """Return the charts of a run by the ids that a page gives them."""
    latencies = request_latencies(run)
    chosen = _around_the_longest_wait(latencies)
    some = "" if len(chosen) == len(latencies) else (
        f" Drawn are {len(chosen):,} of {len(latencies):,} requests, those around the longest wait."
    )  # fmt: skip
    return {
        "requests": Panel(
            "Requests", "Every request. Click one to see its life below; drag to zoom, "
            "double-click to zoom out.", requests_chart(run, latencies)),
        "lives": Panel(
            "Lives", "Lives of requests, one line each, by arrival: grey waits, blue computes the "
            "prompt, green gives tokens, red lost its memory and waits again." + some,
            lives_chart(run, chosen)),
        "timeline": Panel(
            "Timeline", "The engine over time: who runs and waits, memory, tokens given.",
            timeline_chart(run)),
        "latency": Panel(
            "Latency", "Share of completed requests within a time.", latency_chart(latencies)),
        "steps": Panel("Steps", "Device time of steps by their tokens.", steps_chart(run)),
    }  # fmt: skip


def layout(x: str, y: str, **more: object) -> dict[str, Any]:
    """Return a layout with two labelled axes, a legend above, and room for a thumb."""
    axis = {"gridcolor": FAINT, "zerolinecolor": FAINT, "automargin": True}
    return {
        "xaxis": {"title": {"text": x}, **axis}, "yaxis": {"title": {"text": y}, **axis},
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": MARGIN, "height": 400, "hovermode": "closest",
        **more,
    }  # fmt: skip


def requests_chart(run: RunLike, latencies: pd.DataFrame) -> Chart:
    """Latency over arrival; a menu chooses which. A point's `customdata` is its row."""
    arrival = _since_start(run, floats(run.requests, "requests", "arrival_ns"))
    preempted = run.requests.get("n_preempt", pd.Series(0, range(len(latencies)))).fillna(0) > 0
    outcome = latencies["outcome"].where(~preempted.to_numpy(), "preempted, then "
                                         + latencies["outcome"].astype(str))  # fmt: skip
    thin = np.unique(np.linspace(0, len(latencies) - 1, MOST_POINTS).astype(int))
    data = []
    for colour, name in zip(SERIES, sorted(outcome.unique()), strict=False):
        rows = np.intersect1d(np.flatnonzero(outcome == name), thin)
        columns = {axis: _plain(latencies[axis].to_numpy()[rows]) for axis in LATENCY_AXES}
        data.append({
            "type": "scatter", "mode": "markers", "name": name, "x": _plain(arrival[rows]),
            "y": columns["ttft_ms"], "text": _abouts(run, latencies, rows.tolist()),
            "customdata": rows.tolist(), "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": colour, "size": 7, "opacity": 0.85}, "of_axis": columns,
        })  # fmt: skip
    buttons = [
        {"label": label, "method": "update",
         "args": [{"y": [trace["of_axis"][axis] for trace in data]},
                  {"yaxis.title.text": label, "yaxis.autorange": True}]}
        for axis, label in LATENCY_AXES.items()
    ]  # fmt: skip
    for trace in data:
        del trace["of_axis"]
    found = with_menu(buttons, layout("arrival (s)", LATENCY_AXES["ttft_ms"]))
    found["yaxis"] |= LOG
    return {"data": data, "layout": found}


def with_menu(buttons: Sequence[Mapping[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """Return a layout with a drop-down above the chart, its legend moved below."""
    drop = {"buttons": list(buttons), "x": 0, "xanchor": "left", "y": 1.03, "yanchor": "bottom",
            "bgcolor": "rgba(128,128,128,.15)", "bordercolor": FAINT, "font": {"size": 12},
            "pad": {"l": 0}}  # fmt: skip
    legend = {**found["legend"], "y": 0, "yref": "container", "yanchor": "bottom"}
    return {**found, "updatemenus": [drop], "legend": legend, "height": found["height"] + 60}


def lives_chart(run: RunLike, rows: Sequence[int]) -> Chart:
    """Spans of these requests as bars; `customdata` is the row in the table, `y` the line."""
    spans = spans_of(run, rows)
    start = (span_ns(run) or NO_SPAN)[0] / NS_PER_S
    names = [str(name) for name in run.requests["req_id"].iloc[list(rows)]]
    data = []
    for state in STATES:
        mine = [span for span in spans if span.state == state]
        data.append({
            "type": "bar", "orientation": "h", "name": state, "width": 0.85,
            "base": [round(span.start_s - start, 6) for span in mine],
            "x": [round(span.end_s - span.start_s, 6) for span in mine],
            "y": [span.row for span in mine],
            "customdata": [int(rows[span.row]) for span in mine],
            "text": [f"{shown_text(names[span.row])}: {state}, "
                     f"{(span.end_s - span.start_s) * 1e3:,.1f} ms" + (f"<br>{span.note}" * bool(
                         span.note)) for span in mine],
            "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": OF_STATE[state], "line": {"width": 0}},
        })  # fmt: skip
    found = layout("time (s)", "request, by arrival", barmode="overlay", height=520)
    found["yaxis"] |= {"range": [len(rows) - 0.5, -0.5], "showgrid": False}
    return {"data": data, "layout": found, "rows": [int(row) for row in rows]}


def timeline_chart(run: RunLike) -> Chart:
    """Sequences, memory and tokens over time, above each other on one time axis."""
    steps, span = run.steps, span_ns(run) or NO_SPAN
    sched, done = (floats(steps, "steps", name) for name in ("t_sched", "t_done"))
    curves = [(name, floats(steps, "steps", f"n_{name}"), done, colour, "y")
              for name, colour in (("waiting", ORANGE), ("running", BLUE))]  # fmt: skip
    curves.append(("KV blocks in use", kv_occupancy(run), sched, GREEN, "y2"))
    data = []
    for name, values, at, colour, axis in curves:
        known = ~np.isnan(at) & ~np.isnan(values)
        if known.any():
            middle, mean, *_ = binned(at[known], values[known], bin_edges(span))
            data.append(_line(name, (middle - span[0]) / NS_PER_S, mean, colour, axis))
    window_s = nice_window_s((span[1] - span[0]) / NS_PER_S / 80)
    edges, rates = window_rates(*rate_curves(run)["output"], span, window_s)
    data.append(_line("output tokens/s/GPU", edges[:-1], rates, VERMILION, "y3", shape="hv"))
    found = layout("time (s)", "requests", height=560,
                   grid={"rows": 3, "columns": 1, "pattern": "coupled"})  # fmt: skip
    found["yaxis2"] = {**found["yaxis"], "title": {"text": "KV in use"}, "tickformat": ".0%"}
    found["yaxis3"] = {**found["yaxis"], "title": {"text": "tokens/s"}}
    found["hovermode"] = "x"
    return {"data": data, "layout": found}


def latency_chart(latencies: pd.DataFrame) -> Chart:
    """Cumulative distributions of the latencies of completed requests, on one log axis."""
    completed = latencies[latencies["outcome"] == "completed"]
    data = []
    for colour, (axis, label) in zip(SERIES, LATENCY_AXES.items(), strict=False):
        values = np.sort(completed[axis].dropna().to_numpy(np.float64))
        if values.size:
            shares = np.linspace(0, 1, min(values.size, CDF_POINTS) + 1)[1:]
            at = values[np.ceil(shares * values.size).astype(int) - 1]
            name = label.removesuffix(" (ms)")
            data.append(_line(name, at, shares, colour, "y", shape="hv"))
    found = layout("ms", "share of completed requests")
    found["xaxis"] |= LOG
    found["yaxis"] |= {"tickformat": ".0%", "range": [0, 1.02]}
    return {"data": data, "layout": found}


def steps_chart(run: RunLike) -> Chart:
    """Device time of steps over their tokens, by kind, on log axes."""
    kinds, times = kind_codes(run.steps), device_ns(run.steps) / NS_PER_MS
    tokens = floats(run.steps, "steps", "n_tokens")
    data = []
    for kind in KINDS:
        rows = np.flatnonzero(is_kind(kinds, kind) & (times > 0))
        rows = rows[:: max(-(-rows.size // MOST_POINTS), 1)]
        if rows.size:
            data.append({
                "type": "scatter", "mode": "markers", "name": kind,
                "x": _plain(np.maximum(tokens[rows], 1)), "y": _plain(times[rows]),
                "marker": {"color": COLOURS[kind], "size": 5, "opacity": 0.5},
                "hovertemplate": "%{x:,} tokens, %{y:.2f} ms<extra>" + kind + "</extra>",
            })  # fmt: skip
    found = layout("tokens in the step", "device time (ms)")
    found["xaxis"] |= LOG
    found["yaxis"] |= LOG
    return {"data": data, "layout": found}


def _line(
    name: str, x: Floats, y: Floats, colour: str, axis: str, *, shape: str = "linear"
) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": _plain(x), "y": _plain(y),
            "yaxis": axis, "line": {"color": colour, "width": 1.8, "shape": shape}}  # fmt: skip


def _around_the_longest_wait(latencies: pd.DataFrame) -> list[int]:
    """Return the rows of at most `MOST_LIVES` neighbours by arrival, the longest wait amid them."""
    count = len(latencies)
    waits = latencies["ttft_ms"].to_numpy(np.float64)
    worst = int(np.nanargmax(waits)) if count and not np.isnan(waits).all() else 0
    first = max(min(worst - MOST_LIVES // 2, count - MOST_LIVES), 0)
    return list(range(first, min(first + MOST_LIVES, count)))


def _abouts(run: RunLike, latencies: pd.DataFrame, rows: Sequence[int]) -> list[str]:
    """Return what hovering over each of these requests shows."""
    names = [name for name in ("prompt_len", "output_len", "n_preempt", "n_recomputed_tokens")
             if name in run.requests]  # fmt: skip
    table = latencies.assign(**{name: run.requests[name].to_numpy() for name in names})
    return [_about(own) for own in table.iloc[list(rows)].to_dict("records")]


def _about(own: Mapping[str, Any]) -> str:
    lines = [f"<b>{shown_text(str(own['req_id']))}</b>"]
    known = [f"{own[name]:,} {word}" for name, word in
             (("prompt_len", "prompt"), ("output_len", "output")) if name in own]  # fmt: skip
    lines.append(f"{' and '.join(known)} tokens")
    lines += [f"{label.removesuffix(' (ms)')} {own[axis]:,.1f} ms"
              for axis, label in LATENCY_AXES.items() if pd.notna(own[axis])]  # fmt: skip
    preempted = own.get("n_preempt", 0)
    if pd.notna(preempted) and preempted:
        lines.append(f"preempted {preempted} times, {own['n_recomputed_tokens']:,} tokens "
                     "recomputed")  # fmt: skip
    return "<br>".join(lines)


def shown_text(name: str) -> str:
    """Return a name as plotly shows it: it reads a little HTML, which a name must not be."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _since_start(run: RunLike, at_ns: Floats) -> Floats:
    start: Floats = (at_ns - (span_ns(run) or NO_SPAN)[0]) / NS_PER_S
    return start


def _plain(values: Floats) -> list[float | None]:
    """Return numbers with six digits, which no screen tells apart; NaN is None."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
