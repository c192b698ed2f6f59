"""Simulates one planned run and turns it into a row of a lab's result table.

It runs where the job was sent to, in a process or on a cluster, and loads the trace there; the last
few are kept, for runs of one workload follow each other.

Read next: `mdi_sim/search/rows.py` (the columns), `mdi_analysis/fairness.py` (who pays).
"""

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mdi_shared.errors import ConfigError, MiniDeepInferError, TraceError
from mdi_shared.run_description import RunDescription
from mdi_shared.served import Served
from mdi_sim.search.bounds import Bounds, Floats, alone_ms, lower_bounds
from mdi_sim.search.lab import Planned
from mdi_sim.search.rows import LATENCY_NAMES, SIZE_CLASSES, STATISTICS, Row
from mdi_sim.search.store import code_hash, trace_hash
from mdi_sim.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd

    from mdi_analysis import SLO
    from mdi_traces.requests import RequestTrace
    from mdi_traces.run import Run
    from minideepinfer.run_summary import RunSummary

WORKLOADS_AT_HAND = 4


def run_planned(planned: Planned) -> Row:
    """Simulate and measure one run; an error of the run becomes the row's `error`.

    Raises `MiniDeepInferError` where this process has other code or another trace than the one
    that planned the run: then no result would be what its key says.
    """
    if planned.code != code_hash():
        raise MiniDeepInferError("a worker has another version of this package than the lab")
    trace = _loaded(planned.run.served, planned.run.seed, planned.trace_hash)
    began = time.perf_counter()
    try:
        run = simulate(trace, planned.run)
        wall_s = time.perf_counter() - began
        measures = measure(run, planned.run, _slo(planned))
    except TraceError:
        raise
    except MiniDeepInferError as error:
        return planned.row({}, str(error), time.perf_counter() - began)
    return planned.row(measures, None, wall_s)


def measure(run: "Run", description: RunDescription, slo: "SLO") -> dict[str, Any]:
    """Return the measures of a run by the names of `rows.py`; those it does not have are absent."""
    from mdi_analysis import request_latencies
    from mdi_analysis.fairness import fairness, longest_wait_s
    from mdi_analysis.report import plain
    from minideepinfer.run_summary import summarize

    found = summarize(run, slo)
    latencies = request_latencies(run)
    fair = fairness(run)
    measures = {
        **_of_summary(found), **_within(latencies, slo),
        "offered_req_s": _offered(run), "clients": fair.clients, "jain": fair.jain,
        "service_gap": fair.service_gap, "longest_wait_s": longest_wait_s(run, latencies),
    }  # fmt: skip
    known: dict[str, Any] = plain(measures)
    ended = latencies[latencies["outcome"] == "completed"]
    if len(ended):
        table = run.requests_table.take(ended.index.to_numpy())
        known |= _over_bounds(known, lower_bounds(table, description))
        known |= plain(_slowdowns(ended, alone_ms(table, description)))
    return known


def _over_bounds(found: Mapping[str, Any], bounds: Bounds) -> dict[str, float]:
    """Return how far means and span are from what no policy could beat."""
    pairs = {"ttft": (found["ttft_ms_mean"], bounds.ttft_mean_ms),
             "e2e": (found["e2e_ms_mean"], bounds.e2e_mean_ms),
             "span": (found["span_s"], bounds.makespan_s)}  # fmt: skip
    return {f"{name}_over_bound": seen / least for name, (seen, least) in pairs.items()}


def _of_summary(found: "RunSummary") -> dict[str, Any]:
    """Return what every summary says, under the names of the table."""
    counts, speed, engine, good = found.requests, found.throughput, found.engine, found.goodput
    assert good is not None, "measured with an SLO, if one without bounds"
    latency = {
        f"{name}_ms_{statistic}": getattr(getattr(found.latency, f"{name}_ms"), statistic, None)
        for name in LATENCY_NAMES for statistic in STATISTICS
    }  # fmt: skip
    computed = speed.input_tokens + engine.recomputed_tokens
    prefill = engine.by_kind.get("prefill")
    return {
        "requests": counts.total, "completed": counts.completed, "rejected": counts.rejected,
        "unfinished": counts.unfinished + counts.aborted, "span_s": speed.span_s, **latency,
        "input_tok_s": _all_ranks(speed.input_tok_s_gpu, speed.n_gpus),
        "output_tok_s": _all_ranks(speed.output_tok_s_gpu, speed.n_gpus),
        "requests_s": speed.requests_s, "goodput_share": good.goodput_share,
        "goodput_s": good.goodput_s, "preemptions": engine.preemptions,
        "recomputed_tokens": engine.recomputed_tokens,
        "recomputed_share": engine.recomputed_tokens / computed if computed else None,
        "kv_occupancy_mean": engine.kv_occupancy_mean,
        "kv_occupancy_max": engine.kv_occupancy_max, "steps": engine.steps,
        "prefill_share": None if prefill is None else prefill.device_share,
        "rank_imbalance": engine.rank_imbalance, "vote_wait_share": engine.vote_wait_share,
        "extrapolated_share": _extrapolated(found),
    }  # fmt: skip


def _all_ranks(per_gpu: float | None, n_gpus: int) -> float | None:
    return None if per_gpu is None else per_gpu * n_gpus


def _extrapolated(found: "RunSummary") -> float | None:
    counts = found.extrapolated
    return counts["steps"] / counts["of"] if counts and counts["of"] else None


def _within(latencies: "pd.DataFrame", slo: "SLO") -> dict[str, float | None]:
    """Return the share of requests within each bound alone, of those that arrived."""
    from mdi_analysis import SLO, meets_slo
    from mdi_analysis.metrics import NEVER_ARRIVED

    arrived = int((latencies["outcome"] != NEVER_ARRIVED).sum())
    found: dict[str, float | None] = {}
    for name in ("ttft", "tpot", "e2e"):
        limit = getattr(slo, f"{name}_ms")
        if limit is not None and arrived:
            met = meets_slo(latencies, SLO(**{f"{name}_ms": limit}))
            found[f"within_{name}_share"] = float(met.sum()) / arrived
    return found


def _offered(run: "Run") -> float | None:
    """Return requests per second over the span of their arrivals; None when all come at once."""
    arrival = run.requests["arrival_ns"]
    span_s = float(arrival.max() - arrival.min()) / 1e9
    return (len(arrival) - 1) / span_s if span_s > 0 else None


def _slowdowns(latencies: "pd.DataFrame", alone: Floats) -> dict[str, float | None]:
    from mdi_analysis import Distribution
    from mdi_analysis.fairness import by_size, slowdowns

    values = slowdowns(latencies, alone)
    whole = Distribution.of(values)
    classes = zip(SIZE_CLASSES, by_size(values, alone), strict=True)
    return {"slowdown_mean": whole.mean, "slowdown_p99": whole.p99,
            **{f"slowdown_{name}_mean": each.mean for name, each in classes}}  # fmt: skip


def _slo(planned: Planned) -> "SLO":
    from mdi_analysis import SLO
    from mdi_sim.search.slo import parse_service_level

    bounds = () if planned.slo is None else parse_service_level(planned.slo).per_request
    return SLO(**{f"{name}_ms": limit for name, limit in bounds})


@lru_cache(maxsize=WORKLOADS_AT_HAND)
def _loaded(served: Served, seed: int, wanted_hash: str) -> "RequestTrace":
    """Return the requests of a run, from the very file that the plan saw."""
    from minideepinfer.commands.describing import load_served

    if served.workload is None:
        try:
            is_same = trace_hash(str(served.trace)) == wanted_hash
        except ConfigError as error:
            raise MiniDeepInferError(
                f"the trace is not where a run is to begin: {error}"
            ) from error
        if not is_same:
            raise MiniDeepInferError(f"{served.trace} is another file than when the lab began")
    return load_served(served, seed)
