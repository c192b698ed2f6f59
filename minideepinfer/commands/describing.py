"""From a verb's options to what it serves and to the description of a simulated run.

Read next: `options.py` (the flags), `mdi_shared/describe_run.py` (what is chosen for the rest).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi_shared.describe_run import describe_run
from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_shared.policies import NO_POLICY, Policy
from mdi_shared.run_description import RunDescription
from mdi_shared.served import DEFAULT_REQUESTS, Served
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import FileOptions, scheduler_options
from minideepinfer.commands.files import read_requests

if TYPE_CHECKING:
    from mdi_traces.requests import RequestTrace

MEMORY = {"kv_cache_memory_gb": float, "gpu_memory_utilization": float}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Of generated requests."""

    requests: o.Requests = None


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Of a trace file."""

    format: o.Format = None
    limit: o.Limit = None
    sort: o.Sort = None


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Of any requests, and on what they are served."""

    rate: o.Rate = None
    arrivals: o.Arrivals = None
    closed_loop: o.ClosedLoop = None
    speed: o.Speed = None
    max_prompt: o.MaxPrompt = None
    max_output: o.MaxOutput = None
    cost: o.Cost = None
    ranks: o.Ranks = None
    policy: o.PolicySpec = None
    placement: o.PlacementName = None
    kv_cache_memory_gb: o.KVMemory = None
    gpu_memory_utilization: o.Utilization = None
    seed: o.Seed = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where requests come from: one of the two."""

    trace: o.MaybeTrace = None
    workload: o.Workload = None


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions(FileOptions, RequestOptions, TraceOptions, WorkloadOptions, SourceOptions):
    """What is simulated, and on what."""

    model: o.ShapeName = None
    hardware: o.HardwareName = None
    ep: o.ExpertRanks = None
    draft_accept_rate: o.AcceptRate = None
    until_s: o.Until = None


def served_by(options: object) -> Served:
    """Return what the options of a verb name to be served."""
    given: dict[str, Any] = {
        field.name: getattr(options, field.name, None) for field in fields(Served)
    }
    paths = tuple(map(str, given["trace"] or ()))
    return Served(**{**given, "trace": paths[0] if len(paths) == 1 else paths or None})


def notes_on(work: "RequestTrace", policy: str | Policy = NO_POLICY) -> tuple[str, ...]:
    """Return what a reader of a run's figures should know about its requests."""
    from mdi_traces.pacing import unused_note

    unused = unused_note(work, policy)
    return work.metadata.notes if unused is None else (*work.metadata.notes, unused)


def load_served(served: Served, seed: int | None) -> "RequestTrace":
    """Return the requests. Raises `ConfigError` and `TraceError`."""
    read = _read if served.workload is None else _generated
    work = read(served, seed or 0)
    if served.closed_loop is False:
        work = work.to_open_loop()
    if served.max_prompt is not None or served.max_output is not None:
        from mdi_traces.requests import cut_lengths

        work = cut_lengths(work, max_prompt=served.max_prompt, max_output=served.max_output)
    return work if served.speed is None else work.scaled(served.speed)


def _generated(served: Served, seed: int) -> "RequestTrace":
    from mdi_traces.distributions import parse_arrivals
    from mdi_traces.generate import generate_workload

    assert served.workload is not None, "asked before"
    work = generate_workload(
        served.workload,
        num_requests=DEFAULT_REQUESTS if served.requests is None else served.requests,
        seed=seed,
        rate=served.rate,
        arrivals=None if served.arrivals is None else parse_arrivals(served.arrivals),
    )
    if served.closed_loop and work.table["think_ns"].null_count == len(work):
        raise ConfigError("closed_loop", True, f"workload {served.workload!r} has no sessions")
    return work


def _read(served: Served, seed: int) -> "RequestTrace":
    """Return a trace from its file; arrivals or a rate replace its own times, with a note."""
    if served.trace is None:
        raise MiniDeepInferError("nothing to serve: give a request trace, or --workload PRESET "
                                 "(mdi generate-workload --list shows the presets)")  # fmt: skip
    paths = [served.trace] if isinstance(served.trace, str) else served.trace
    return read_requests(
        [Path(path) for path in paths],
        format=served.format,
        limit=served.limit,
        sort=bool(served.sort),
        arrivals=served.arrivals,
        rate=served.rate,
        seed=seed,
        closed_loop=bool(served.closed_loop),
    )


def described(options: SimulatedOptions, slo_tpot_ms: float | None = None) -> RunDescription:
    """Return the run to simulate, its KV pool large enough to serve.

    With a run to start from, the options change it; requests of its own it keeps unless others are
    named. A cost target that nothing else sets follows the bound on TPOT.
    """
    base, scheduler = options.base, scheduler_options(options, MEMORY)
    memory = memory_options(options, scheduler)
    served = served_by(options)
    if base is not None:
        own = base.served.to_json()
        if served.trace is None and served.workload is None:
            served = Served.from_json({**own, **served.to_json()})
    drafts = scheduler.get("num_draft_tokens", base.scheduler.num_draft_tokens if base else 0)
    if options.draft_accept_rate is not None and not drafts:
        raise ConfigError("draft_accept_rate", options.draft_accept_rate, "changes nothing without "
                          "drafts: give --set num_draft_tokens=N, too")  # fmt: skip
    run = describe_run(
        base, served=served, scheduler=with_target(scheduler, slo_tpot_ms) or None,
        shape=options.model, hardware=options.hardware, ep=options.ep, cost=options.cost,
        ranks=options.ranks, policy=options.policy, placement=options.placement, seed=options.seed,
        until_s=options.until_s, draft_accept_rate=options.draft_accept_rate,
        kv_cache_memory_gb=memory["kv_cache_memory_gb"],
        gpu_memory_utilization=memory["gpu_memory_utilization"],
    )  # fmt: skip
    run.scheduler.require_pool_fits()
    return run


def memory_options(options: RequestOptions, scheduler: dict[str, Any]) -> dict[str, Any]:
    """Return the memory options, by flag or out of those of `--set`, which lose them."""
    found = {}
    for name in MEMORY:
        flag = getattr(options, name)
        if flag is not None and name in scheduler:
            raise ConfigError(name, flag, "is set twice")
        found[name] = scheduler.pop(name, flag)
    return found


def with_target(given: Mapping[str, Any], slo_tpot_ms: float | None) -> Mapping[str, Any]:
    """Let the bound on TPOT be the one on gaps that a cost target without any setting follows."""
    wants = given.get("chunk_policy") == "cost_target" and slo_tpot_ms is not None
    if wants and given.get("prefill_target_ms") is None and given.get("slo_itl_ms") is None:
        return {**given, "slo_itl_ms": slo_tpot_ms}
    return given
