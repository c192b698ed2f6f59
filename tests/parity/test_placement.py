"""Placements that watch see the same ranks in every world: two drivers, fast-forward, replay."""

from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mdi_shared.cost.hardware import H200
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.errors import PlacementError
from mdi_shared.placement import PLACEMENTS, Placement
from mdi_shared.policies.prediction import hashed
from mdi_shared.rank_view import ReportedState
from mdi_sim.retrace import replay_recorded
from mdi_sim.simulate import simulate
from mdi_traces.check import check_run
from tests.parity.test_parity import (
    CALM,
    HOST,
    MS,
    assert_same_run,
    blocking_run,
    configs,
    make_trace,
    traces,
)


class Everything(Placement):
    """Goes by a hash of all that it sees, so that any difference shows."""

    def place(self, request, ranks):
        seen = [[getattr(rank, name) for name in ReportedState._fields[1:]] for rank in ranks]
        return hashed(f"{request} {seen}") % len(ranks)


placements = st.sampled_from([*PLACEMENTS, Everything(), Everything(), Everything()])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(traces, configs(), st.sampled_from([2, 3, 4]), placements, st.booleans())
def test_two_drivers_and_single_steps_make_the_same_run(trace, config, ranks, placement, calm):
    cost = RooflineCost(H200, TINY, host=CALM if calm else HOST)
    run = partial(simulate, trace, scheduler=config, cost=cost, shape=TINY, ranks=ranks,
                  placement=placement)  # fmt: skip
    found = run()
    assert_same_run(found, run(fast_forward=False))
    assert_same_run(found, blocking_run(trace, config, cost, ranks, placement=placement))
    assert [finding for finding in check_run(found) if not finding.skipped] == []
    assert set(found.requests["rank"]) <= set(range(ranks))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(traces, configs(), st.sampled_from([0.004, 0.05]))
def test_a_run_that_is_cut_short_is_the_same_too(trace, config, until_s):
    run = partial(simulate, trace, scheduler=config, shape=TINY, ranks=4, placement=Everything(),
                  until_s=until_s)  # fmt: skip
    found = run()
    assert_same_run(found, run(fast_forward=False))
    assert len(found.requests) == len(trace)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(traces, configs())
def test_a_replay_takes_the_recorded_ranks(trace, config):
    if config.num_draft_tokens:  # a replay accepts none
        return
    found = simulate(trace, scheduler=config, shape=TINY, ranks=4, placement=Everything(),
                     fast_forward=False)  # fmt: skip
    assert found.metadata.config["placement"] == "Everything"
    again = replay_recorded(found)
    assert again.items_table.drop_columns("run_id").equals(found.items_table.drop_columns("run_id"))
    assert again.requests["rank"].equals(found.requests["rank"])


def test_a_late_request_goes_where_there_is_room_by_then():
    """Round robin does not see that rank 0 still works on the long one."""
    rows = [(0, 100, 40, 0, -1, 0), (0, 5, 1, 0, -1, 0), (20 * MS, 5, 1, 0, -1, 0)]
    ranks = {
        name: simulate(
            make_trace(rows), shape=TINY, cost=ConstantCost(3 * MS, MS), ranks=2, placement=name
        ).requests["rank"]
        for name in ("round_robin", "jsq", "least_kv_held", "power_of_two", "balance")
    }
    assert ranks.pop("round_robin").tolist() == [0, 1, 0]
    for name, found in ranks.items():
        assert found.tolist()[2] == 1 - found.tolist()[0], name


def test_a_placement_that_is_wrong_ends_a_simulation_in_one_line():
    class Beyond(Placement):
        def place(self, request, ranks):
            return len(ranks)

    with pytest.raises(PlacementError) as error:
        simulate(make_trace([(0, 5, 1, 0, -1, 0)]), shape=TINY, ranks=2, placement=Beyond())
    assert str(error.value) == (
        "placement Beyond: place for request '0' returned 2, but the ranks are 0 to 1"
    )
