"""Timing on a GPU (or a CPU, to try the benchmarks out): medians, ceilings, tables, conditions.

Device time is measured by CUDA events. The device is kept busy until the host has queued what is
to be measured, so that launch overhead of short kernels is not counted; a call that waits for the
device by itself is timed with its waiting. Caches are overwritten before every measured call:
weights of a layer never are in cache when their turn comes. On a CPU it is wall time.

Floors are what the device could not beat: operations over the matmul rate, bytes over the copy rate
that `ceilings` measures in the same process.
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
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

CACHE_BYTES = 256 * 2**20  # more than any GPU's L2
HOLD_CYCLES = 40_000_000  # about 20 ms, in which the host queues the calls
MOST_QUEUED = 200  # calls held at once; a GPU's queue takes about a thousand launches

Call = Callable[[], object]
Cell = str | float | int | None


class Ceilings(NamedTuple):
    """What this device does at best: bfloat16 FLOP/s of a large product, and bytes/s copied."""

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, flops: float, num_bytes: float) -> float:
        """Return the milliseconds that so much work takes at least."""
        return 1e3 * max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def median_ms(call: Call, device: torch.device, *, repeat: int = 20, warmup: int = 3) -> float:
    """Return the median milliseconds of `call`."""
    for _ in range(warmup):
        call()
    return statistics.median(times_ms(call, device, repeat))


def times_ms(call: Call, device: torch.device, repeat: int) -> list[float]:
    """Return each call's milliseconds, caches cold."""
    if device.type != "cuda":
        return [_wall_ms(call) for _ in range(repeat)]
    flush = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device)
    found: list[float] = []
    while len(found) < repeat:
        events = []
        torch.cuda.synchronize(device)
        torch.cuda._sleep(HOLD_CYCLES)
        for _ in range(min(MOST_QUEUED, repeat - len(found))):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(device)
        found += [begin.elapsed_time(end) for begin, end in events]
    return found


def _wall_ms(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


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

    def mark(self, part: str) -> None:
        """Say that `part` begins; the empty name belongs to nobody."""
        if self.is_on:
            self._marks.append((stamp(self.device), part))

    def take_ms(self) -> dict[str, float]:
        """Return each part's milliseconds since the last call; waits for the device."""
        synchronize(self.device)
        spent: dict[str, float] = {}
        for (begin, part), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                spent[part] = spent.get(part, 0.0) + elapsed_ms(begin, end)
        self._marks.clear()
        return spent


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceilings(device: torch.device) -> Ceilings:
    """Measure an 8192^3 bfloat16 product of random data and a 4 GB copy (small ones on a CPU)."""
    is_cuda = device.type == "cuda"
    side, copied = (8192, 4_000_000_000) if is_cuda else (512, 64_000_000)
    left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    product_ms = median_ms(lambda: left @ right, device, repeat=10)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device, repeat=10)
    return Ceilings(2e3 * side**3 / product_ms, 2e3 * copied / copy_ms)


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
    print(f"ceilings: {ceiling.flops_per_s / 1e12:.4g} TFLOP/s bfloat16 product, "
          f"{ceiling.bytes_per_s / 1e9:.4g} GB/s copy (read + written)", flush=True)  # fmt: skip
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


def random_ids(count: int, vocab_size: int, seed: int) -> Tensor:
    """Return token ids [count], int32, on the host."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=dice, dtype=torch.int32)


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each part's median over steps; a part that a step lacks counts as 0 there."""
    parts = dict.fromkeys(part for sample in samples for part in sample)
    return {p: statistics.median(sample.get(p, 0.0) for sample in samples) for p in parts}
