"""Let the simulator choose prefill settings for bounds on latency, and say how sure it is.

Usage: python examples/tune_for_an_slo.py [MODEL.json], a model calibrated for V4.1-Flash; without,
a roofline, whose error is not known. The search is short; `mdi tune` does the same with tables.
"""

import sys

import minideepinfer as mdi

work = mdi.generate_workload("azure-conv", num_requests=60, seed=1)
cost = mdi.RooflineCost(mdi.H200, mdi.V41_FLASH, ep=8)
if len(sys.argv) > 1:
    cost = mdi.LinearCost.from_json(sys.argv[1])

slo = mdi.SLO(ttft_ms=300, tpot_ms=20)
found = mdi.tune(work, cost=cost, slo=slo, trials=12)
for name, trial in (("default", found.default), ("best", found.best)):
    config, got = trial.config, trial.measured
    print(f"{name:8} budget {config.token_budget:6,}  "
          f"interval {config.prefill_attempt_interval:3}  goodput {got.goodput:.0%}  "
          f"TTFT p99 {got.ttft_p99_ms:.0f} ms")  # fmt: skip
print("the model's error:", {None: "not known", True: "smaller than the gain"}.get(
    found.is_beyond_error, "could explain the gain"))  # fmt: skip
