"""Device times on the host's clock, with events that are made up."""

import time

import pytest

from mdi_exec.engine import device_clock
from mdi_exec.engine.device_clock import RENEW_NS, CpuClock, CudaClock

OFFSET_MS = 500.0  # what the made-up device's clock is ahead of nothing in particular


class Event:
    """An event of a device whose clock is the host's, less an offset."""

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.ms = None

    def record(self):
        self.ms = device_clock.time.monotonic_ns() / 1e6 - OFFSET_MS

    def query(self):
        return False

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        assert other.ms >= self.ms, "marks are later than their anchor"
        return other.ms - self.ms


@pytest.fixture
def now(monkeypatch):
    """A clock in the hand: set now[0] to the time in ns."""
    hand = [10**12]

    class Time:
        monotonic_ns = staticmethod(lambda: hand[0])

    monkeypatch.setattr(device_clock, "time", Time)
    monkeypatch.setattr(device_clock.torch.cuda, "Event", Event)
    return hand


def test_marks_are_placed_by_their_distance_to_the_anchor(now):
    clock = CudaClock()
    now[0] += 3_000_000
    mark = clock.mark()
    now[0] += 9_000_000
    clock.wait(mark)
    assert clock.nanoseconds(mark) == 10**12 + 3_000_000


def test_an_old_anchor_gives_way_to_a_mark_the_host_waited_for(now):
    clock = CudaClock()
    now[0] += RENEW_NS + 1_000
    begin = clock.mark()
    now[0] += 1_000_000
    end = clock.mark()
    late_ns = 40_000  # the host wakes up that much after the mark
    now[0] += late_ns
    clock.wait(end)
    assert clock.nanoseconds(begin) == 10**12 + RENEW_NS + 1_000
    now[0] += 1_000_000
    after = clock.mark()
    clock.wait(after)
    assert clock.nanoseconds(after) == now[0] + late_ns, "the error that the module tells of"


def test_a_cpu_s_marks_are_times():
    clock, before_ns = CpuClock(), time.monotonic_ns()
    mark = clock.mark()
    clock.wait(mark)
    assert before_ns <= clock.nanoseconds(mark) <= time.monotonic_ns()
