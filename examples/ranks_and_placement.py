"""Spread requests over data-parallel ranks, by turns and by the tokens each rank was given.

Usage: python examples/ranks_and_placement.py [TRACE]. All ranks run the same kind of step and wait
for the slowest, so an uneven split costs everybody. `LeastTokens` balances prompt tokens, not the
time they take; a policy of your own is a class with one method, such as `FirstRank` below.
"""

import sys

import minideepinfer as mdi

RANKS = 4


class FirstRank:
    """The worst there is: everything on rank 0."""

    def place(self, prompt_len: int, max_tokens: int, num_ranks: int) -> int:
        return 0


if len(sys.argv) > 1:
    work = mdi.load_requests(sys.argv[1], limit=80)
else:
    work = mdi.generate_workload("azure-code", num_requests=80, seed=1)

for placement in (mdi.RoundRobin(), mdi.LeastTokens(), FirstRank()):
    summary = mdi.simulate(work, ranks=RANKS, placement=placement).summary(itl=False)
    print(
        f"{type(placement).__name__:11}: TTFT p90 {summary.latency.ttft_ms.p90:,.0f} ms, "
        f"busiest rank {summary.engine.rank_imbalance:.2f} times the mean"
    )
print(summary.basis)
