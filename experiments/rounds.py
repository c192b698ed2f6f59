"""The model of arXiv 2502.07115 on the engine's own core: one decode step is one round.

A prompt takes no time, a block holds one token, and a request of `output` tokens decodes as many
steps: the token that its prefill gives is one more, so the engine is told of `output` + 1. The
engine keeps a tenth of its pool free, and a fifth of it above the longest request; so its pool is
larger than the paper's, and `Within` holds admission to that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pyarrow as pa

from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.policies.admission import MCSF, peak_tokens
from mdi_shared.policies.base import Key, View
from mdi_shared.request import Sequence as Request
from mdi_sim.search.hindsight import Job
from mdi_sim.simulate import simulate
from mdi_traces.columns import numbers
from mdi_traces.requests import RequestTrace, build_requests
from mdi_traces.schema import Metadata

ROUND_NS = 1_000_000_000
INSTANT_NS = 1  # of a prefill step; a thousand of them are no round


@dataclass(eq=False)
class Within(MCSF):
    """MC-SF that may fill `pool` tokens of a larger pool; `by_arrival` keeps its admission only."""

    pool: int = 1
    by_arrival: bool = False

    def order(self, seq: Request, view: View) -> Key:
        return 0 if self.by_arrival else self.predicted(seq)

    def admit(self, seq: Request, view: View) -> bool:
        return peak_tokens(map(self._held_and_left, [*view.running, seq])) <= self.pool

    def _held_and_left(self, seq: Request) -> tuple[int, int]:
        """Return tokens in memory and rounds to go: the token of the prefill has had no round."""
        held = max(seq.cached, seq.request.prompt_len)
        return held, seq.request.prompt_len + self.predicted(seq) - held


def recipe(rng: Random, count: int, pool: tuple[int, int] = (30, 50)) -> tuple[list[Job], int]:
    """Return `count` requests that come at once and a pool, as section 5 of the paper has it."""
    size, jobs = rng.randint(*pool), []
    for _ in range(count):
        prompt = rng.randint(1, 5)
        jobs.append(Job(0, prompt, rng.randint(1, size - prompt)))
    return jobs, size


def as_trace(jobs: Sequence[Job]) -> RequestTrace:
    """Return the requests as a trace; arrivals are the starts of rounds."""
    arrival, prompt, output = np.array(jobs).T
    return build_requests(
        {
            "arrival_ns": numbers(arrival * ROUND_NS, pa.int64()),
            "prompt_len": numbers(prompt, pa.int32()),
            "output_len": numbers(output + 1, pa.int32()),
            "predicted_len": numbers(output, pa.int32()),  # those that need memory
        },
        Metadata(table="requests", source="generator"),
    )


def rounds_of(jobs: Sequence[Job], policy: Within) -> tuple[int, int]:
    """Serve the requests; return their total latency and the makespan, in rounds."""
    found = simulate(
        as_trace(jobs), cost=ConstantCost(INSTANT_NS, ROUND_NS), shape=TINY, policy=policy,
        scheduler={
            "num_blocks": 2 * policy.pool + 9, "block_size": 1, "max_model_len": policy.pool + 2,
            "max_num_seqs": len(jobs), "prefill_attempt_interval": 1, "enable_zos": False,
        },
    ).requests  # fmt: skip
    assert found["n_preempt"].sum() == 0, "what is admitted ends"
    waits = (found["t_finish"] - found["arrival_ns"]).sum() / ROUND_NS
    return round(float(waits)), round(float(found["t_finish"].max()) / ROUND_NS)
