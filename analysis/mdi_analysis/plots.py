"""Four pictures of a run, each a matplotlib `Figure` to show, save or restyle.

matplotlib is imported when a picture is made, through its object interface: no display, no global
state. The numbers come from `metrics.py` and `usage.py`; here they are only drawn.

Read next: `drawing.py` (how it looks), `binning.py`, which thins long runs out.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mdi_analysis.binning import nice_window_s, window_rates
from mdi_analysis.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    MAX_POINTS,
    NO_SPAN,
    ORANGE,
    VERMILION,
    around,
    draw_band,
    from_zero,
    legends,
    make_plot_folder,
    plain_frame,
    plain_ticks,
    save_figure,
    say,
    share_axis,
    tick_label,
    time_axis,
)
from mdi_analysis.frames import (
    KINDS,
    NS_PER_MS,
    NS_PER_S,
    OWN_KINDS,
    Floats,
    RunLike,
    count_gpus,
    device_ns,
    floats,
    has_arrived,
    is_kind,
    kind_codes,
    prompt_rows,
    span_ns,
)
from mdi_analysis.metrics import request_latencies
from mdi_analysis.report import number
from mdi_analysis.summary import count_requests, describe_counts
from mdi_analysis.usage import emitted_tokens, kv_occupancy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_latency(run: RunLike) -> "Figure":
    """Draw the cumulative distributions of TTFT, TPOT and end-to-end latency, ms, log axis.

    Completed requests only; the title says how many others there were.
    """
    latencies = request_latencies(run)
    completed = latencies[latencies["outcome"] == "completed"]
    figure, axes = _figure(run, "Latency", 1, 3, describe_counts(count_requests(run, latencies)))
    panels = (("ttft_ms", "time to first token (ms)"), ("tpot_ms", "time per output token (ms)"),
              ("e2e_ms", "end-to-end latency (ms)"))  # fmt: skip
    for ax, (name, label) in zip(axes, panels, strict=True):
        values = completed[name].to_numpy()
        values = np.sort(values[~np.isnan(values)])
        ax.set_xlabel(label)
        ax.set_ylim(0, 1.02)
        if not values.size:
            say(ax, "no request has one")
            continue
        _draw_cdf(ax, values)
    axes[0].set_ylabel("share of completed requests")
    return figure


def plot_timeline(run: RunLike) -> "Figure":
    """Draw batch size, KV occupancy and queue depth of a rank over time.

    The run is cut into 400 time bins: lines are means, bands reach from the smallest
    to the largest value of any rank.
    """
    steps, kinds = run.steps, kind_codes(run.steps)
    figure, axes = _figure(run, "Timeline", 3, 1, "lines: mean over ranks, bands: min to max")
    sched, done = (floats(steps, "steps", name) for name in ("t_sched", "t_done"))
    n_seqs = floats(steps, "steps", "n_seqs")
    span = span_ns(run) or NO_SPAN
    for kind in OWN_KINDS:
        chosen = is_kind(kinds, kind)
        draw_band(axes[0], span, (sched[chosen], n_seqs[chosen]), kind, COLOURS[kind])
    draw_band(axes[1], span, (sched, kv_occupancy(run)), "KV blocks", GREEN)
    for name, colour in (("waiting", ORANGE), ("running", BLUE)):
        values = floats(steps, "steps", f"n_{name}")
        draw_band(axes[2], span, (done, values), name, colour)
    labels = ("sequences in a step", "KV occupancy", "requests per rank")
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        from_zero(ax)
    share_axis(axes[1])
    if not axes[1].lines:
        say(axes[1], "no steps, or num_blocks is not recorded")
    legends(axes[0], axes[2])
    time_axis(axes, span)
    return figure


def plot_step_time(run: RunLike) -> "Figure":
    """Draw how long steps of each kind take, and how that grows with their tokens (log axes)."""
    kinds, device_ms = kind_codes(run.steps), device_ns(run.steps) / NS_PER_MS
    n_tokens = floats(run.steps, "steps", "n_tokens")
    figure, axes = _figure(run, "Step time", 1, 2, f"{len(run.steps):,} steps")
    positive = device_ms > 0
    shown = [kind for kind in KINDS if (positive & is_kind(kinds, kind)).any()]
    if shown:  # one set of bins for all kinds, so that their heights compare
        edges = np.geomspace(*around(device_ms[positive]), 91).tolist()
    for kind in shown:
        chosen = positive & is_kind(kinds, kind)
        times, tokens = device_ms[chosen], np.maximum(n_tokens[chosen], 1)
        label = f"{kind} ({times.size:,}, median {number(float(np.median(times)))} ms)"
        weights = np.full(times.size, 1 / times.size)
        axes[0].hist(times, edges, weights=weights, color=COLOURS[kind], alpha=0.65, label=label)
        thin = slice(None, None, -(-times.size // MAX_POINTS))
        axes[1].scatter(tokens[thin], times[thin], s=9, alpha=0.35, linewidths=0,
                        color=COLOURS[kind], label=kind, rasterized=True)  # fmt: skip
    axes[0].set(xlabel="device time of a step (ms)", ylabel="share of the kind's steps")
    axes[1].set(xlabel="tokens in the step", ylabel="device time of a step (ms)")
    if not shown:
        for ax in axes:
            say(ax, "no step has device time")
        return figure
    axes[0].set_xscale("log")
    axes[1].set(xscale="log", yscale="log")
    for ax in axes:
        plain_ticks(ax)
    legends(axes[0])
    return figure


def plot_throughput(run: RunLike, *, window_s: float | None = None) -> "Figure":
    """Draw input and output tokens/s/GPU and requests/s over time, in windows.

    `window_s` defaults to a round number near 1/80 of the run. Tokens count when their
    step is done. Recomputed tokens are part of the input here: steps do not tell them apart.
    """
    span = span_ns(run) or NO_SPAN
    if window_s is None:
        window_s = nice_window_s((span[1] - span[0]) / NS_PER_S / 80)
    places = (
        (0, "prefill", BLUE), (1, "output", VERMILION), (2, "arrived", GREY),
        (2, "completed", GREEN),
    )  # fmt: skip
    curves = rate_curves(run)
    figure, axes = _figure(run, "Throughput", 3, 1, f"windows of {number(window_s)} s")
    for panel, label, colour in places:
        edges_s, rates = window_rates(*curves[label], span, window_s)
        axes[panel].stairs(rates, edges_s, baseline=None, color=colour, label=label, linewidth=1.6)
    labels = ("input\n(tokens/s/GPU)", "output\n(tokens/s/GPU)", "requests/s")
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        from_zero(ax)
        ax.yaxis.set_major_formatter(tick_label)
    legends(axes[2])
    time_axis(axes, span)
    return figure


def rate_curves(run: RunLike) -> dict[str, tuple[Floats, Floats]]:
    """Return times, ns, and weights of what counts as work: divided by windows they are rates.

    `prefill` and `output` weigh tokens per GPU, `arrived` and `completed` requests.
    """
    steps, per_gpu = run.steps, max(count_gpus(run), 1)
    done = floats(steps, "steps", "t_done")
    arrival, finish = (floats(run.requests, "requests", n) for n in ("arrival_ns", "t_finish"))
    arrived = has_arrived(run)
    completed = (request_latencies(run)["outcome"] == "completed").to_numpy()
    return {
        "prefill": (done, prompt_rows(steps) / per_gpu),
        "output": (done, emitted_tokens(steps) / per_gpu),
        "arrived": (arrival[arrived], np.ones(int(arrived.sum()))),
        "completed": (finish[completed], np.ones(int(completed.sum()))),
    }


PLOTS = {
    "latency": plot_latency,
    "timeline": plot_timeline,
    "step_time": plot_step_time,
    "throughput": plot_throughput,
}


def save_plots(run: RunLike, directory: str | Path) -> list[Path]:
    """Draw all four plots as PNG into a folder, made if needed; return the paths.

    Raises `SaveError` when the system refuses the folder or a file in it.
    """
    directory = make_plot_folder(directory)
    return [save_figure(plot(run), directory / f"{name}.png") for name, plot in PLOTS.items()]


def _figure(
    run: RunLike, title: str, n_rows: int, n_columns: int, note: str
) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    width, height = (11.0, 4.2) if n_rows == 1 else (9.5, 2.2 * n_rows + 0.8)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    meta = run.metadata
    origin = ", ".join(part for part in (meta.model, meta.hardware, meta.source) if part)
    figure.suptitle(f"{title}: {origin}\n{note}" if origin else f"{title}\n{note}", fontsize=11)
    axes = figure.subplots(n_rows, n_columns, sharex=n_rows > 1, squeeze=False)
    flat: list[Axes] = list(axes.ravel())
    for ax in flat:
        plain_frame(ax)
    return figure, flat


def _draw_cdf(ax: "Axes", values: Floats) -> None:
    ax.plot([values[0], *values], np.arange(values.size + 1) / values.size, color=BLUE,
            linewidth=1.8, drawstyle="steps-post")  # fmt: skip
    for share, colour in ((0.5, GREEN), (0.9, ORANGE), (0.99, VERMILION)):
        at = float(np.quantile(values, share))
        label = f"p{share * 100:.0f}  {number(at)} ms"
        ax.plot([at], [share], "o", color=colour, markersize=6, label=label)
    if values[0] > 0:
        ax.set_xscale("log")
        ax.set_xlim(*around(values))
        plain_ticks(ax)
    ax.legend(loc="lower right", fontsize=9, frameon=True, framealpha=0.9, edgecolor="0.9")
