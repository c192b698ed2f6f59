"""Sweep `prefill_attempt_interval`: how many decode steps run between two offers of a prefill.

Usage: python examples/sweep_attempt_interval.py [TRACE]. Offering often starts prompts early and
makes running requests wait; offering rarely does the opposite. Each line is one simulation of the
same requests, so only the option differs; two run at a time.
"""

import sys

import minideepinfer as mdi

if len(sys.argv) > 1:
    work = mdi.load_requests(sys.argv[1], limit=150)
else:
    work = mdi.generate_workload("azure-conv", num_requests=150, seed=1)

changes = {
    str(interval): {
        "scheduler": {
            "prefill_attempt_interval": interval,
            "prefill_any_attempt_interval": interval,
        }
    }
    for interval in (1, 10, 70, 300)
}
cost = mdi.RooflineCost(mdi.H200, mdi.V41_FLASH, ep=8)
found = mdi.simulate_many(work, changes, cost=cost, measure=mdi.SimulatedRun.summary, jobs=2)
print("interval  TTFT p50 ms  TPOT p50 ms  prefill steps")
for interval, summary in found.items():
    ttft, tpot = summary.latency.ttft_ms.p50, summary.latency.tpot_ms.p50
    steps = summary.engine.by_kind["prefill"].count
    print(f"{interval:>8}  {ttft:11.0f}  {tpot:11.1f}  {steps:13}")
print(summary.basis)
