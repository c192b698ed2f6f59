"""How every picture of this package looks: colours, axes, ticks, legends, bands over time.

Colours are Okabe and Ito's, which stay apart for colour-blind readers. Nothing here knows a run or
a metric.

Read next: `plots.py` (one run), `overlay.py` (two).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mdi_analysis.binning import bin_edges, binned
from mdi_analysis.frames import KINDS, NS_PER_S, Floats
from mdi_shared.errors import SaveError
from mdi_traces.saving import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION, SKY, PINK, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#666666",
)  # fmt: skip
COLOURS = dict(zip(KINDS, (BLUE, VERMILION, SKY, ORANGE, GREEN, PINK, GREY), strict=True))
NO_SPAN = (0.0, NS_PER_S)  # the axis of a run in which nothing happened
MAX_POINTS = 20_000  # of a scatter; more only make the file larger


def plain_frame(ax: "Axes") -> None:
    """Give axes a light grid and no box."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="0.88", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9)


def draw_band(
    ax: "Axes", span: tuple[float, float], curve: tuple[Floats, Floats], label: str, colour: str
) -> None:
    """Draw mean, smallest and largest values over time; `curve` is (times in ns, values)."""
    at, values = curve
    known = ~np.isnan(at) & ~np.isnan(values)
    if not known.any():
        return
    middle, mean, low, high = binned(at[known], values[known], bin_edges(span))
    middle_s = (middle - span[0]) / NS_PER_S
    ax.fill_between(middle_s, low, high, color=colour, alpha=0.2, linewidth=0)
    marker = "o" if mean.size < 50 else ""  # a line through few points hides where they are
    ax.plot(middle_s, mean, color=colour, linewidth=1.4, label=label, marker=marker, markersize=3)


def legends(*axes: "Axes") -> None:
    """Put a legend on those axes that have something to name."""
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            # Above the axes: nothing drawn is covered.
            ax.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, fontsize=9,
                      frameon=False, borderaxespad=0)  # fmt: skip


def time_axis(axes: Sequence["Axes"], span: tuple[float, float]) -> None:
    """Label the last axes with the time since the start of a span (ns)."""
    axes[-1].set_xlabel("time since the start of the run (s)")
    axes[-1].set_xlim(0, max((span[1] - span[0]) / NS_PER_S, 1e-9))
    axes[-1].xaxis.set_major_formatter(tick_label)


def from_zero(ax: "Axes") -> None:
    """Let the vertical axis begin at 0 and end a little above the data."""
    top = float(ax.dataLim.y1)
    ax.set_ylim(0, top * 1.08 if 0 < top < np.inf else 1)


def share_axis(ax: "Axes") -> None:
    """Let a vertical axis of shares begin at 0, show the data, and end at all at most."""
    from_zero(ax)
    top = min(ax.get_ylim()[1], 1.02)
    ax.set_ylim(0, top)
    digits = 0 if top > 0.05 else 1 if top > 0.005 else 2
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.{digits}%}")


def plain_ticks(ax: "Axes") -> None:
    """Label log axes in plain numbers, as many as there is room for."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

    for axis, scale, limits in (
        (ax.xaxis, ax.get_xscale(), ax.get_xlim()), (ax.yaxis, ax.get_yscale(), ax.get_ylim()),
    ):  # fmt: skip
        if scale == "symlog":
            # From 0 on: the first decade lies too near to it for a label.
            first = int(np.ceil(np.log10(getattr(axis.get_transform(), "linthresh", 1.0)))) + 1
            decades = range(first, int(np.ceil(np.log10(limits[1]))))
            shown = decades[:: -(-len(decades) // 5) or 1]
            axis.set_major_locator(FixedLocator([0.0, *(10.0**decade for decade in shown)]))
        elif scale == "log":
            span = np.log10(limits[1] / limits[0])
            subs = (1, 2, 5) if span < 1.7 else (1, 3) if span < 2.5 else (1,)
            axis.set_major_locator(
                MaxNLocator(5) if span < 0.7 else LogLocator(subs=subs, numticks=7)
            )
        else:
            continue
        axis.set_major_formatter(tick_label)
        axis.set_minor_formatter(NullFormatter())


def tick_label(value: float, _tick: float) -> str:
    """Return a tick in a few plain digits: 0.001, 250, 12k, 3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):,.4g}{unit}"
    return np.format_float_positional(value, precision=6, trim="-") if value else "0"


def around(values: Floats) -> tuple[float, float]:
    """Return limits a little beyond the values, which are positive; never equal."""
    return float(values.min()) * 0.95, float(values.max()) * 1.05


def say(ax: "Axes", text: str) -> None:
    """Write a sentence where there is nothing to draw."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)


def make_plot_folder(directory: str | Path) -> Path:
    """Make a folder for pictures. Raises `SaveError` when the system refuses."""
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SaveError(str(directory), f"cannot be made a folder: {reason}") from error
    return directory


def save_figure(figure: "Figure", path: str | Path, dpi: int = 130) -> Path:
    """Write a PNG that takes the place of `path` when it is whole. Raises `SaveError`."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=dpi)
    return Path(path)
