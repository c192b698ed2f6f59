"""Thinning long runs out for plots: time bins with mean and extremes, rates in windows.

Pure arithmetic on columns; times are float64 ns.

Read next: `plots.py`, which draws them.
"""

import math

import numpy as np

from mdi_analysis.frames import NS_PER_S, Floats
from mdi_shared.errors import ConfigError

NUM_BINS = 400  # about one per two pixels of a plot
MAX_WINDOWS = 100_000


def bin_edges(span_ns: tuple[float, float]) -> Floats:
    """Return the edges of `NUM_BINS` equal time bins over a span, ns."""
    start, end = span_ns
    edges: Floats = np.linspace(start, max(end, start + 1), NUM_BINS + 1)
    return edges


def binned(at_ns: Floats, values: Floats, edges: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return middle, mean, minimum and maximum of the values in every bin that holds any."""
    order = np.argsort(at_ns, kind="stable")
    at_ns, values = at_ns[order], values[order]
    bins = np.clip(np.searchsorted(edges, at_ns, side="right") - 1, 0, edges.size - 2)
    used, starts = np.unique(bins, return_index=True)
    counts = np.diff(np.append(starts, bins.size))
    middle: Floats = (edges[used] + edges[used + 1]) / 2
    mean: Floats = np.add.reduceat(values, starts) / counts
    return middle, mean, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def window_rates(
    at_ns: Floats, weights: Floats, span_ns: tuple[float, float], window_s: float
) -> tuple[Floats, Floats]:
    """Return window edges, s since the start of the span, and weight per second in each window.

    The last window ends with the span and its rate counts its real length; a rest of less than half
    a window belongs to the one before, since a rate over a moment is a spike. Raises `ConfigError`
    on a window that is not above 0 or would cut the span into more than `MAX_WINDOWS`.
    """
    length_s = (span_ns[1] - span_ns[0]) / NS_PER_S
    if not window_s > 0:
        raise ConfigError("window_s", window_s, "must be above 0 s")
    n = max(1, round(length_s / window_s))
    if n > MAX_WINDOWS:
        raise ConfigError("window_s", window_s, f"must be at least {length_s / MAX_WINDOWS} s")
    edges: Floats = np.arange(n + 1, dtype=np.float64) * window_s
    edges[-1] = max(length_s, edges[-2] + 1 / NS_PER_S)
    known = ~np.isnan(at_ns) & ~np.isnan(weights)
    at_s = (at_ns[known] - span_ns[0]) / NS_PER_S
    index = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, n - 1)
    return edges, np.bincount(index, weights=weights[known], minlength=n) / np.diff(edges)


def nice_window_s(about_s: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below `about_s`."""
    if about_s <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(about_s))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about_s * 0.999)
