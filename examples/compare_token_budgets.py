"""Compare two prefill token budgets on the same requests.

Usage: python examples/compare_token_budgets.py [TRACE]. The budget bounds how many prompt tokens a
prefill step takes: a small one pauses running requests more often and for a shorter time, a large
one spends the weights' traffic on more tokens. Which is better depends on the load, so the table
shows both runs and their relative difference; the last lines single out what users feel.
"""

import sys

import rich

import minideepinfer as mdi

if len(sys.argv) > 1:
    work = mdi.load_requests(sys.argv[1], limit=200)
else:
    work = mdi.generate_workload("azure-conv", num_requests=200, seed=1)

cost = mdi.RooflineCost(mdi.H200, mdi.V41_FLASH, ep=8)
small, large = (
    mdi.simulate(work, cost=cost, scheduler=mdi.SchedulerConfig(max_num_batched_tokens=budget))
    for budget in (1024, 16_384)
)
found = mdi.compare(small, large, names=("budget 1024", "budget 16384"))
rich.print(found.table())
for metric in ("ttft_ms", "itl_ms"):
    pair = found.latency[metric]["p99"]
    print(f"{metric} p99: {pair.a:,.0f} ms against {pair.b:,.0f} ms")
print(small.summary(itl=False).basis)
