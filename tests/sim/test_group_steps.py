"""Steps of a simulated group: when they start and end, whoever launches last."""

import itertools

import pytest
import simpy

from mdi_shared.cost.shape import TINY
from mdi_shared.cost.work import prefill_work
from mdi_sim.group import Group


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_step_ends_when_the_last_host_has_queued_its_work(order):
    """Rank 1 queues until 900, long after the devices' 300; the order of launches is nothing."""
    ready, device, queued = (0, 50, 100), (150, 200, 120), (10, 900, 500)
    group, work = Group(simpy.Environment(), 3), prefill_work(TINY, [(4, 4, 4)])
    steps = [group.launch(rank, ready[rank], device[rank], work, queued[rank]) for rank in order]
    assert {(step.start_ns, step.end_ns) for step in steps} == {(100, 900)}


def test_the_next_step_starts_when_the_one_before_ends():
    group, work = Group(simpy.Environment(), 1), prefill_work(TINY, [(4, 4, 4)])
    first = group.launch(0, 10, 100, work, queued_ns=40)
    second = group.launch(0, 20, 100, work, queued_ns=50)
    assert (first.start_ns, first.end_ns, second.start_ns, second.end_ns) == (10, 110, 110, 210)
