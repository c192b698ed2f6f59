"""How long the device takes for a call, and what it does at best: for profiles and benchmarks.

Device time is measured by CUDA events. The device is kept busy until the host has queued what is
to be measured, so that launch overhead of short kernels is not counted; a call that waits for the
device by itself is timed with its waiting. Caches are overwritten before every measured call:
weights of a layer never are in cache when their turn comes. On a CPU it is wall time.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

CACHE_BYTES = 256 * 2**20  # more than any GPU's L2
HOLD_CYCLES = 40_000_000  # about 20 ms, in which the host queues the calls
MOST_QUEUED = 200  # calls held at once; a GPU's queue takes about a thousand launches

Call = Callable[[], object]


class Ceilings(NamedTuple):
    """What this device does at best: bfloat16 FLOP/s of a large product, and bytes/s copied."""

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, flops: float, num_bytes: float) -> float:
        """Return the milliseconds that so much work takes at least."""
        return 1e3 * max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)

    def __str__(self) -> str:
        return (f"{self.flops_per_s / 1e12:.4g} TFLOP/s bfloat16 product, "
                f"{self.bytes_per_s / 1e9:.4g} GB/s copy (read + written)")  # fmt: skip


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
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
        for _ in range(min(MOST_QUEUED, repeat - len(found))):
            flush.zero_()
            begin, end = (_event() for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(device)
        found += [begin.elapsed_time(end) for begin, end in events]
    return found


def _event() -> "torch.cuda.Event":
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wall_ms(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


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
