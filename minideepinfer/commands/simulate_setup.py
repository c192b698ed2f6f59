"""From the options of the verbs that simulate to requests, scheduler and cost model.

Nothing is run here.

Read next: `simulate.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.footprint import weight_bytes
from mdi_shared.cost.group import ASSUMED, assumed_group_cost
from mdi_shared.cost.hardware import hardware_by_name, hardware_in
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import PredictedCost, read_cost_file
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import ModelShape, shape_by_name, shape_from_mapping
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.errors import ConfigError
from minideepinfer.commands.files import read_requests, require_input
from minideepinfer.commands.simulate_options import (
    DEFAULT_ACCEPT_RATE,
    DEFAULT_HARDWARE,
    DEFAULT_MODEL,
    DEFAULT_REQUESTS,
    ServingOptions,
)

if TYPE_CHECKING:
    from mdi_traces.requests import RequestTrace

SPLIT_WEIGHTS = ("routed_experts", "engram_tables")  # over expert-parallel ranks
GB = 1e9


def make_work(options: ServingOptions) -> "RequestTrace":
    """Return the requests to simulate. Raises `ConfigError` and `TraceError`."""
    work = _generated(options) if options.trace is None else _read(options)
    if options.closed_loop is False:
        work = work.to_open_loop()
    return work if options.speed is None else work.scaled(options.speed)


def _generated(options: ServingOptions) -> "RequestTrace":
    from mdi_traces.distributions import parse_arrivals
    from mdi_traces.generate import generate_workload

    assert options.workload is not None, "options name a trace or a workload"
    work = generate_workload(
        options.workload,
        num_requests=DEFAULT_REQUESTS if options.requests is None else options.requests,
        seed=options.seed,
        rate=options.rate,
        arrivals=None if options.arrivals is None else parse_arrivals(options.arrivals),
    )
    if options.closed_loop and work.table["think_ns"].null_count == len(work):
        raise ConfigError("closed_loop", True, f"workload {options.workload!r} has no sessions")
    return work


def _read(options: ServingOptions) -> "RequestTrace":
    assert options.trace is not None, "options name a trace or a workload"
    return read_requests(
        options.trace,
        format=options.format,
        limit=options.limit,
        sort=bool(options.sort),
        arrivals=options.arrivals,
        seed=options.seed,
        closed_loop=bool(options.closed_loop),
    )


def make_shape(options: ServingOptions, cost: LinearCost | PredictedCost | None) -> ModelShape:
    """Return the model to simulate: the one named, the one step times are for, or ours.

    Raises `ConfigError` for another model than the one that step times were predicted for.
    """
    if isinstance(cost, PredictedCost):
        if options.model not in (None, cost.shape.name):
            raise ConfigError("model", options.model, f"step times were predicted for "
                              f"{cost.shape.name}: see mdi transfer --model")  # fmt: skip
        return cost.shape
    if options.model is None and cost is not None and cost.fit.get("shape"):
        return shape_from_mapping(cost.fit["shape"])
    return shape_by_name(options.model or DEFAULT_MODEL)


def read_cost(options: ServingOptions) -> LinearCost | PredictedCost | None:
    """Return the fitted or predicted model of `--cost`, if one is given."""
    if options.cost is None:
        return None
    require_input(options.cost)
    return read_cost_file(options.cost)


def make_cost(
    options: ServingOptions, given: LinearCost | PredictedCost | None, shape: ModelShape
) -> StepCost:  # fmt: skip
    """Return the step times to simulate with: those given, or the roofline of `options`."""
    if given is None:
        return make_roofline(options, shape)
    return with_group(given, shape, options.ranks)


def with_group(
    cost: LinearCost | PredictedCost, shape: ModelShape, ranks: int
) -> LinearCost | PredictedCost:  # fmt: skip
    """Give step times fitted on one rank an assumed exchange when several ranks are simulated.

    Group terms that were fitted stay, and where the hardware's peak rates are not known there is
    nothing to assume. Raises `ConfigError` for ranks that cannot share the experts.
    """
    if not isinstance(cost, LinearCost) or ranks < 2 or cost.group is not None:
        return cost
    if shape.n_routed_experts % ranks:
        raise ConfigError("ranks", ranks, f"must divide the {shape.n_routed_experts} routed "
                          f"experts of {shape.name}, which ranks share")  # fmt: skip
    hardware = hardware_in(str(cost.fit.get("hardware")))
    if hardware is None:
        return cost
    return replace(cost, group=assumed_group_cost(hardware, shape, ranks))


def make_roofline(options: ServingOptions, shape: ModelShape) -> StepCost:
    """Return the roofline that `options` describe."""
    hardware = hardware_by_name(options.hardware or DEFAULT_HARDWARE)
    ep = options.ranks if options.ep is None else options.ep
    if ep < 1:
        name = "ranks" if options.ep is None else "ep"
        raise ConfigError(name, ep, "must be at least 1")
    return RooflineCost(hardware, shape, ep=ep)


def make_scheduler(
    options: ServingOptions,
    given: Mapping[str, Any],
    shape: ModelShape,
    slo_tpot_ms: float | None = None,
) -> SchedulerConfig:
    """Return the scheduler's options, its KV pool sized by `--kv-cache-memory-gb` where given.

    A cost target that nothing else sets follows the bound on TPOT.
    """
    given = _with_target(given, slo_tpot_ms)
    config = SchedulerConfig.from_mapping(given)
    pool_gb = options.kv_cache_memory_gb
    if pool_gb is None:
        return config
    if not 0 < pool_gb < math.inf:
        raise ConfigError("kv_cache_memory_gb", pool_gb, "must be a finite number above 0")
    block_bytes = shape.kv_bytes_per_block(config.block_size)
    num_blocks = int(pool_gb * GB // block_bytes)
    if num_blocks < 2:
        raise ConfigError("kv_cache_memory_gb", pool_gb, "must hold at least 2 blocks of "
                          f"{block_bytes:,} bytes")  # fmt: skip
    return SchedulerConfig.from_mapping({**given, "num_blocks": num_blocks})


def accept_rate(options: ServingOptions) -> float:
    """Return the chance that a draft token is accepted."""
    rate = options.draft_accept_rate
    return DEFAULT_ACCEPT_RATE if rate is None else rate


def _with_target(given: Mapping[str, Any], slo_tpot_ms: float | None) -> Mapping[str, Any]:
    """Let the bound on TPOT be the one on gaps that a cost target without any setting follows."""
    wants = given.get("chunk_policy") == "cost_target" and slo_tpot_ms is not None
    if wants and given.get("prefill_target_ms") is None and given.get("slo_itl_ms") is None:
        return {**given, "slo_itl_ms": slo_tpot_ms}
    return given


def memory_note(cost: StepCost, shape: ModelShape, config: SchedulerConfig) -> str | None:
    """Say when model and KV pool exceed the device of a roofline or prediction; None if not.

    Experts and Engram tables count as split over `ep` ranks, all other weights on each.
    """
    if not isinstance(cost, RooflineCost | PredictedCost):
        return None
    weights = weight_bytes(shape)
    split = sum(weights[name] for name in SPLIT_WEIGHTS)
    per_rank = split / cost.ep + sum(weights.values()) - split
    pool = config.num_blocks * shape.kv_bytes_per_block(config.block_size)
    pool += config.num_slots * shape.state_bytes_per_slot
    if per_rank + pool <= cost.hardware.hbm_bytes:
        return None
    return (
        f"{shape.name} with ep {cost.ep} needs {per_rank / GB:,.0f} GB of weights and "
        f"{pool / GB:,.1f} GB of caches per device, {cost.hardware.name} has "
        f"{cost.hardware.hbm_bytes / GB:,.0f} GB: predicted as if they fitted"
    )


def ranks_note(cost: StepCost, ranks: int) -> str | None:
    """Say when step times were predicted for another number of ranks than are simulated, and what
    the exchange of fitted ones rests on."""
    if isinstance(cost, LinearCost) and ranks > 1:
        return _group_note(cost, ranks)
    if not isinstance(cost, PredictedCost) or cost.ep == ranks:
        return None
    return (f"step times were predicted with experts split over {cost.ep}, but {ranks} "
            f"rank{'s are' if ranks > 1 else ' is'} simulated")  # fmt: skip


def _group_note(cost: LinearCost, ranks: int) -> str | None:
    if cost.group is None:
        return ("a step takes as long as its slowest rank: what exchanging rows adds is not known "
                f"for {cost.fit.get('hardware') or 'unnamed hardware'}")  # fmt: skip
    if cost.group.basis["kind"] == ASSUMED:
        terms, basis = cost.group.prefill, cost.group.basis
        return (
            "step times were fitted on one rank; exchanging rows is assumed, not measured: "
            f"{terms.const / 1e6:.3g} ms a step and {terms.rows:.3g} ns a row, at "
            f"{basis['link']:.0%} of the link of {basis['hardware']}"
        )
    if cost.group.ranks != ranks:
        return (f"the exchange was fitted to groups of {cost.group.ranks}, but {ranks} ranks are "
                "simulated")  # fmt: skip
    return None


def model_note(cost: StepCost, shape: ModelShape) -> str | None:
    """Say when a fitted model was fitted for another model than the one simulated."""
    fitted_for = cost.fit.get("model") if isinstance(cost, LinearCost) else None
    if fitted_for in (None, shape.name):
        return None
    return f"step times were fitted for {fitted_for}, but {shape.name} is simulated"
