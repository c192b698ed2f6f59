"""Two drivers, one policy: the simulator and a plain blocking driver make the same run.

Not only are the plan logs equal: since both take durations from one cost model, the whole tables
are, times included. Fast-forwarding in the simulator must not show either.
"""

import random
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given, settings

from mdi_shared.chunking import make_policy
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.linear import PREFILL_TERMS, DecodeTerms, LinearCost, PrefillTerms
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import ConstantCost, HostCost
from mdi_shared.placement import new_placement
from mdi_shared.policies import NO_POLICY, new_policy
from mdi_shared.scheduler import Scheduler
from mdi_sim.outcomes import Outcomes
from mdi_sim.simulate import RAN_DRY, simulate
from mdi_sim.workload import Workload
from mdi_traces.check import check_run
from mdi_traces.hints import with_predictions
from mdi_traces.recorder import RankRecorder
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata
from mdi_traces.tables import build_run
from tests.parity.blocking import BlockingRank, Exchange, FakeDevices, run_threads

HOST = HostCost(
    schedule_ns=40_000, schedule_ns_per_seq=1_000, ingress_ns_per_token=70, launch_ns=30_000,
    launch_ns_per_seq=800, prefill_launch_ns=35_000, prefill_launch_ns_per_token=90,
    prefill_queue_ns=160_000,
    process_ns=20_000, process_ns_per_seq=500, process_ns_per_prompt_token=20,
)  # fmt: skip
MS = 1_000_000


def blocking_run(trace, config, cost, ranks, seed=0, policy=NO_POLICY, placement="round_robin"):
    """The blocking driver's counterpart of `simulate`."""
    trace = with_predictions(trace, policy)
    workload = Workload(trace, ranks, new_placement(placement))
    devices, exchange = FakeDevices(ranks), Exchange(ranks)
    drafting = config.num_draft_tokens > 0
    recorders = [RankRecorder(rank, drafting=drafting) for rank in range(ranks)]
    schedulers = [
        Scheduler(config, make_policy(config, TINY, cost), new_policy(policy)) for _ in range(ranks)
    ]
    sources, front = workload.sources(schedulers)
    run_threads([
        BlockingRank(
            rank, scheduler=schedulers[rank], sources=sources, devices=devices,
            exchange=exchange, recorder=recorders[rank], front=front,
            parts=(
                workload.request, Outcomes(config=config, seed=seed, accept_rate=0.7), TINY, cost,
            ),
        )
        for rank in range(ranks)
    ])  # fmt: skip
    for recorder, scheduler in zip(recorders, schedulers, strict=True):
        queues = scheduler.queues
        recorder.closed(scheduler.unfinished(), (queues.blocks.num_free, queues.slots.num_free))
    metadata = Metadata(table="steps", source="simulator", clock="virtual")
    return build_run(
        recorders, trace, metadata, config, TINY, run_id=f"simulated-{seed}",
        arrived_ns={row: t for source in sources for row, t in source.arrived_ns.items()},
        unfinished_reason=RAN_DRY,
    )  # fmt: skip


def make_trace(rows):
    """Build a trace of (gap to the arrival before in ns, prompt, output, slack, session, think).

    `slack` is how much max_tokens exceeds the output; session -1 is none.
    """
    arrivals, now = [], 0
    for gap, *_ in rows:
        now += gap
        arrivals.append(now)
    gaps, prompts, outputs, slacks, sessions, thinks = zip(*rows, strict=True)
    del gaps
    seen, turns = {}, []
    for session in sessions:
        seen[session] = seen.get(session, -1) + 1
        turns.append(seen[session])
    in_session = [s >= 0 for s in sessions]
    follows = [s >= 0 and t > 0 for s, t in zip(sessions, turns, strict=True)]
    ints = partial(pa.array, type=pa.int32())
    return build_requests(
        {
            "arrival_ns": pa.array(arrivals, type=pa.int64()),
            "prompt_len": ints(prompts),
            "output_len": ints(outputs),
            "max_tokens": ints([o + s for o, s in zip(outputs, slacks, strict=True)]),
            "session_id": pa.array(
                [f"s{s}" if is_in else None for s, is_in in zip(sessions, in_session, strict=True)]
            ),
            "turn": ints([t if s else None for t, s in zip(turns, in_session, strict=True)]),
            "think_ns": pa.array(
                [t if f else None for t, f in zip(thinks, follows, strict=True)], type=pa.int64()
            ),
        },
        Metadata(table="requests", source="generator"),
    )


requests = st.tuples(
    st.sampled_from([0, 1, 50_000, 400_000, 2 * MS, 30 * MS, 400 * MS]),
    st.integers(1, 120),
    st.integers(1, 40),
    st.sampled_from([0, 0, 0, 5]),
    st.sampled_from([-1, -1, -1, 0, 1]),
    st.sampled_from([0, 100_000, 7 * MS]),
)
traces = st.lists(requests, min_size=1, max_size=14).map(make_trace)


@st.composite
def configs(draw):
    nextn = draw(st.sampled_from([0, 0, 0, 2]))
    return SchedulerConfig(
        block_size=16,
        num_blocks=draw(st.sampled_from([18, 24, 64])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=200,
        max_num_batched_tokens=draw(st.sampled_from([32, 64, 100])),
        enable_zos=draw(st.booleans()),
        prefill_attempt_interval=draw(st.sampled_from([1, 3, 7])),
        prefill_any_attempt_interval=draw(st.sampled_from([1, 5, 10])),
        num_draft_tokens=nextn,
        stop_preempted_request=draw(st.booleans()),
        strict_upstream=False,
    )


def assert_same_run(a, b):
    for name in ("steps_table", "requests_table", "items_table"):
        left, right = getattr(a, name), getattr(b, name)
        for column in left.column_names:
            # repr, because NaN, which stands for "not measured", is not equal to itself.
            same = repr(left[column].to_pylist()) == repr(right[column].to_pylist())
            assert same, f"{name}.{column} differs"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(traces, configs(), st.sampled_from([1, 4]))
def test_simulator_and_blocking_driver_make_the_same_run(trace, config, ranks):
    cost = RooflineCost(H200, TINY, ep=ranks, host=HOST)
    simulated = simulate(trace, scheduler=config, cost=cost, shape=TINY, ranks=ranks)
    assert_same_run(simulated, blocking_run(trace, config, cost, ranks))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(traces, configs(), st.sampled_from([1, 3]), st.sampled_from([0.05, 0.2, 1.0]))
def test_both_drivers_follow_a_cost_target_alike(trace, config, ranks, target_ms):
    target = replace(config, chunk_policy="cost_target", prefill_target_ms=target_ms)
    cost = RooflineCost(H200, TINY, host=HOST)
    simulated = simulate(trace, scheduler=target, cost=cost, shape=TINY, ranks=ranks)
    assert_same_run(simulated, blocking_run(trace, target, cost, ranks))
    assert [finding for finding in check_run(simulated) if not finding.skipped] == []


CALM = replace(HOST, ingress_ns_per_token=0)  # arrivals may wait for a vote
COSTS = {
    "roofline": lambda ranks, host: RooflineCost(H200, TINY, ep=ranks, host=host),
    "linear": lambda ranks, host: linear_cost(host=host),
    "constant": lambda ranks, host: ConstantCost(3 * MS, MS, host),
    "own": lambda ranks, host: NoisyCost(host),
}


def linear_cost(**options):
    terms = dict.fromkeys(PREFILL_TERMS, 0.0) | {"const": 2e6, "rows": 900.5}
    decode = DecodeTerms(const=1e6, rows=7e3, sum_k=13.25, n_seqs=55.5)
    return LinearCost(prefill=PrefillTerms(**terms), decode=decode, **options)


class NoisyCost:
    """A user's model, which draws: it must be asked for each step once, and in order."""

    def __init__(self, host):
        self.host, self.random = host, random.Random(5)

    def device_ns(self, work):
        return 900_000 + 3_000 * work.rows + self.random.randrange(200_000)

    def describe(self):
        return {"kind": "noisy"}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    traces, configs(), st.sampled_from([None, 0.004, 0.05]), st.sampled_from([1, 1, 2, 4]),
    st.sampled_from(sorted(COSTS)), st.booleans(), st.sampled_from([None, 0.2, 1.0]),
)  # fmt: skip
def test_fast_forward_does_not_show(trace, config, until_s, ranks, cost, calm, target_ms):
    if target_ms is not None:
        config = replace(config, chunk_policy="cost_target", prefill_target_ms=target_ms)
    one, other = (
        simulate(
            trace, scheduler=config, cost=COSTS[cost](ranks, CALM if calm else HOST), shape=TINY,
            until_s=until_s, ranks=ranks, fast_forward=fast_forward,
            chunk_cost=RooflineCost(H200, TINY, host=HOST),
        )
        for fast_forward in (True, False)
    )  # fmt: skip
    assert_same_run(one, other)


def test_ranks_go_forward_together():
    """The property above would hold vacuously if groups took single steps."""
    rows = [(0, 30, 40, 0, -1, 0)] * 8
    seen = []

    class Asked(NoisyCost):
        decode_times = ConstantCost(MS, MS).decode_times

        def device_ns(self, work):
            seen.append(work)
            return MS

    run = simulate(make_trace(rows), cost=Asked(HOST), shape=TINY, ranks=4)
    assert run.steps_table.num_rows > 4 * 40 > 10 * len(seen)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(traces, configs(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0.01]))
def test_every_run_obeys_the_conservation_laws(trace, config, ranks, until_s):
    run = simulate(trace, scheduler=config, shape=TINY, ranks=ranks, until_s=until_s)
    assert [finding for finding in check_run(run) if not finding.skipped] == []
    requests_ = run.requests
    ended = requests_["finish_reason"].notna()
    assert (ended | requests_["unfinished_reason"].notna()).all()
    assert until_s is not None or ended.all()
