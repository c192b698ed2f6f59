"""Serve one workload under several scheduling policies: what each gains, and who pays for it.

Usage: python examples/compare_policies.py [SPEC ...]. The pool is too small for the load, so
requests queue and are preempted. docs/policies.md lists what a SPEC may be.
"""

import sys

import minideepinfer as mdi

SPECS = sys.argv[1:] or [
    "fcfs", "shortest_prompt", "srpt", "srpt:sigma=1", "mcsf", "past_future",
    "victim=least_computed",
]  # fmt: skip
STEPS = mdi.ConstantCost(prefill_ns=60_000_000, decode_ns=15_000_000)
SCHEDULER = {"num_blocks": 200, "max_model_len": 16_384, "prefill_attempt_interval": 1}

work = mdi.generate_workload("azure-conv", num_requests=200, rate=22.0, seed=0)
print(f"{'':22} TTFT ms: mean      p50      p99   preempted  recomputed")
for spec in SPECS:
    run = mdi.simulate(work, policy=spec, cost=STEPS, scheduler=SCHEDULER)
    ttft, requests = run.requests["ttft_ms"], run.requests
    print(
        f"{spec:22} {ttft.mean():13,.0f} {ttft.median():8,.0f} {ttft.quantile(0.99):8,.0f}"
        f" {requests['n_preempt'].sum():11} {requests['n_recomputed_tokens'].sum():11,}"
    )
