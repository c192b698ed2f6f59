"""`tune` for users: a trace, the description of a run and what is wanted in; a setting to use out.

The search is `mdi_sim/search/tune.py`; here a simulated run becomes the numbers it compares.

Read next: `mdi_sim/search/tune.py`, `tune_report.py` (what is shown), docs/tuning.md.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Unpack

from mdi_shared.describe_run import RunOptions
from mdi_shared.run_description import RunDescription
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
    description: RunDescription | None = None,
    *,
    slo: "SLO | None" = None,
    jobs: int = 1,
    trials: int = DEFAULT_TRIALS,
    on_trial: Callable[[int], None] | None = None,
    **options: Unpack[RunOptions],
) -> Tuning:
    """Search the scheduler settings that serve `work` best, by simulation.

    With `slo` the share of requests that meet it is maximised, ties by tokens per second; without,
    tokens per second. `work` is a request trace or the path of one. Options are those of
    `simulate`, the others those of `mdi_sim.search.tune.tune`, and so are the errors, beside
    `TraceError` for a broken trace file.
    """
    return run_search(
        work if isinstance(work, RequestTrace) else load_requests(work),
        description,
        measure=partial(measure, slo=slo),
        objective=THROUGHPUT if slo is None else GOODPUT,
        jobs=jobs,
        trials=trials,
        on_trial=on_trial,
        **options,
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
