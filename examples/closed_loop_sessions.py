"""Simulate conversations in a closed loop, and the same turns at their recorded times.

Usage: python examples/closed_loop_sessions.py [TRACE]. In a closed loop a user reads the answer
before asking again, so a slow engine is asked less often; at recorded times it is asked regardless
and its queue grows. Traces with sessions (BurstGPT, Bailian, TraceLab) can be given; the gaps in
them become think times. Without one, four times the preset's sessions per second are generated.
"""

import sys

import minideepinfer as mdi

if len(sys.argv) > 1:
    work = mdi.load_requests(sys.argv[1], limit=400, closed_loop=True)
else:
    work = mdi.generate_workload("chat-sessions", num_requests=400, seed=1, rate=2.0)

cost = mdi.RooflineCost(mdi.H200, mdi.V41_FLASH, ep=1)
for name, requests in (("closed loop", work), ("open loop", work.to_open_loop())):
    summary = mdi.simulate(requests, cost=cost).summary(itl=False)
    latency, counts = summary.latency, summary.requests
    print(
        f"{name:11}: {counts.completed} of {counts.total} completed in "
        f"{summary.throughput.span_s:,.0f} s, TTFT p50 {latency.ttft_ms.p50:,.0f} ms, "
        f"p99 {latency.ttft_ms.p99:,.0f} ms"
    )
print(summary.basis)
