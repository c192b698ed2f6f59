"""Replays a request trace through the scheduler in virtual time: `simulate(trace, …) -> Run`.

Same trace, options and seed: equal bytes. The run's tables have the schema a real run writes.

Read next: `driver.py` (one rank), `group.py` (ranks together), `mdi_shared/loop.py` (the policy).
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import simpy

from mdi_shared.chunking import make_policy
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import V41_FLASH, ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.errors import ConfigError
from mdi_shared.placement import Placement, RoundRobin
from mdi_shared.scheduler import Scheduler
from mdi_sim.driver import RankDriver, TimeIsUp
from mdi_sim.group import Group
from mdi_sim.outcomes import Outcomes
from mdi_sim.source import make_sources
from mdi_sim.workload import Workload
from mdi_traces.recorder import RankRecorder
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run
from mdi_traces.schema import Metadata
from mdi_traces.tables import build_run

LONGEST_RUN_S = 9e9  # what int64 nanoseconds hold
RAN_DRY = "the run ended first"


def simulate(
    trace: RequestTrace,
    *,
    scheduler: SchedulerConfig | None = None,
    cost: StepCost | None = None,
    shape: ModelShape = V41_FLASH,
    ranks: int = 1,
    placement: Placement | None = None,
    seed: int = 0,
    draft_accept_rate: float = 0.7,
    until_s: float | None = None,
    fast_forward: bool = True,
    on_progress: Callable[[int], None] | None = None,
    chunk_cost: StepCost | None = None,
) -> Run:
    """Serve every request of `trace` and return what happened.

    `cost` gives step times (left out: an H200 roofline for `shape`, experts split over `ranks`);
    `ranks` data-parallel ranks share one step kind and meet at every step, which takes as long as
    the slowest of them, or what a fitted model's group terms say. Requests keep the rank
    their trace names, the others are placed by `placement` (left out: round robin), a session as
    a whole. The run stops at `until_s` virtual seconds; what has not ended by then is reported
    unfinished, and apart what had not arrived. `fast_forward=False` runs every decode step through
    the loop; the result is the same. `on_progress` is called with the number of requests that just
    ended. `chunk_cost` is what the chunk policy believes of step times (left out: `cost`).

    Raises `ConfigError` for options that contradict each other or a KV pool that could not serve
    one request of `max_model_len`, and `DeadlockError` when no step can ever help (only the
    upstream rules, `strict_upstream`, can get there).
    """
    config = scheduler if scheduler is not None else SchedulerConfig()
    _check(config, ranks, draft_accept_rate, until_s)
    cost = cost if cost is not None else RooflineCost(H200, shape, ep=ranks)
    workload = Workload(trace, ranks, placement if placement is not None else RoundRobin())
    env = simpy.Environment()
    group = Group(env, ranks, cost.group if isinstance(cost, LinearCost) else None)
    sources = make_sources(workload.arrivals)
    policy = make_policy(config, shape, cost if chunk_cost is None else chunk_cost)
    schedulers = [Scheduler(config, policy) for _ in range(ranks)]
    recorders = [RankRecorder(rank, drafting=config.num_draft_tokens > 0) for rank in range(ranks)]
    for rank, recorder in enumerate(recorders):
        driver = RankDriver(
            rank,
            group=group,
            scheduler=schedulers[rank],
            source=sources[rank],
            outcomes=Outcomes(config=config, seed=seed, accept_rate=draft_accept_rate),
            recorder=recorder,
            request_of=workload.request,
            shape=shape,
            cost=cost,
            until_ns=None if until_s is None else int(until_s * 1e9),
            fast_forward=fast_forward,
            on_progress=on_progress,
        )
        env.process(driver.run())
    reason, end_ns = _run(env, until_s)
    for recorder, finished in zip(recorders, schedulers, strict=True):
        pool = (finished.queues.blocks.num_free, finished.queues.slots.num_free)
        recorder.closed(finished.unfinished(), pool)
    return build_run(
        recorders,
        trace,
        _metadata(trace, config, cost, shape, seed, ranks),
        config,
        run_id=f"simulated-{seed}",
        arrived_ns={row: t for source in sources for row, t in source.arrived_ns.items()},
        unfinished_reason=reason,
        not_arrived=[row for source in sources for row in source.not_arrived(end_ns)],
    )


def _run(env: simpy.Environment, until_s: float | None) -> tuple[str, int]:
    """Run to the end; return why what is open then is open, and when the end was, ns."""
    try:
        env.run()
    except TimeIsUp:
        assert until_s is not None, "there is a limit to reach"
        return f"time limit of {until_s:g} s", int(until_s * 1e9)
    return RAN_DRY, int(env.now)


def _check(config: SchedulerConfig, ranks: int, accept_rate: float, until_s: float | None) -> None:
    config.require_pool_fits()
    if ranks < 1:
        raise ConfigError("ranks", ranks, "must be at least 1")
    if not 0 <= accept_rate <= 1:
        raise ConfigError("draft_accept_rate", accept_rate, "must be between 0 and 1")
    if until_s is not None and not 0 < until_s < LONGEST_RUN_S:
        raise ConfigError("until_s", until_s, f"must be above 0 and below {LONGEST_RUN_S:g} s")


def _metadata(
    trace: RequestTrace,
    config: SchedulerConfig,
    cost: StepCost,
    shape: ModelShape,
    seed: int,
    ranks: int,
) -> Metadata:
    options: dict[str, Any] = {"scheduler": asdict(config), "ranks": ranks, "cost": cost.describe(),
                               "shape": asdict(shape)}  # fmt: skip
    return replace(
        trace.metadata,
        table="steps",
        source="simulator",
        clock="virtual",
        model=shape.name,
        hardware=options["cost"].get("hardware"),
        config=options,
        seed=seed,
    )
