"""Spread requests over data-parallel ranks: by turns, by the tokens given, by what each has now.

Usage: python examples/ranks_and_placement.py [TRACE]. All ranks run the same kind of step and wait
for the slowest, so an uneven split costs everybody. `LeastTokens` balances prompt tokens, not the
time they take; `jsq` sees how many requests each rank has when a new one comes. A placement of your
own is a class with one method, such as `FirstRank` below (docs/own-policy.md).
"""

import sys
from collections.abc import Sequence

import minideepinfer as mdi

RANKS = 4


class FirstRank(mdi.Placement):
    """The worst there is: everything on rank 0."""

    def place(self, request: mdi.Request, ranks: Sequence[mdi.RankView]) -> int:
        return 0


if len(sys.argv) > 1:
    work = mdi.load_requests(sys.argv[1], limit=80)
else:
    work = mdi.generate_workload("azure-code", num_requests=80, seed=1)

for placement in ("round_robin", "least_tokens", "jsq", FirstRank()):
    summary = mdi.simulate(work, ranks=RANKS, placement=placement).summary(itl=False)
    name = placement if isinstance(placement, str) else type(placement).__name__
    print(
        f"{name:12}: TTFT p90 {summary.latency.ttft_ms.p90:,.0f} ms, "
        f"busiest rank {summary.engine.rank_imbalance:.2f} times the mean"
    )
print(summary.basis)
