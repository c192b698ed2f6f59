"""Steps of a simulated group: when they start and end, one by one and many at once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.clock import FAR
from mdi_shared.repeat import Horizon
from mdi_sim.stretch import NEVER, Lane, Part, Timeline


def lane(device, *, steps=1, ready=0, queued=0, host=0, process=0, oldest=None, in_flight=0,
         next_ns=NEVER, parts=()):  # fmt: skip
    """A rank that takes part in a stretch; `device` are its device times."""
    return Lane(
        Horizon(steps, 1, 100, has_waiting=False, is_idle=False), is_prefill=False,
        part=Part(0, 4, host, 0, process, iter(device)), parts=iter(parts), ready_ns=ready,
        queued_ns=queued, oldest_ns=oldest, num_in_flight=in_flight, next_ns=lambda: next_ns,
        met_ns=0,
    )  # fmt: skip


def timeline(lanes, **options):
    found = Timeline(len(lanes), **options)
    found.lanes = lanes
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_step_ends_when_the_last_host_has_queued_its_work(order):
    """Rank 1 queues until 900, long after the devices' 300; the order of ranks is nothing."""
    ready, device, queued = (0, 50, 100), (150, 200, 120), (10, 900, 500)
    lanes = [lane([device[r]], ready=ready[r], queued=queued[r]) for r in order]
    group = timeline(lanes)
    assert group.run(lanes) == lanes
    assert (list(group.starts_ns), list(group.ends_ns)) == ([100], [900])


def test_a_group_waits_for_its_slowest_rank():
    lanes = [lane([device]) for device in (3, 8, 5)]
    group = timeline(lanes)
    group.run(lanes)
    assert list(group.ends_ns) == [8]
    assert list(group.own_ns) == [3, 8, 5]


def test_the_next_step_starts_when_the_one_before_ends():
    one = timeline([])
    for ready, queued in ((10, 40), (20, 50)):
        one.lanes = [lane([100], ready=ready, queued=queued)]
        one.run(one.lanes)
    assert (list(one.starts_ns), list(one.ends_ns)) == ([10, 110], [110, 210])


def test_ranks_that_nothing_happens_to_stay_in_their_launch():
    """Rank 1 launches anew after three steps, rank 0 looks at its arrival, rank 2 does nothing."""
    lanes = [lane([10] * 9, steps=9, next_ns=55), lane([20] * 3, steps=3), lane([5] * 9, steps=9)]
    group = timeline(lanes)
    assert group.run(lanes) == [lanes[1]]
    assert list(group.ends_ns) == [20, 40, 60]
    assert group.now_ns == 40
    group.lanes[1] = lane([1] * 9, steps=9, ready=40, oldest=0, in_flight=1)
    assert group.run([group.lanes[1]]) == [lanes[0]]
    assert list(group.ends_ns) == [20, 40, 60, 70]


@st.composite
def pipelines(draw):
    """A lane of up to 30 steps whose batch shrinks, and where it may be cut."""
    times = st.integers(0, 60)
    device = draw(st.lists(st.integers(1, 90), min_size=1, max_size=30))
    keep = draw(st.integers(0, 1))
    is_full = bool(keep) and draw(st.booleans())
    oldest = None if keep and not is_full else draw(times)
    cuts = sorted(draw(st.sets(st.integers(1, 30), max_size=4)))
    hosts = [(draw(times), draw(times)) for _ in range(len(cuts) + 1)]
    options = {"ready": draw(times), "queued": draw(st.integers(0, 150)), "oldest": oldest,
               "next_ns": draw(st.one_of(st.just(NEVER), st.integers(0, 2_500)))}  # fmt: skip
    return device, keep, cuts, hosts, options, draw(times)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pipelines())
def test_a_stretch_is_the_law_turn_by_turn(pipeline):
    device, keep, cuts, hosts, options, free = pipeline
    starts_at = [0, *cuts]
    parts = [Part(at, 4, host, 0, process, iter(device[at:]))
             for at, (host, process) in zip(starts_at, hosts, strict=True)]  # fmt: skip
    in_flight = keep if options["oldest"] is not None else 0
    one = lane(device, steps=len(device), in_flight=in_flight, parts=parts[1:], **options)
    one.part = parts[0]
    found = timeline([one], keep=keep)
    for column in (found.met_ns, found.starts_ns, found.ends_ns) if in_flight else ():
        column.append(free)
    found._free_ns = free
    found.run([one])
    of_step = [hosts[sum(at <= j for at in cuts)] for j in range(len(device))]
    met, starts, ends = [0], [], [free] * in_flight
    for j, ns in enumerate(device):
        ready = options["ready"] if j == 0 else met[-1] + of_step[j][0]
        starts.append(max(ends[-1] if ends else free, ready))
        ends.append(max(starts[-1] + ns, options["queued"]) if j == 0 else starts[-1] + ns)
        turn = ready
        if j or options["oldest"] is not None:
            process = options["oldest"] if j == 0 else of_step[j - keep][1]
            turn = max(ready, ends[j - keep + in_flight]) + process
        met.append(turn)
        if turn >= options["next_ns"]:
            break
    assert list(found.starts_ns)[in_flight:] == starts
    assert list(found.ends_ns) == ends
    assert found.now_ns == met[-1]


@pytest.mark.parametrize(
    ("waiting", "idle", "bounds"),
    [("", "", (3, FAR)), ("0", "", (3, 8)), ("01", "", (3, 3)), ("", "01", (1, 1))],
)
def test_who_waits_bounds_how_far_a_group_goes(waiting, idle, bounds):
    """One rank with nobody waiting vetoes a prefill where all must want it (R6)."""
    lanes = [lane([]), lane([])]
    for rank, each in enumerate(lanes):
        each.horizon = Horizon(50, 3, 8, str(rank) in waiting, str(rank) in idle)
    assert timeline(lanes)._bounds(0, lanes[0].horizon) == bounds
