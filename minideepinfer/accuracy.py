"""How near the simulator comes to recorded runs that its step times were not fitted to.

Each run is left out together with all runs of the same requests, a model is fitted to the rest,
and the run is simulated anew from its arrivals and options alone: no recorded duration goes in.

Read next: `mdi_sim/fit/calibrate.py` (the fit), `mdi_analysis/compare.py`, docs/accuracy.md.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from mdi_analysis.compare import compare
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.errors import ConfigError
from mdi_sim.fit.calibrate import Recorded, fit_runs, read_recorded, recordings, require_alike
from mdi_sim.fit.diagnostics import errors
from mdi_sim.fit.features import DECODE, PREFILL, gather_steps
from mdi_sim.fit.steps import predict
from mdi_sim.many import run_many
from mdi_sim.retrace import recorded_description, recorded_requests
from mdi_sim.search.model_error import ScaledCost
from mdi_sim.simulate import simulate
from mdi_traces.columns import ints
from mdi_traces.run import Run, load_run

# Relative errors that count as good: throughput, mean latencies, their 99th percentiles.
BARS = {"output_tok_s_gpu": 0.03, "ttft_mean": 0.05, "ttft_p99": 0.10, "tpot_mean": 0.05,
        "tpot_p99": 0.10}  # fmt: skip
SCALES = (0.99, 0.9925, 0.995, 0.9975, 0.999, 1.001, 1.0025, 1.005, 1.0075, 1.01)


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors of single device times: how many steps, median and 90th percentile."""

    n: int
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class RunAccuracy:
    """One run against its simulation: (simulated - recorded) / recorded.

    A latency that no request has, or the throughput of a run without decode steps, is None.
    `ttft_range` are the least and greatest error of the mean TTFT when all device times are off by
    up to 1 %.
    """

    name: str
    requests: int
    fitted_to: tuple[str, ...]
    relative: dict[str, float | None]
    steps: dict[str, StepError]
    ttft_range: tuple[float, float] | None = None

    @property
    def beyond(self) -> tuple[str, ...]:
        """The figures that miss their bar."""
        return tuple(name for name in BARS if self.of_bar(name) > 1)

    def of_bar(self, name: str) -> float:
        """Return how large an error is, 1 being its bar; 0 for a figure the run does not have."""
        return abs(self.relative[name] or 0.0) / BARS[name]

    @property
    def worst(self) -> str:
        """The figure that is worst by its bar."""
        return max(BARS, key=self.of_bar)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "beyond": list(self.beyond), "worst": self.worst}


def accuracy(
    paths: Sequence[str | os.PathLike[str]],
    only: Sequence[str] | None = None,
    *,
    spread: bool = False,
    jobs: int = 1,
) -> Iterator[RunAccuracy]:
    """Yield the accuracy of each run, or of those named in `only`, in the order of `paths`.

    Raises `TraceError` for a run that cannot be read, `ConfigError` for runs that do not belong
    together, leave too little to fit, or are not there. With `spread` each simulation is repeated
    with all device times off by -1 % to 1 %, for the range of the mean TTFT. `jobs` runs are
    simulated at a time.
    """
    if len(paths) < 2:
        raise ConfigError("traces", len(paths), "give at least two runs: one is left out")
    runs = [read_recorded(path) for path in paths]
    require_alike(runs)
    names = [run.name for run in runs]
    for name in only or ():
        if name not in names:
            raise ConfigError("only", name, f"must be one of {', '.join(names)}")
    numbers = recordings(runs)
    tasks: list[tuple[str, _Task]] = []
    for run, path, number in zip(runs, paths, numbers, strict=True):
        if only is None or run.name in only:
            others = [each for each, own in zip(runs, numbers, strict=True) if own != number]
            tasks.append((run.name, (run.name, path, others)))
    yield from run_many(partial(_accuracy_of, spread=spread), tasks, jobs=jobs)


# The name of a run, its path, and the runs to fit step times to.
_Task = tuple[str, str | os.PathLike[str], Sequence[Recorded]]


def _accuracy_of(task: _Task, *, spread: bool) -> RunAccuracy:
    name, path, others = task
    recorded = load_run(path)
    cost = fit_runs(others, judged=False)
    both = compare(recorded, resimulate(recorded, cost), ("recorded", "simulated"))
    relative = {"output_tok_s_gpu": both.rates["output_tok_s_gpu"].relative}
    for metric in ("ttft", "tpot"):
        for stat in ("mean", "p50", "p90", "p99"):
            relative[f"{metric}_{stat}"] = both.latency[f"{metric}_ms"][stat].relative
    return RunAccuracy(
        name, recorded.requests_table.num_rows, tuple(run.name for run in others), relative,
        _step_errors(recorded.steps_table, cost), _ttft_range(recorded, cost) if spread else None,
    )  # fmt: skip


def _ttft_range(recorded: Run, cost: LinearCost) -> tuple[float, float]:
    misses = []
    for scale in SCALES:
        simulated = resimulate(recorded, ScaledCost(cost, scale, scale))
        pair = compare(recorded, simulated, ("recorded", "simulated")).latency["ttft_ms"]["mean"]
        misses.append(pair.relative or 0.0)
    return min(misses), max(misses)


def resimulate(recorded: Run, cost: StepCost) -> Run:
    """Simulate a recorded run's requests under its options: arrivals in, everything else out."""
    ranks = int(ints(recorded.steps_table["rank"]).max()) + 1
    run = replace(recorded_description(recorded), cost=cost, ranks=ranks)
    return simulate(recorded_requests(recorded), run)


def _step_errors(table: pa.Table, cost: LinearCost) -> dict[str, StepError]:
    by_kind = {}
    for kind, terms in ((PREFILL, cost.prefill), (DECODE, cost.decode)):
        steps = gather_steps([table], kind)
        if len(steps):
            error = errors(steps.ns, predict(terms, steps))
            by_kind[kind] = StepError(len(steps), error["p50"], error["p90"])
    return by_kind
