"""`tune` for users: a trace, a cost model and what is wanted in; the setting to use out.

The search is `mdi_sim/search/tune.py`; here a simulated run becomes the numbers it compares.

Read next: `mdi_sim/search/tune.py`, docs/tuning.md.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import V41_FLASH, ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.placement import Placement
from mdi_sim.search.settings import DEFAULT_TRIALS
from mdi_sim.search.tune import tune as run_search
from mdi_sim.search.tuning import GOODPUT, THROUGHPUT, Measured, Tuning
from mdi_traces.formats import load_requests
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run

if TYPE_CHECKING:
    from mdi_analysis import SLO


def tune(
    work: RequestTrace | str | os.PathLike[str],
    *,
    cost: StepCost | None = None,
    slo: "SLO | None" = None,
    scheduler: SchedulerConfig | None = None,
    ranks: int = 1,
    shape: ModelShape = V41_FLASH,
    placement: Placement | None = None,
    seed: int = 0,
    draft_accept_rate: float = 0.7,
    until_s: float | None = None,
    jobs: int = 1,
    trials: int = DEFAULT_TRIALS,
    on_trial: Callable[[int], None] | None = None,
) -> Tuning:
    """Search the scheduler settings that serve `work` best, by simulation.

    With `slo` the share of requests that meet it is maximised, ties by tokens per second; without,
    tokens per second. `work` is a request trace or the path of one. Options are those of
    `mdi_sim.search.tune.tune`, and so are the errors, beside `TraceError` for a broken trace file.
    """
    return run_search(
        work if isinstance(work, RequestTrace) else load_requests(work),
        measure=partial(measure, slo=slo),
        objective=THROUGHPUT if slo is None else GOODPUT,
        scheduler=scheduler,
        cost=cost,
        shape=shape,
        ranks=ranks,
        placement=placement,
        seed=seed,
        draft_accept_rate=draft_accept_rate,
        until_s=until_s,
        jobs=jobs,
        trials=trials,
        on_trial=on_trial,
    )


def measure(run: Run, slo: "SLO | None") -> Measured:
    """Return the numbers of a run that a tuning compares."""
    from minideepinfer.run_summary import summarize

    found = summarize(run, slo, itl=False)
    speed = found.throughput
    tokens = speed.input_tokens + speed.output_tokens
    return Measured(
        tokens_s=tokens / speed.span_s if speed.span_s > 0 else 0.0,
        goodput=None if found.goodput is None else found.goodput.goodput_share,
        completed=found.requests.completed,
        requests=found.requests.total,
        ttft_p99_ms=found.latency.ttft_ms.p99,
        tpot_p99_ms=found.latency.tpot_ms.p99,
        steps=found.engine.steps,
        extrapolated=None if found.extrapolated is None else found.extrapolated["steps"],
    )
