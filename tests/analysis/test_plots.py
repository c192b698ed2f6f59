"""Plots: drawn from the right numbers, readable without the rest, quiet on empty runs."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from mdi_analysis import (
    plot_latency,
    plot_step_time,
    plot_throughput,
    plot_timeline,
    save_plots,
)
from mdi_analysis.binning import NUM_BINS, bin_edges, binned, nice_window_s, window_rates
from mdi_analysis.drawing import plain_ticks
from mdi_shared.errors import ConfigError

PLOTS = (plot_latency, plot_step_time, plot_throughput, plot_timeline)


def test_latency_curve_ends_at_the_slowest_request(run):
    figure = plot_latency(run)
    ttft = figure.axes[0].lines[0]
    assert list(ttft.get_xdata()) == [16, 16, 21]
    assert list(ttft.get_ydata()) == [0, 0.5, 1.0]
    title = figure.get_suptitle()
    assert "2 completed, 1 rejected, 0 aborted, 1 unfinished" in title
    assert "tiny, H200, simulator" in title


def test_axes_carry_units(run):
    labels = [
        label
        for plot in PLOTS
        for ax in plot(run).axes
        for label in (ax.get_xlabel(), ax.get_ylabel())
    ]
    text = " ".join(labels)
    for unit in ("(ms)", "(s)", "tokens/s/GPU", "requests/s", "tokens in the step"):
        assert unit in text


def test_throughput_windows_hold_all_tokens(run):
    figure = plot_throughput(run, window_s=0.01)
    for ax, total in ((figure.axes[0], 256), (figure.axes[1], 7)):
        rates, edges, _ = ax.patches[0].get_data()
        assert edges.tolist() == pytest.approx([0, 0.01, 0.02, 0.033])
        assert float(rates @ np.diff(edges)) == pytest.approx(total)


@pytest.mark.parametrize("plot", PLOTS)
def test_empty_run_and_absent_values_draw_without_a_warning(run, nothing, plot):
    assert plot(nothing).axes
    bare = run.but(items=None, metadata=type(run.metadata)(None, None, None, None, None, {}))
    plot(bare).canvas.draw()


def test_save_plots_writes_four_pictures(run, tmp_path):
    paths = save_plots(run, tmp_path / "new" / "plots")
    assert [path.name for path in paths] == [
        "latency.png", "timeline.png", "step_time.png", "throughput.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_importing_the_package_does_not_import_matplotlib_or_rich():
    code = "import sys, mdi_analysis; print(*({'matplotlib', 'rich'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == ""


def test_binning_keeps_mean_and_extremes():
    at, values = np.array([0.0, 1, 5, 9, 10]), np.array([1.0, 3, 7, 2, 4])
    middle, mean, low, high = binned(at, values, np.array([0.0, 4, 8, 10]))
    assert middle.tolist() == [2, 6, 9]
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([2, 7, 3], [1, 7, 2], [3, 7, 4])


def test_bins_without_values_are_left_out():
    middle, *_ = binned(np.array([0.5, 9.5]), np.array([1.0, 2]), np.arange(11.0))
    assert middle.tolist() == [0.5, 9.5]


@pytest.mark.parametrize("span", [(0, 1e12), (5, 5)])
def test_bins_cover_the_span(span):
    edges = bin_edges(span)
    assert edges.size == NUM_BINS + 1
    assert (edges[0], edges[-1]) == (span[0], max(span[1], span[0] + 1))
    assert (np.diff(edges) > 0).all()


def test_timeline_shows_every_step_of_a_short_run(run):
    batch = plot_timeline(run).axes[0]
    curves = {line.get_label(): line.get_ydata().tolist() for line in batch.lines}
    assert curves == {"prefill": [1, 2], "decode": [2, 2, 2]}


@pytest.mark.parametrize(
    ("end_s", "edges", "rates"),
    [(1.75, [0, 1, 1.75], [1, 1 / 0.75]), (1.25, [0, 1.25], [2 / 1.25]), (0.2, [0, 0.2], [5])],
)
def test_the_last_window_counts_its_length_and_is_no_moment(end_s, edges, rates):
    at = np.array([t for t in (0.1e9, 1.2e9) if t <= end_s * 1e9])
    found = window_rates(at, np.ones(at.size), (0, end_s * 1e9), 1.0)
    assert found[0].tolist() == edges
    assert found[1].tolist() == rates


def test_the_axis_of_kv_blocks_shows_the_data(run):
    few = run.but(steps=run.steps.assign(free_blocks=99))  # of 99
    used = run.steps.assign(free_blocks=[99, 98, 98, 98, 99])
    for changed, most in ((few, 1.02), (run.but(steps=used), 0.03)):
        axes = plot_timeline(changed).axes[1]
        data = max(float(line.get_ydata().max()) for line in axes.lines)
        assert data <= axes.get_ylim()[1] <= most


@pytest.mark.parametrize(
    "values", [(0.9, 2.1), (1, 40), (3, 900), (1, 1e5), (1e-4, 4e6), (97, 103), (2e5, 3e6)]
)
def test_tick_labels_do_not_collide(values):
    figure = Figure(figsize=(4.2, 3), layout="constrained")
    ax = figure.subplots()
    ax.plot(values, values)
    ax.set(xscale="log", yscale="log")
    plain_ticks(ax)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
    low, high = ax.get_window_extent().intervalx
    shown = sorted((box for box in boxes if low <= box.x0 and box.x1 <= high + 20),
                   key=lambda box: box.x0)  # fmt: skip
    assert len(shown) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(shown))


@pytest.mark.parametrize("window_s", [0, -1, float("nan"), 1e-9])
def test_window_must_be_sensible(run, window_s):
    with pytest.raises(ConfigError, match="window_s"):
        plot_throughput(run, window_s=window_s)


@pytest.mark.parametrize(
    ("about", "nice"), [(0.0, 1.0), (0.03, 0.05), (1.0, 1.0), (1.1, 2.0), (70, 100), (5.1, 10)]
)
def test_nice_windows(about, nice):
    assert nice_window_s(about) == pytest.approx(nice)
