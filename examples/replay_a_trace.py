"""Replay a request trace and see what the scheduler did with it.

Usage: python examples/replay_a_trace.py [TRACE]. A trace in any known format will do (Azure,
Mooncake, BurstGPT, ours); without one, 300 requests shaped like Azure's conversation trace are
generated. Step times come from the H200 roofline, so they are a prior, not a measurement.
"""

import sys

import minideepinfer as mdi

if len(sys.argv) > 1:
    work = mdi.load_requests(sys.argv[1], limit=300)
else:
    work = mdi.generate_workload("azure-conv", num_requests=300, seed=1)

run = mdi.simulate(work, cost=mdi.RooflineCost(mdi.H200, mdi.V41_FLASH, ep=8))
summary = run.summary(mdi.SLO(ttft_ms=2000, tpot_ms=50))
print(summary)
print(f"TTFT p99: {summary.latency.ttft_ms.p99:,.0f} ms")
print(f"laws broken: {len(mdi.check_run(run))}")
