"""The points of a Pareto plot: kept in pareto.csv, drawn as pareto.png.

Prefill: input throughput per GPU against latency. Decode: output throughput per GPU against the
speed one user sees. Points of further runs join those in the file; a point measured again takes its
old place.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mdi_shared.errors import TraceError
from mdi_traces.saving import atomic_file

COLUMNS = ("phase", "label", "x_name", "x", "y_name", "y", "n_gpus", "config")
AXES = {"prefill": ("latency_ms", "input_tok_s_gpu"), "decode": ("tok_s_user", "output_tok_s_gpu")}
TITLES = {
    "prefill": ("latency of a step, ms", "input tokens/s per GPU"),
    "decode": ("output tokens/s per user", "output tokens/s per GPU"),
}


class Point(NamedTuple):
    """One measurement: phase "prefill" or "decode", its place in the plot, and its conditions."""

    phase: str
    label: str
    x: float
    y: float
    n_gpus: int
    config: str


def prefill_point(
    way: str, model: tuple[str, int], shape: tuple[int, int], place: tuple[float, float], gpus: int
) -> Point:
    """Return a prefill measurement of `way`.

    `model` is its name and layers, `shape` new tokens and context of a rank's step, `place` ms a
    step and input tokens/s per GPU.
    """
    config = f"{model[0]}, {model[1]} layers, context {shape[1]}, new {shape[0]}"
    return Point("prefill", way, *place, gpus, config)


def decode_point(
    way: str, how: str, model: tuple[str, int], shape: tuple[int, int], place: tuple[float, float],
    gpus: int,
) -> Point:  # fmt: skip
    """Return a decode measurement of `way`, run as `how` ("graph" or "eager").

    `model` is its name and layers, `shape` sequences of a rank and their context, `place` output
    tokens/s per user and per GPU.
    """
    config = f"{model[0]}, {model[1]} layers, context {shape[1]}, batch {shape[0]}"
    return Point("decode", f"{way}, {how}, context {shape[1]}", *place, gpus, config)


def as_row(point: Point) -> dict[str, str]:
    """Return a point in the file's columns.

    The one place that knows them: the official plotting script's format is not public.
    """
    x_name, y_name = AXES[point.phase]
    cells = (point.phase, point.label, x_name, f"{point.x:.6g}", y_name, f"{point.y:.6g}",
             str(point.n_gpus), point.config)  # fmt: skip
    return dict(zip(COLUMNS, cells, strict=True))


def add_points(folder: Path, points: Iterable[Point]) -> None:
    """Add points to the folder's pareto.csv and draw it; the folder is made if need be.

    Without matplotlib (GPU machines often lack it) the plot is left out, and a line says so.
    Raises `TraceError` when a pareto.csv is there that has other columns; it stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pareto.csv"
    rows = {_key(row): row for row in _read(file)}
    rows |= {_key(row): row for row in map(as_row, points)}
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    with atomic_file(file) as out:
        out.write(text.getvalue().encode())
    try:
        draw(list(rows.values()), folder / "pareto.png")
    except ImportError as error:
        print(f"pareto.png is not drawn: {error}", flush=True)


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("phase", "label", "n_gpus", "config"))


def _read(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as source:
        reader = csv.DictReader(source)
        found = list(reader)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise TraceError(str(file), f"has columns {', '.join(reader.fieldnames or ())}; must "
                             f"be {', '.join(COLUMNS)}")  # fmt: skip
    return found


def draw(rows: list[dict[str, str]], file: Path) -> None:
    """Draw both phases side by side; points of one label are joined by a line."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for panel, (phase, (x_title, y_title)) in zip(panels, TITLES.items(), strict=True):
        _draw_phase(panel, [row for row in rows if row["phase"] == phase])
        panel.set(title=phase, xlabel=x_title, ylabel=y_title)
        panel.grid(alpha=0.3)
    with atomic_file(file) as out:
        figure.savefig(out, format="png", dpi=120)
    plt.close(figure)


def _draw_phase(panel: Any, rows: list[dict[str, str]]) -> None:  # noqa: ANN401
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["label"], []).append((float(row["x"]), float(row["y"])))
    for label, places in lines.items():
        panel.plot(*zip(*sorted(places), strict=True), marker="o", label=label)
    if lines:
        panel.legend(fontsize="small")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
