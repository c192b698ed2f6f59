"""Scheduling policies decide alike in every world: two drivers, fast-forward, a replay."""

import random
import zlib
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given, settings

from mdi_shared.cost.hardware import H200
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY
from mdi_sim.retrace import replay_recorded
from mdi_sim.simulate import simulate
from mdi_traces.check import check_run
from mdi_traces.requests import RequestTrace, put_column
from tests.fuzz.policies import Plain, fitting, specification
from tests.parity.test_parity import HOST, assert_same_run, blocking_run, configs, traces


def hinted(trace):
    """Give each request a client, a priority and a deadline, all by its name."""
    table = trace.table
    draws = [zlib.crc32(name.encode()) for name in table["req_id"].to_pylist()]
    for name, values in {
        "client": pa.array(["ab"[d % 2] for d in draws]),
        "priority": pa.array([d % 3 for d in draws], pa.int8()),
        "deadline_ns": pa.array([1_000_000 * (d % 40) or None for d in draws], pa.int64()),
    }.items():
        table = put_column(table, name, values)
    return RequestTrace(table, trace.metadata)


phases = st.sampled_from(["mixed", "phase=mixed:budget=20", "prefill_first", "decode_first"])
specs = st.integers(0, 10**6).map(lambda seed: specification(random.Random(seed))) | phases


@settings(max_examples=80, deadline=None, derandomize=True)
@given(traces.map(hinted), configs(), specs, st.sampled_from([1, 1, 3]))
def test_two_drivers_make_the_same_run(trace, config, spec, ranks):
    cost, config = RooflineCost(H200, TINY, host=HOST), fitting(config, spec)
    run = partial(simulate, trace, scheduler=config, cost=cost, shape=TINY, ranks=ranks,
                  policy=spec)  # fmt: skip
    found = run()
    assert_same_run(found, run(fast_forward=False))
    assert_same_run(found, blocking_run(trace, config, cost, ranks, policy=spec))
    assert [finding for finding in check_run(found) if not finding.skipped] == []


@settings(max_examples=50, deadline=None, derandomize=True)
@given(traces.map(hinted), configs(), specs)
def test_a_run_replayed_by_its_metadata_makes_the_same_plans(trace, config, spec):
    config = replace(fitting(config, spec), num_draft_tokens=0)  # a replay accepts none
    found = simulate(trace, scheduler=config, shape=TINY, ranks=1, policy=spec, fast_forward=False)
    assert found.metadata.config["policy"] == spec
    again = replay_recorded(found)
    assert again.items_table.drop_columns("run_id").equals(found.items_table.drop_columns("run_id"))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(traces, configs(), st.sampled_from([1, 4]))
def test_a_policy_of_the_engines_own_rules_changes_no_byte(trace, config, ranks):
    run = partial(simulate, trace, scheduler=config, shape=TINY, ranks=ranks)
    own, none = run(policy=Plain()), run()
    for name in ("steps", "items"):
        assert getattr(own, name).equals(getattr(none, name)), name
    assert [run.metadata.config["policy"] for run in (own, none)] == ["Plain", "fcfs"]
