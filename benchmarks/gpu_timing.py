"""What benchmarks on a GPU (or a CPU, to try them out) share: conditions, tables, times by part.

How calls are timed, and ceilings, are `mdi_exec.engine.device_timing`. Floors are what the device
could not beat: operations over the product's rate, bytes over the copy's, of the same process.
"""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mdi_exec.engine.device_timing import Ceilings, ceilings, synchronize

Cell = str | float | int | None


def stamp(device: torch.device) -> Any:  # noqa: ANN401
    """Return a point in time on the device, for `elapsed_ms`; on a CPU, now."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Any, end: Any) -> float:  # noqa: ANN401
    """Return the milliseconds between two stamps; the device must have passed both."""
    if isinstance(begin, int):
        return (end - begin) / 1e6
    ms: float = begin.elapsed_time(end)
    return ms


class PartTimer:
    """Times the stretches between marks: each mark begins a part and ends the one before it.

    While `is_on` is False marks cost nothing and say nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = True
        self._marks: list[tuple[Any, str]] = []
        self._depth = 0

    def mark(self, part: str) -> None:
        """Say that `part` begins; the empty name belongs to nobody."""
        if self.is_on:
            self._marks.append((stamp(self.device), part))

    @contextmanager
    def range(self, part: str) -> Iterator[None]:
        """Time a range as a part, unless it lies within another one."""
        self._depth += 1
        if self._depth == 1:
            self.mark(part)
        yield
        if self._depth == 1:
            self.mark("the rest")
        self._depth -= 1

    def take_ms(self) -> dict[str, float]:
        """Return each part's milliseconds since the last call; waits for the device."""
        synchronize(self.device)
        spent: dict[str, float] = {}
        for (begin, part), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                spent[part] = spent.get(part, 0.0) + elapsed_ms(begin, end)
        self._marks.clear()
        return spent


def conditions(device: torch.device) -> dict[str, Any]:
    """Say what the numbers hold for: device, driver, versions, commit, date."""
    found: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        found = {"device": torch.cuda.get_device_name(device), **_driver(device)}
    else:
        found["cpu_threads"] = torch.get_num_threads()
    return {
        **found, "torch": torch.__version__, "cuda": torch.version.cuda,
        "tilelang": _version("tilelang"), "python": platform.python_version(),
        "commit": commit(), "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
    }  # fmt: skip


def commit() -> str:
    """Return the commit of this tree, or what MDI_COMMIT says where there is no repository."""
    said = os.environ.get("MDI_COMMIT")
    if said:
        return said
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def _driver(device: torch.device) -> dict[str, str]:
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.sm", "temperature.gpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "-i",
             str(index)], capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return {"driver_version": "unknown"}
    return dict(zip(names, done.stdout.strip().split(", "), strict=False))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Table:
    """Rows of named columns, printed as they come; `rows` goes into the JSON document."""

    def __init__(self, title: str, columns: Mapping[str, int]) -> None:
        self.title = title
        self.widths = columns
        self.rows: list[dict[str, Cell]] = []

    def head(self) -> None:
        """Print title and column names."""
        print(f"\n{self.title}")
        print(" ".join(_fit(name, width) for name, width in self.widths.items()), flush=True)

    def add(self, *cells: Cell) -> None:
        """Add and print a row, one cell for each column."""
        row = dict(zip(self.widths, cells, strict=True))
        self.rows.append(row)
        print(" ".join(_fit(_shown(cell), width) for cell, width in zip(
            cells, self.widths.values(), strict=True)), flush=True)  # fmt: skip


def _fit(text: str, width: int) -> str:
    """Names go left (negative width), numbers right."""
    return text.ljust(-width) if width < 0 else text.rjust(width)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        if cell == 0 or math.isnan(cell):
            return f"{cell:g}"
        return f"{cell:.4g}" if abs(cell) < 1e4 else f"{cell:.0f}"
    return str(cell)


def add_common_options(parser: argparse.ArgumentParser, *, preset: str) -> None:
    """Add what every benchmark of the model takes."""
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--preset", default=preset, help="tiny, small or flash-slice")
    parser.add_argument("--layers", type=int, help="layers of a flash-slice (6 .. 40)")
    parser.add_argument("--experts", type=int, help="routed experts of a layer")
    parser.add_argument("--copies-gb", type=float, default=8.0,
                        help="GB for bfloat16 copies of dense weights, on a GPU")  # fmt: skip
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")


def start(options: argparse.Namespace) -> tuple[torch.device, dict[str, Any], Ceilings]:
    """Print the conditions and measure the ceilings; returns device, document and ceilings."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    found = conditions(device)
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    ceiling = ceilings(device)
    print(f"ceilings: {ceiling}", flush=True)
    given = {key: str(value) if isinstance(value, Path) else value
             for key, value in vars(options).items()}  # fmt: skip
    return device, {"conditions": found, "options": given, "ceilings": ceiling._asdict()}, ceiling


def finish(options: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Print the document as the last line, and write it where --out says."""
    text = json.dumps(document)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


def peak_gb(device: torch.device) -> float | None:
    """Return the most device memory torch has held since the last reset, GB; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each part's median over steps; a part that a step lacks counts as 0 there."""
    parts = dict.fromkeys(part for sample in samples for part in sample)
    return {p: statistics.median(sample.get(p, 0.0) for sample in samples) for p in parts}
