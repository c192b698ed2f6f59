"""A step under torch's profiler: which kernel ran when, and which layer and part launched it.

A launch and its kernel have a correlation number in common, and the ranges (`model/ranges.py`) that
were open on the host at the launch say what the kernel was for. On a CPU the outermost operators of
torch stand for kernels. Steps are launched op by op: kernels of a captured graph have no launch of
their own. Read next: `minideepinfer/commands/profile.py`.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mdi_exec.engine.device_timing import Ceilings, median_ms, synchronize
from mdi_exec.engine.made_up_steps import filled_cache, random_batch
from mdi_exec.model.floors import STREAMS, StepShape, Work, step_work
from mdi_exec.model.ranges import watching
from mdi_exec.model.transformer import Transformer

REST = "the rest"  # outside all ranges: index maths of the batch, rows chosen
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]  # of Chrome's trace format


class Kernel(NamedTuple):
    """A kernel: microseconds of its start and duration, and the ranges it was launched in."""

    name: str
    start_us: float
    us: float
    stream: int
    path: tuple[str, ...]  # outermost first

    @property
    def layer(self) -> str | None:
        return self.path[0] if self.path and self.path[0].startswith("layer ") else None

    @property
    def part(self) -> str:
        if not self.path:
            return REST
        return STREAMS if self.path == (self.layer,) else self.path[-1]


class PartRow(NamedTuple):
    """What the kernels of a part took, in ms, and the floor of its work; None: not counted."""

    part: str
    ms: float
    launches: int
    share: float
    floor_ms: float | None


class KernelRow(NamedTuple):
    """What the kernels of one name took in one part, in ms."""

    part: str
    kernel: str
    ms: float
    launches: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One kind of step: its time without a profiler, its kernels, and each part's least work."""

    step: StepShape
    step_ms: float  # launched op by op, median; on a GPU without waiting for launches
    kernels: list[Kernel]
    floors: dict[str, Work]

    @property
    def busy_ms(self) -> float:
        return sum(kernel.us for kernel in self.kernels) / 1e3

    def rows(self, ceiling: Ceilings) -> list[PartRow]:
        """Return a row for each part, the longest first."""
        spent: dict[str, list[float]] = {}
        for kernel in self.kernels:
            spent.setdefault(kernel.part, []).append(kernel.us / 1e3)
        return sorted(
            (
                PartRow(part, sum(each), len(each), sum(each) / self.busy_ms,
                        ceiling.floor_ms(*self.floors[part]) if part in self.floors else None)
                for part, each in spent.items()
            ),
            key=lambda row: -row.ms,
        )  # fmt: skip

    def by_kernel(self) -> list[KernelRow]:
        """Return a row for each part and kernel, the longest first."""
        spent: dict[tuple[str, str], list[float]] = {}
        for kernel in self.kernels:
            spent.setdefault((kernel.part, kernel.name), []).append(kernel.us / 1e3)
        rows = [KernelRow(*key, sum(each), len(each)) for key, each in spent.items()]
        return sorted(rows, key=lambda row: -row.ms)


def profile_step(model: Transformer, step: StepShape, *, repeat: int = 3) -> StepProfile:
    """Run a made-up step on a cache of random rows until it is warm, time it, and look into it."""
    cache, batch = filled_cache(model, step), random_batch(model, step)
    counts: list[torch.Tensor] = []
    model.forward(batch, cache, expert_counts=counts)  # compiles
    active = [int((rows > 0).sum()) for rows in counts]

    def run() -> None:
        model.forward(batch, cache)

    step_ms = median_ms(run, model.device, repeat=repeat, warmup=1)
    kernels = kernels_of(run, model.device)
    return StepProfile(step, step_ms, kernels, step_work(model.config, step, active))


@contextmanager
def _range(name: str) -> Iterator[None]:
    """A range that torch's profiler sees, and NVIDIA's tools."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def kernels_of(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Run something once under the profiler; returns its kernels in the order they began."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler, watching(_range):
        run()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return attributed([event for event in events if event.get("ph") == "X"])


def attributed(events: Sequence[Event]) -> list[Kernel]:
    """Return the kernels among a profiler's complete events, each with its ranges."""
    launched = {_correlation(e): e for e in events if e.get("cat") in LAUNCHES}
    kernels = [e for e in events if e.get("cat") in ON_DEVICE]
    origins = [launched.get(_correlation(e), e) for e in kernels]
    if not kernels:
        kernels = origins = _outermost([e for e in events if e.get("cat") == "cpu_op"])
    paths = _paths(origins, [e for e in events if e.get("cat") == "user_annotation"])
    return sorted(
        (
            Kernel(e["name"], float(e["ts"]), float(e["dur"]), _stream(e), path)
            for e, path in zip(kernels, paths, strict=True)
        ),
        key=lambda kernel: kernel.start_us,
    )


def _correlation(event: Event) -> int | None:
    found: int | None = event.get("args", {}).get("correlation")
    return found


def _stream(event: Event) -> int:
    return int(event.get("args", {}).get("stream", 0))


def _outermost(events: Sequence[Event]) -> list[Event]:
    """Return the events that no other one of their thread contains."""
    found: list[Event] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0.0):
            found.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return found


def _paths(points: Sequence[Event], ranges: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return the names of the ranges open at each event's start, on its thread, outermost first."""
    found: list[tuple[str, ...]] = [()] * len(points)
    stacks: dict[Any, list[Event]] = {}
    moments = [(e["ts"], 0, -e["dur"], e, -1) for e in ranges]
    moments += [(e["ts"], 1, 0.0, e, number) for number, e in enumerate(points)]
    for at, is_point, _, event, number in sorted(moments, key=lambda moment: moment[:3]):
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= at:
            stack.pop()
        if is_point:
            found[number] = tuple(each["name"] for each in stack)
        else:
            stack.append(event)
    return found


def trace_events(profiles: Sequence[StepProfile]) -> Iterator[Event]:
    """Yield a trace for Perfetto: a process for each step; kernels below part, layer and step."""
    for number, profile in enumerate(profiles):
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0,
               "args": {"name": str(profile.step)}}  # fmt: skip
        for stream in sorted({kernel.stream for kernel in profile.kernels}):
            own = [kernel for kernel in profile.kernels if kernel.stream == stream]
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": stream,
                   "args": {"name": f"stream {stream}"}}  # fmt: skip
            for name, kernels in _slices(own, str(profile.step), profile.kernels[0].start_us):
                yield {**kernels, "ph": "X", "name": name, "pid": number, "tid": stream}


def _slices(kernels: list[Kernel], step: str, zero: float) -> Iterator[tuple[str, Event]]:
    """Yield the step, its layers, their parts and the kernels; each within the one before."""
    yield step, _span(kernels, zero)
    for layer, of_layer in groupby(kernels, key=lambda kernel: kernel.layer):
        held = list(of_layer)
        if layer is not None:
            yield layer, _span(held, zero)
        for part, of_part in groupby(held, key=lambda kernel: kernel.part):
            own = list(of_part)
            yield part, _span(own, zero)
            yield from ((kernel.name, _span([kernel], zero)) for kernel in own)


def _span(kernels: Sequence[Kernel], zero: float) -> Event:
    begin, last = kernels[0].start_us, kernels[-1]
    return {"ts": begin - zero, "dur": last.start_us + last.us - begin}
