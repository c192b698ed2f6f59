"""Two runs drawn over each other: step times, latencies, the engine and its throughput over time.

Five rows of three panels, as one `Figure` or one per row. Each run's time axis begins with its own
start. Nothing is judged here; the numbers behind it are those of `compare.py`.

Read next: `drawing.py` (how it looks), `pages.py` (pictures and tables on one page).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mdi_analysis.binning import nice_window_s, window_rates
from mdi_analysis.drawing import (
    BLUE,
    MAX_POINTS,
    NO_SPAN,
    VERMILION,
    around,
    draw_band,
    from_zero,
    legends,
    plain_frame,
    plain_ticks,
    say,
    share_axis,
    tick_label,
    time_axis,
)
from mdi_analysis.frames import (
    NS_PER_S,
    OWN_KINDS,
    Floats,
    Ints,
    RunLike,
    floats,
    is_kind,
    kind_codes,
    span_ns,
)
from mdi_analysis.metrics import request_latencies
from mdi_analysis.plots import rate_curves
from mdi_analysis.step_times import device_ms, host_times
from mdi_analysis.usage import kv_occupancy
from mdi_shared.errors import ConfigError
from mdi_shared.plan import DECODE, MIXED, PREFILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLUMNS = 3
ROW_INCHES = (15.0, 3.9)
PERCENTILES = np.arange(1, 100)
WINDOWS = 60


class Side(NamedTuple):
    """One of the two runs: its name, its colour in every panel, how its curves are dashed."""

    name: str
    colour: str
    dashes: str
    run: RunLike


Row = Callable[[Sequence["Axes"], Sequence[Side]], None]


def overlay_figure(a: RunLike, b: RunLike, names: tuple[str, str] = ("a", "b")) -> "Figure":
    """Draw all rows below each other. Raises `ConfigError` when the names are equal."""
    from matplotlib.figure import Figure

    sides = _sides(a, b, names)
    width, height = ROW_INCHES
    figure = Figure(
        figsize=(width, height * len(ROWS)), layout="constrained", facecolor="white"
    )  # fmt: skip
    figure.suptitle("\n".join(_title(side) for side in sides), fontsize=12)
    parts = figure.subfigures(len(ROWS), 1, squeeze=False).ravel()
    for part, (title, row) in zip(parts, ROWS.items(), strict=True):
        part.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        _draw(part.subplots(1, NUM_COLUMNS), row, sides)
    return figure


def overlay_rows(
    a: RunLike, b: RunLike, names: tuple[str, str] = ("a", "b")
) -> dict[str, "Figure"]:
    """Draw every row as a picture of its own, by title. Raises as `overlay_figure` does."""
    from matplotlib.figure import Figure

    sides, figures = _sides(a, b, names), {}
    for title, row in ROWS.items():
        figures[title] = Figure(figsize=ROW_INCHES, layout="constrained", facecolor="white")
        _draw(figures[title].subplots(1, NUM_COLUMNS), row, sides)
    return figures


def _sides(a: RunLike, b: RunLike, names: tuple[str, str]) -> tuple[Side, Side]:
    if len(names) != 2 or names[0] == names[1]:
        raise ConfigError("names", names, "must be two different names")
    return Side(names[0], BLUE, "-", a), Side(names[1], VERMILION, "--", b)


def _title(side: Side) -> str:
    meta = side.run.metadata
    origin = ", ".join(part for part in (meta.model, meta.hardware, meta.source) if part)
    return f"{side.name}: {origin or 'origin not recorded'}, {len(side.run.steps):,} steps"


def _draw(axes: Sequence["Axes"], row: Row, sides: Sequence[Side]) -> None:
    for ax in axes:
        plain_frame(ax)
    row(axes, sides)


def _step_time_by_rows(axes: Sequence["Axes"], sides: Sequence[Side]) -> None:
    for ax, (kind, kinds) in zip(axes, _panels(sides), strict=False):
        ax.set(xlabel=f"rows of a {kind} step", ylabel="device time (ms)")
        for side in sides:
            chosen, times = _of_kind(side.run, *kinds)
            rows = np.maximum(floats(side.run.steps, "steps", "n_tokens")[chosen], 1)
            thin = slice(None, None, max(-(-times.size // MAX_POINTS), 1))
            ax.scatter(rows[thin], times[thin], s=14, alpha=0.45, linewidths=0, color=side.colour,
                       label=f"{side.name} ({times.size:,})", rasterized=True)  # fmt: skip
        _log_axes(ax, f"neither run has {kind} steps")
    _percentile_errors(axes[2], sides)


def _panels(sides: Sequence[Side]) -> list[tuple[str, tuple[str, ...]]]:
    """Return what panels show: steps laid out as prefill steps are, and decode steps."""
    has_mixed = any(_of_kind(side.run, MIXED)[1].size for side in sides)
    name = "prefill or mixed" if has_mixed else PREFILL
    return [(name, (PREFILL, MIXED)), (DECODE, (DECODE,))]


def _percentile_errors(ax: "Axes", sides: Sequence[Side]) -> None:
    """Draw (b - a) / a of each percentile of the device times, one curve per kind of step."""
    for kind, dashes in zip(OWN_KINDS, ("-", ":", "-."), strict=True):
        a, b = (_of_kind(side.run, kind)[1] for side in sides)
        if a.size and b.size:
            quantiles_a, quantiles_b = np.percentile(a, PERCENTILES), np.percentile(b, PERCENTILES)
            ax.plot(PERCENTILES, quantiles_b / quantiles_a - 1, dashes, color="black", label=kind)
    ax.set(xlabel="percentile of the device time",
           ylabel=f"{sides[1].name} against {sides[0].name}")  # fmt: skip
    if not ax.lines:
        say(ax, "no kind of step is in both runs")
        return
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    legends(ax)


def _step_time_shares(axes: Sequence["Axes"], sides: Sequence[Side]) -> None:
    for ax, (kind, kinds) in zip(axes, _panels(sides), strict=False):
        values = [_of_kind(side.run, *kinds)[1] for side in sides]
        _shares(ax, sides, values, f"device time of a {kind} step (ms)", "steps")
    gaps = [host_times(side.run.steps)["gap_ms"] for side in sides]
    _shares(axes[2], sides, gaps, "device idle before a step, with requests there (ms)", "steps")


def _latency_shares(axes: Sequence["Axes"], sides: Sequence[Side]) -> None:
    found = [request_latencies(side.run) for side in sides]
    completed = [latencies[latencies["outcome"] == "completed"] for latencies in found]
    panels = (("ttft_ms", "time to first token (ms)"), ("tpot_ms", "time per output token (ms)"),
              ("e2e_ms", "end-to-end latency (ms)"))  # fmt: skip
    for ax, (name, label) in zip(axes, panels, strict=True):
        values = [latencies[name].to_numpy(dtype="float64") for latencies in completed]
        _shares(ax, sides, values, label, "completed requests")


def _engine(axes: Sequence["Axes"], sides: Sequence[Side]) -> None:
    for side in sides:
        steps, span = side.run.steps, _span(side)
        done, sched = (floats(steps, "steps", name) for name in ("t_done", "t_sched"))
        curves = (
            (done, floats(steps, "steps", "n_running")),
            (done, floats(steps, "steps", "n_waiting")),
            (sched, kv_occupancy(side.run)),
        )
        for ax, curve in zip(axes, curves, strict=True):
            draw_band(ax, span, curve, side.name, side.colour)
    _over_time(
        axes,
        sides,
        ("running requests per rank", "queued requests per rank", "KV blocks in use"),
        "no steps, or num_blocks is not recorded",
    )
    share_axis(axes[2])


def _throughput(axes: Sequence["Axes"], sides: Sequence[Side]) -> None:
    longest_s = max(end - start for start, end in map(_span, sides)) / NS_PER_S
    window_s = nice_window_s(longest_s / WINDOWS)
    for side in sides:
        curves = rate_curves(side.run)
        for ax, name in zip(axes, ("prefill", "output", "completed"), strict=True):
            edges_s, rates = window_rates(*curves[name], _span(side), window_s)
            ax.stairs(rates, edges_s, baseline=None, color=side.colour, label=side.name,
                      linewidth=1.5, linestyle=side.dashes)  # fmt: skip
    labels = ("input (tokens/s/GPU)", "output (tokens/s/GPU)", "completed requests/s")
    _over_time(axes, sides, labels, "nothing happened")


ROWS: dict[str, Row] = {
    "Step time by rows": _step_time_by_rows,
    "Step times and gaps": _step_time_shares,
    "Latency": _latency_shares,
    "Requests and memory over time": _engine,
    "Throughput over time": _throughput,
}


def _of_kind(run: RunLike, *kinds: str) -> tuple[Ints, Floats]:
    """Return the positions of the steps of kinds that took device time, and those times, ms."""
    times = device_ms(run.steps)
    chosen = np.flatnonzero(is_kind(kind_codes(run.steps), *kinds) & (times > 0))
    return chosen, times[chosen]


def _span(side: Side) -> tuple[float, float]:
    return span_ns(side.run) or NO_SPAN


def _shares(
    ax: "Axes", sides: Sequence[Side], values: Sequence[Floats], label: str, of_what: str
) -> None:
    """Draw the cumulative distribution of each run's values, NaN left out; log where positive."""
    ax.set(xlabel=label, ylabel=f"share of {of_what}", ylim=(0, 1.02))
    known = [np.sort(each[~np.isnan(each)]) for each in values]
    for side, own in zip(sides, known, strict=True):
        if own.size:
            ax.plot([own[0], *own], np.arange(own.size + 1) / own.size, color=side.colour,
                    linestyle=side.dashes, linewidth=1.6, drawstyle="steps-post",
                    label=f"{side.name} ({own.size:,})")  # fmt: skip
    every = np.concatenate(known)
    if not every.size:
        say(ax, "neither run has one")
        return
    positive = every[every > 0]
    if positive.size == every.size:
        ax.set_xscale("log")
        ax.set_xlim(*around(every))
    elif positive.size:  # zeros count, too: no gap at all is the best there is
        ax.set_xscale("symlog", linthresh=float(positive.min()))
        ax.set_xlim(0, around(every)[1])
    plain_ticks(ax)
    legends(ax)


def _log_axes(ax: "Axes", otherwise: str) -> None:
    if not any(np.size(points.get_offsets()) for points in ax.collections):
        say(ax, otherwise)
        return
    ax.set(xscale="log", yscale="log")
    plain_ticks(ax)
    legends(ax)


def _over_time(
    axes: Sequence["Axes"], sides: Sequence[Side], labels: Sequence[str], otherwise: str
) -> None:
    longest = max(end - start for start, end in map(_span, sides))
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        from_zero(ax)
        ax.yaxis.set_major_formatter(tick_label)
        time_axis([ax], (0.0, longest))
        if not (ax.lines or ax.patches):
            say(ax, otherwise)
    legends(*axes)
