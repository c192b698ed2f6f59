"""When the device did what, on the host's monotonic clock.

A mark is put between pieces of work and read once it has passed. On a CPU, where work is done when
the call returns, a mark is the time itself. On a GPU it is a CUDA event: its distance to another
one is exact to about a microsecond, but its place on the host's clock is not known. It is anchored
at an event whose end the host has seen, which takes some ten microseconds to wake up from: device
times as a whole may stand that much too late beside host times, and jump by as much when the
anchor is renewed. Differences between marks of one step do not suffer from it.
"""

import time
from typing import Any, Protocol

import torch

Mark = Any  # what a clock's `mark` returns: ns, or a CUDA event

RENEW_NS = 5_000_000_000  # an anchor's age; event distances are float32 ms: 0.5 us at 5 s


class DeviceClock(Protocol):
    """Marks of one device."""

    def mark(self) -> Mark:
        """Put a mark behind the work handed to the device so far."""

    def wait(self, mark: Mark) -> None:
        """Return when the mark has passed."""

    def nanoseconds(self, mark: Mark) -> int:
        """Return when a passed mark passed, on the clock of `time.monotonic_ns`."""


class CpuClock:
    """For devices that have done their work when the call returns."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def wait(self, mark: int) -> None:
        """Nothing to wait for."""

    def nanoseconds(self, mark: int) -> int:
        return mark


class CudaClock:
    """CUDA events on the current stream. Made once, while the device is idle: it waits for it."""

    def __init__(self) -> None:
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()
        self._newer: tuple[torch.cuda.Event, int] | None = None

    def mark(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: "torch.cuda.Event") -> None:
        if self._newer is not None:
            self._anchor, self._anchor_ns = self._newer
            self._newer = None
        was_early = not mark.query()  # type: ignore[no-untyped-call]
        mark.synchronize()
        now_ns = time.monotonic_ns()
        if now_ns - self._anchor_ns > RENEW_NS:
            # A mark that had passed before says nothing about now; it is only a nearer anchor.
            at_ns = now_ns if was_early else self.nanoseconds(mark)
            self._newer = (mark, at_ns)  # from the next step on: this one's other marks are older

    def nanoseconds(self, mark: "torch.cuda.Event") -> int:
        since_ms: float = self._anchor.elapsed_time(mark)
        return self._anchor_ns + round(since_ms * 1e6)


def clock_of(device: torch.device) -> DeviceClock:
    """Return a clock for the device; on a GPU it must be the current one."""
    return CudaClock() if device.type == "cuda" else CpuClock()
