"""What it gains a simulated data-parallel group to agree on its target step time (docs/log.md).

Four ranks, V4.1-Flash, 400 requests of which 15 % have prompts of 30,000 to 110,000 tokens, the toy
cost of engine-semantics §7.3. Nothing is measured on a device: the figures are the simulator's.

    python benchmarks/bench_balance.py
"""

from typing import Any

import numpy as np
import pyarrow as pa

from mdi_analysis import summarize
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.step_cost import HostCost
from mdi_shared.cost.work import StepWork
from mdi_sim.simulate import simulate
from mdi_traces.requests import RequestTrace, build_requests
from mdi_traces.schema import Metadata

RANKS, REQUESTS, LONG_SHARE = 4, 400, 0.15


class ToyCost:
    """T = 6 + .004 c + 2e-8 P(k, k + c, 2) + 2e-5 k ms for prefill, 12 ms for decode."""

    host = HostCost()

    def device_ns(self, work: StepWork) -> int:
        if not work.is_prefill:
            return 12_000_000
        pairs, cached = work.idx_pairs_r2 // 3, work.sum_k - work.rows
        return 6_000_000 + 4_000 * work.rows + pairs // 50 + 20 * cached

    def describe(self) -> dict[str, Any]:
        return {"kind": "toy"}


def requests(mean_gap_s: float) -> RequestTrace:
    """Return requests with exponential gaps, or all at once for a gap of 0."""
    dice = np.random.default_rng(0)
    is_long = dice.random(REQUESTS) < LONG_SHARE
    long, short = dice.integers(30_000, 110_000, REQUESTS), dice.integers(500, 6_000, REQUESTS)
    arrivals = np.cumsum(dice.exponential(mean_gap_s, REQUESTS) * 1e9).astype(np.int64)
    columns = {
        "arrival_ns": pa.array(arrivals),
        "prompt_len": pa.array(np.where(is_long, long, short), pa.int32()),
        "output_len": pa.array([16] * REQUESTS, pa.int32()),
    }
    return build_requests(columns, Metadata(table="requests", source="generator"))


def main() -> None:
    print(f"{'arrivals':>9} {'target ms':>9} {'balanced':>8} {'input tok/s/GPU':>15} "
          f"{'TTFT mean ms':>12} {'TTFT P99 ms':>11}")  # fmt: skip
    for gap in (0.0, 0.12):
        work = requests(gap)
        for target in (32.0, 64.0):
            for balanced in (False, True):
                config = SchedulerConfig(
                    prefill_attempt_interval=4, num_blocks=60_000, chunk_policy="cost_target",
                    prefill_target_ms=target, balance_target=balanced,
                )  # fmt: skip
                run = simulate(work, scheduler=config, cost=ToyCost(), ranks=RANKS)
                found = summarize(run, itl=False)
                ttft = found.latency.ttft_ms
                arrivals = f"{1 / gap:.1f}/s" if gap else "at once"
                print(f"{arrivals:>9} {target:>9g} {balanced!s:>8} "
                      f"{found.throughput.input_tok_s_gpu or 0:>15,.0f} {ttft.mean or 0:>12,.0f} "
                      f"{ttft.p99 or 0:>11,.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
