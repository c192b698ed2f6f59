"""The simulator against what can be computed by hand: queueing theory and single requests."""

import math

import numpy as np
import pyarrow as pa

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.step_cost import ConstantCost, HostCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_sim.simulate import simulate
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata

MS = 1_000_000


def trace_of(arrivals_ns, prompts, outputs):
    int32 = pa.int32()
    return build_requests(
        {
            "arrival_ns": pa.array(arrivals_ns, type=pa.int64()),
            "prompt_len": pa.array(prompts, type=int32),
            "output_len": pa.array(outputs, type=int32),
        },
        Metadata(table="requests", source="generator"),
    )


def test_an_m_d_1_queue_matches_theory():
    """One seat and one-token outputs make a single server with a constant service time.

    A request is one prefill step and one empty decode step that frees its seat (trace 2.3h), which
    takes no time where no other rank waits: the service is the prefill's. Mean wait by
    Pollaczek-Khinchine for constant service S at utilisation rho: rho * S / (2 * (1 - rho)). An
    arrival at an idle server finds no step on its way, as the seat was freed before the server
    went to sleep.
    """
    prefill, decode, rho, n = 4 * MS, 1 * MS, 0.7, 4_000
    service = prefill
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=64, block_size=16,
        prefill_attempt_interval=1, prefill_any_attempt_interval=1, enable_zos=False,
    )  # fmt: skip
    means = []
    for seed in range(8):
        gaps = np.random.default_rng(seed).exponential(service / rho, n)
        arrivals = np.cumsum(gaps).astype(np.int64)
        run = simulate(
            trace_of(arrivals, [8] * n, [1] * n), scheduler=config, shape=TINY,
            cost=ConstantCost(prefill_ns=prefill, decode_ns=decode),
        )  # fmt: skip
        waits = run.requests["t_first_sched"].to_numpy(dtype=np.int64) - arrivals
        means.append(waits[n // 10 :].mean())
    expected = rho * service / (2 * (1 - rho))
    error = np.std(means, ddof=1) / math.sqrt(len(means))
    assert abs(np.mean(means) - expected) < 3 * error
    assert error < 0.1 * expected, "the Monte-Carlo error is too large to test anything"


def test_a_single_request_takes_the_sum_of_its_steps():
    host = HostCost(schedule_ns=11_000, schedule_ns_per_seq=700, launch_ns=5_000,
                    process_ns=9_000, process_ns_per_seq=300)  # fmt: skip
    cost = RooflineCost(H200, V41_FLASH, host=host)
    prompt, output, chunk = 5_000, 40, 2_048
    config = SchedulerConfig(
        max_num_batched_tokens=chunk, prefill_attempt_interval=1, prefill_any_attempt_interval=1,
        enable_zos=False,
    )  # fmt: skip
    run = simulate(trace_of([3 * MS], [prompt], [output]), scheduler=config, cost=cost)
    around = host.schedule(1) + host.launch(1) + host.process(1)
    total = 0
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        total += around + cost.device_ns(prefill_work(V41_FLASH, [(end - start, end, prompt)]))
    request = run.requests.iloc[0]
    assert request["t_first_token"] - request["arrival_ns"] == total
    for k in range(prompt + 1, prompt + output):
        total += around + cost.device_ns(decode_work(V41_FLASH, [k]))
    assert request["t_finish"] - request["arrival_ns"] == total
    assert request["n_chunks"] == 3


def test_overlap_hides_the_host_behind_the_device_and_the_device_behind_the_host():
    """Steady state with ZOS: one step every max(g, s + l + p) (R26)."""
    config = SchedulerConfig(prefill_attempt_interval=1_000, prefill_any_attempt_interval=1_000)
    host = HostCost(schedule_ns=2 * MS, schedule_ns_per_seq=0, launch_ns=MS, process_ns=MS,
                    process_ns_per_seq=0)  # fmt: skip
    for device, period in ((9 * MS, 9 * MS), (3 * MS, 4 * MS)):
        cost = ConstantCost(prefill_ns=MS, decode_ns=device, host=host)
        run = simulate(trace_of([0], [100], [60]), scheduler=config, cost=cost)
        starts = run.steps.query("kind == 'decode'")["t_dev_start"].to_numpy()[5:]
        assert set(np.diff(starts)) == {period}
    sync = SchedulerConfig(
        prefill_attempt_interval=1_000, prefill_any_attempt_interval=1_000, enable_zos=False
    )
    run = simulate(trace_of([0], [100], [60]), scheduler=sync, cost=cost)
    starts = run.steps.query("kind == 'decode'")["t_dev_start"].to_numpy()
    assert set(np.diff(starts)) == {3 * MS + 4 * MS}


def test_a_lone_arrival_waits_for_the_next_vote():
    """The first prefill is at once; the next request waits out the attempt interval (R6)."""
    config = SchedulerConfig(prefill_attempt_interval=10, prefill_any_attempt_interval=1_000)
    cost = ConstantCost(prefill_ns=MS, decode_ns=MS)
    run = simulate(trace_of([0, 3 * MS], [10, 10], [100, 5]), scheduler=config, cost=cost)
    first, second = run.requests["t_first_sched"]
    assert first == 0
    prefills = run.steps.query("kind == 'prefill'")
    assert list(prefills["decode_step"]) == [0, 10]
    assert second == prefills["t_sched"].iloc[1] > 3 * MS
