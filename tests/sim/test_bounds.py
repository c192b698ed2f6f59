"""No simulated policy beats a bound, and no schedule of a small instance the optimum."""

from itertools import product
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.rounds import Within, as_trace, rounds_of
from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.hardware import B200, H200
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.describe_run import describe_run
from mdi_shared.errors import ConfigError
from mdi_sim.search.bounds import kv_token_steps, lower_bounds, srpt_flow
from mdi_sim.search.hindsight import Job, hindsight_optimum
from mdi_sim.simulate import simulate
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata

MODEL = read_cost_file("h200-flash-slice")
COSTS = {
    "constant": ConstantCost(prefill_ns=7_000_000, decode_ns=2_000_000),
    "roofline": RooflineCost(H200, TINY),
    "fitted": MODEL,
}
POLICIES = ["fcfs", "lcfs", "srpt", "mcsf", "conservative", "past_future", "victim=least_computed",
            "shortest_prompt", "run_to_completion", "mlfq", "phase=mixed",
            "srpt+phase=prefill_first"]  # fmt: skip


def trace_of(rows):
    """A trace of (gap to the one before in ms, prompt, output)."""
    gaps, prompts, outputs = zip(*rows, strict=True)
    arrivals = np.cumsum(gaps) - gaps[0]
    return build_requests(
        {
            "arrival_ns": pa.array((arrivals * 1_000_000).tolist(), pa.int64()),
            "prompt_len": pa.array(prompts, pa.int32()),
            "output_len": pa.array(outputs, pa.int32()),
        },
        Metadata(table="requests", source="generator"),
    )


rows = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 200), st.integers(1, 30)),
    min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from(sorted(COSTS)), st.sampled_from(POLICIES),
       st.sampled_from([(1, 0), (2, 0), (1, 2)]), st.sampled_from([32, 4_096]))  # fmt: skip
def test_no_policy_beats_a_bound(requests, cost, policy, ranks_and_drafts, budget):
    ranks, drafts = ranks_and_drafts
    drafts = 0 if policy == "phase=mixed" else drafts
    run = describe_run(
        cost=COSTS[cost], shape=V41_FLASH if cost == "fitted" else TINY, policy=policy, ranks=ranks,
        scheduler={"num_blocks": 24, "block_size": 16, "max_model_len": 256, "max_num_seqs": 8,
                   "max_num_batched_tokens": budget, "prefill_attempt_interval": 1,
                   "num_draft_tokens": drafts},
    )  # fmt: skip
    found = simulate(trace_of(requests), run).requests
    assert found["finish_reason"].notna().all()
    bound = lower_bounds(trace_of(requests).table, run)
    seen = {name: float(found[name].to_numpy(np.float64).mean()) for name in ("ttft_ms", "e2e_ms")}
    span_s = (found["t_finish"].max() - found["arrival_ns"].min()) / 1e9
    near = 1 + 1e-6  # columns of the table are 32-bit
    assert bound.ttft_mean_ms <= seen["ttft_ms"] * near
    assert bound.e2e_mean_ms <= seen["e2e_ms"] * near
    assert bound.makespan_s <= span_s * near


def test_bounds_are_reached_where_nothing_stands_in_the_way():
    """One request alone, and a queue that a step serves one by one."""
    cost = ConstantCost(prefill_ns=7_000_000, decode_ns=2_000_000)
    run = describe_run(cost=cost, shape=TINY, policy="srpt", scheduler={
        "num_blocks": 999, "max_model_len": 256, "max_num_seqs": 1,
        "prefill_attempt_interval": 1, "enable_zos": False})  # fmt: skip
    alone = lower_bounds(trace_of([(0, 10, 5)]).table, run)
    assert (alone.ttft_mean_ms, alone.e2e_mean_ms, alone.makespan_s) == (7.0, 15.0, 0.015)
    queue = trace_of([(0, 10, 5), (1, 10, 20), (1, 10, 40)])
    bound, found = lower_bounds(queue.table, run), simulate(queue, run).requests
    assert bound.e2e_mean_ms > alone.e2e_mean_ms
    assert bound.e2e_mean_ms / found["e2e_ms"].mean() > 0.95


def test_the_kv_bound_counts_token_steps():
    assert kv_token_steps(np.array([3, 10]), np.array([2, 1])) == (4 + 5) + 11


def test_srpt_is_optimal_among_orders_of_service():
    """Against every preemptive schedule in unit slots of three requests."""
    arrivals, works = [0, 1, 2], [3, 1, 2]

    def flow(slots):
        ends = [max(t for t, who in enumerate(slots) if who == row) + 1 for row in range(3)]
        return sum(ends) - sum(arrivals)

    allowed = [
        slots for slots in product(range(3), repeat=6)
        if all(slots.count(row) == work for row, work in enumerate(works))
        and all(arrivals[who] <= t for t, who in enumerate(slots))
    ]  # fmt: skip
    assert srpt_flow(arrivals, works) == min(map(flow, allowed))


@pytest.mark.parametrize("cost", [
    RooflineCost(H200, V41_FLASH, ep=8), RooflineCost(B200, V41_FLASH), MODEL,
    read_cost_file("h200-tiny"),
], ids=["h200", "b200", "fitted", "fitted-tiny"])  # fmt: skip
def test_cost_models_are_what_the_bounds_assume(cost):
    """A prompt takes no longer in one step than in two."""
    shape = TINY if isinstance(cost, LinearCost) and cost is not MODEL else V41_FLASH
    rng = Random(0)
    for _ in range(300):
        prompt = int(2 ** rng.uniform(1, 13))
        cut = rng.randint(1, prompt - 1)
        whole = cost.device_ns(prefill_work(shape, [(prompt, prompt, prompt)]))
        parts = [(cut, cut, prompt), (prompt - cut, prompt, prompt)]
        # A nanosecond of each step's rounding.
        assert whole <= sum(cost.device_ns(prefill_work(shape, [part])) for part in parts) + 2
        assert cost.device_ns(decode_work(shape, [prompt])) <= cost.device_ns(
            decode_work(shape, [prompt + 1, cut]))  # fmt: skip


jobs = st.lists(st.builds(Job, st.integers(0, 3), st.integers(1, 3), st.integers(1, 5)),
                min_size=1, max_size=3)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(jobs, st.integers(8, 12))
def test_the_programme_finds_what_trying_all_finds(jobs, pool):
    jobs = sorted(jobs)
    horizon = max(job.arrival for job in jobs) + sum(job.output for job in jobs)
    best = None
    for starts in product(*(range(job.arrival, horizon) for job in jobs)):
        held = [0] * (2 * horizon)
        for start, job in zip(starts, jobs, strict=True):
            for age in range(1, job.output + 1):
                held[start + age - 1] += job.prompt + age
        total = sum(s + job.output - job.arrival for s, job in zip(starts, jobs, strict=True))
        if max(held) <= pool and (best is None or total < best):
            best = total
    found = hindsight_optimum(jobs, pool, horizon=horizon)
    assert found.is_optimal
    assert found.latency == best
    short = hindsight_optimum(jobs, pool, horizon=1)
    assert short.bound <= best + 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_mcsf_is_near_the_optimum(seed):
    """Its own paper's recipe, a quarter as large; served by the engine's core."""
    rng = Random(seed)
    pool, jobs = rng.randint(9, 14), []
    for _ in range(5):
        prompt = rng.randint(1, 2)
        jobs.append(Job(0, prompt, rng.randint(1, pool - prompt)))
    mcsf, span = rounds_of(jobs, Within(pool=pool))
    best = hindsight_optimum(jobs, pool, horizon=span)
    assert best.is_optimal
    assert best.latency <= mcsf <= 1.2 * best.latency
    assert lower_bounds(as_trace(jobs).table, describe_run(
        cost=ConstantCost(1, 10**9), shape=TINY, scheduler={
            "num_blocks": pool + 1, "block_size": 1, "max_model_len": 8},
    )).e2e_mean_ms / 1e3 <= mcsf / len(jobs)  # fmt: skip


def test_what_could_never_run_is_refused():
    with pytest.raises(ConfigError, match=r"pool = 4: cannot hold Job\(arrival=0, prompt=3"):
        hindsight_optimum([Job(0, 3, 2)], 4, horizon=9)
