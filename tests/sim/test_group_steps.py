"""Steps of a simulated group: when they start and end, one by one and many at once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.repeat import Horizon, common_repeats
from mdi_sim.stretch import NEVER, Devices, Lane


def lane(device, *, steps=1, ready=0, queued=0, host=0, process=0, oldest=None, **given_):
    """A rank that takes part in a stretch; `device` are its device times."""
    options = {"next_ns": NEVER, "met_ns": 0, "in_flight_ns": [], "is_certain": True}
    return Lane(
        Horizon(steps, 100, 100, has_waiting=False, is_idle=False), False, 4, iter(device),
        ready_ns=ready, queued_ns=queued, host_ns=host, process_ns=process, oldest_ns=oldest,
        **(options | given_),
    )  # fmt: skip


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_step_ends_when_the_last_host_has_queued_its_work(order):
    """Rank 1 queues until 900, long after the devices' 300; the order of ranks is nothing."""
    ready, device, queued = (0, 50, 100), (150, 200, 120), (10, 900, 500)
    lanes = [lane([device[r]], ready=ready[r], queued=queued[r]) for r in order]
    stretch = Devices().run(lanes)
    assert (stretch.starts_ns, stretch.all_ends_ns) == ([100], [900])


def test_a_group_waits_for_its_slowest_rank():
    stretch = Devices().run([lane([device]) for device in (3, 8, 5)])
    assert stretch.all_ends_ns == [8]


def test_the_next_step_starts_when_the_one_before_ends():
    devices = Devices()
    first = devices.run([lane([100], ready=10, queued=40)])
    second = devices.run([lane([100], ready=20, queued=50)])
    assert (first.starts_ns, first.all_ends_ns) == ([10], [110])
    assert (second.starts_ns, second.all_ends_ns) == ([110], [210])


@st.composite
def pipelines(draw):
    """A lane of up to 30 steps with device times that do not fall, and where it may be cut."""
    times = st.integers(0, 60)
    device = sorted(draw(st.lists(st.integers(1, 90), min_size=1, max_size=30)))
    overlaps, is_full = draw(st.booleans()), draw(st.booleans())
    ready, free = draw(times), draw(times)
    oldest = None if overlaps and not is_full else draw(times)
    options = {
        "steps": len(device), "ready": ready, "queued": draw(st.integers(0, 150)),
        "host": draw(times), "process": draw(times), "oldest": oldest,
        "in_flight_ns": [free] if overlaps and is_full else [],
        "next_ns": draw(st.one_of(st.just(NEVER), st.integers(0, 2_500))),
    }  # fmt: skip
    return device, options, free, draw(st.one_of(st.just(NEVER), st.integers(0, 2_500)))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(pipelines())
def test_the_closed_form_is_the_law_turn_by_turn(pipeline):
    device, options, free, until = pipeline
    found = []
    for is_certain in (True, False):
        devices, one = Devices(), lane(device, **options, is_certain=is_certain)
        devices.free_ns = free
        found.append((devices.run([one], until_ns=until), devices.free_ns))
        stretch = found[-1][0]
        assert stretch.turns_ns(one) == stretch.met_ns[1:]
    (a, a_free), (b, b_free) = found
    assert (a.met_ns, a.starts_ns, a.all_ends_ns) == (b.met_ns, b.starts_ns, b.all_ends_ns)
    assert a_free == b_free


def test_who_waits_bounds_how_far_a_group_goes():
    """One rank with nobody waiting vetoes a prefill where all must want it (R6)."""

    def far(steps, *, has_waiting=False, is_idle=False):
        return Horizon(steps, 3, 8, has_waiting, is_idle)

    assert common_repeats([far(50), far(20)]) == (3, 20)
    assert common_repeats([far(50, has_waiting=True), far(20)]) == (3, 8)
    assert common_repeats([far(50, has_waiting=True)] * 2) == (3, 3)
    assert common_repeats([far(50), far(2)]) == (2, 2)
    assert common_repeats([far(50, is_idle=True)] * 2) == (1, 1)
