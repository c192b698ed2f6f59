"""One picture of a tuning: what each setting tried reaches, and at which latency.

Read next: `tune_report.py` (the same in words), `mdi_analysis/drawing.py` (colours).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mdi_analysis.drawing import BLUE, GREY, ORANGE, VERMILION
from mdi_sim.search.tuning import GOODPUT, Measured, Trial, Tuning, merit
from mdi_traces.io import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_tuning(found: Tuning, path: Path, basis: str) -> None:
    """Draw goal against P99 of TTFT and of TPOT, one dot a setting, the front highlighted.

    `basis` says what the step times rest on. Bars on default and best are the model's error.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(f"{len(found.trials)} settings, step times: {basis}", fontsize=10)
    for ax, name in zip(axes, ("ttft_p99_ms", "tpot_p99_ms"), strict=True):
        _draw(ax, found, name)
        ax.set_xlabel(f"{name[:4].upper()}, P99 (ms)")
    is_goodput = found.objective == GOODPUT
    axes[0].set_ylabel("share of requests within the SLO" if is_goodput else "tokens per second")
    axes[0].legend(fontsize=9, frameon=False)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _draw(ax: "Axes", found: Tuning, latency: str) -> None:
    front = found.pareto()
    groups = (("tried", list(found.trials), GREY, 14), ("front", front, BLUE, 26),
              ("default", [found.default], ORANGE, 60),
              ("best", [found.best], VERMILION, 60))  # fmt: skip
    for order, (name, trials, colour, size) in enumerate(groups):
        points = [_point(trial, found.objective, latency) for trial in trials]
        xs, ys = ([p[i] for p in points if p is not None] for i in (0, 1))
        ax.scatter(xs, ys, s=size, color=colour, label=name, zorder=2 + order,
                   alpha=0.5 if name == "tried" else 1.0, edgecolors="none")  # fmt: skip
    bars = ((found.default, found.default_range, ORANGE), (found.best, found.best_range, VERMILION))
    for trial, error, colour in bars:
        at = _point(trial, found.objective, latency)
        if error is not None and at is not None:
            ends = [_goal(end, found.objective) for end in error.ends]
            ax.vlines(at[0], min(ends), max(ends), color=colour, linewidth=1.5, zorder=1)
    ax.grid(visible=True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def _point(trial: Trial, objective: str, latency: str) -> tuple[float, float] | None:
    """Return latency and goal of a trial; None where it has no latency."""
    measured = trial.measured
    x = None if measured is None else getattr(measured, latency)
    return None if measured is None or x is None else (x, _goal(measured, objective))


def _goal(measured: Measured, objective: str) -> float:
    return merit(objective, measured)[0]
