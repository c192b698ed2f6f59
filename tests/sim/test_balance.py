"""BalanceRoute (arXiv 2605.06113) as a shape: the KV load of lock-step ranks gets more even.

And where a step's time grows with it, as with dense attention, steps take less.
"""

import pytest

from mdi_shared.cost.linear import PREFILL_TERMS, DecodeTerms, LinearCost, PrefillTerms
from mdi_sim.simulate import simulate
from mdi_traces.generate import generate_workload

RANKS = 16
INTERVALS = {"prefill_attempt_interval": 20, "prefill_any_attempt_interval": 20}
DENSE = LinearCost(
    prefill=PrefillTerms(**(dict.fromkeys(PREFILL_TERMS, 0.0) | {"const": 2e6, "rows": 5e3})),
    decode=DecodeTerms(const=3e6, rows=0.0, sum_k=300.0, n_seqs=0.0),
)


def loads(placement, work):
    """Return how far the fullest rank is above the mean, and what a decode step takes, ms."""
    run = simulate(work, cost=DENSE, ranks=RANKS, placement=placement, scheduler=INTERVALS)
    steps = run.steps[run.steps["kind"].isin(["decode", "idle_decode"])]
    kv = steps.pivot_table(index="step", columns="rank", values="sum_k")
    kv = kv[kv.mean(axis=1) > kv.mean(axis=1).mean() / 2]  # neither the start nor the end
    first = steps[(steps["rank"] == 0) & steps["step"].isin(kv.index)]
    took_ms = ((first["t_dev_end"] - first["t_dev_start"]) / 1e6).mean()
    return (kv.max(axis=1) / kv.mean(axis=1)).mean(), took_ms


@pytest.mark.parametrize("seed", [1, 2])
def test_balancing_kv_evens_the_ranks_and_shortens_their_steps(seed):
    work = generate_workload("azure-conv", num_requests=500, rate=60.0, seed=seed)
    found = {name: loads(name, work) for name in ("round_robin", "jsq", "balance")}
    imbalance, took_ms = found["balance"]
    for other in ("round_robin", "jsq"):
        assert imbalance < 0.9 * found[other][0], other
        assert took_ms < 0.95 * found[other][1], other
