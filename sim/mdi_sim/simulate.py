"""Replays a request trace through the scheduler in virtual time: `simulate(trace, …) -> Run`.

Same trace, options and seed: equal bytes. The run's tables have the schema a real run writes.

Read next: `driver.py` (one rank), `group.py` (ranks together), `mdi_shared/loop.py` (the policy).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import simpy

from mdi_shared.chunking import ChunkPolicy, make_policy
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.describe_run import RunOptions, describe_run
from mdi_shared.errors import ConfigError
from mdi_shared.run_description import RunDescription
from mdi_shared.scheduler import Scheduler
from mdi_sim.driver import RankDriver, TimeIsUp
from mdi_sim.group import Group
from mdi_sim.outcomes import Outcomes
from mdi_sim.stretch import NEVER
from mdi_sim.workload import Workload
from mdi_traces.hints import with_predictions
from mdi_traces.prefixes import GRAIN, with_prefix_ids
from mdi_traces.recorder import RankRecorder
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run
from mdi_traces.schema import STEPS, Metadata
from mdi_traces.tables import build_run

RAN_DRY = "the run ended first"


def simulate(
    trace: RequestTrace,
    description: RunDescription | None = None,
    *,
    fast_forward: bool = True,
    on_progress: Callable[[int], None] | None = None,
    chunk_cost: StepCost | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Serve every request of `trace` as described, changed by `options`; return what happened.

    Data-parallel ranks share one step kind and meet at every step, which takes as long as the
    slowest of them, or what a fitted model's group terms say. Requests keep the rank their trace
    names, the others are placed, a session as a whole. What has not ended when the run stops is
    reported unfinished, and apart what had not arrived. `fast_forward=False` runs every decode step
    through the loop; the result is the same. `on_progress` is called with the number of requests
    that just ended. `chunk_cost` is what the chunk policy believes of step times (left out: the
    run's).

    Raises `ConfigError` for options that contradict each other or a KV pool that could not serve
    one request of `max_model_len`, and `DeadlockError` when no step can ever help (only the
    upstream rules, `strict_upstream`, can get there).
    """
    run = describe_run(description, **options)
    config, cost, until_s = run.scheduler, run.step_cost, run.until_s
    config.require_pool_fits()
    trace, shares = _prepared(trace, run), config.enable_prefix_cache
    workload = Workload(trace, run.ranks, run.new_placement(), has_prefixes=shares)
    env = simpy.Environment()
    group = Group(
        env, run.ranks, getattr(cost, "group", None),
        until_ns=NEVER if until_s is None else int(until_s * 1e9),
        # Who is placed by what is seen now must be seen now, whatever is certain to come.
        looks_cost=workload.watches or cost.host.ingress_ns_per_token > 0,
    )  # fmt: skip
    chunks = make_policy(config, run.shape, cost if chunk_cost is None else chunk_cost)
    schedulers = [_scheduler(run, chunks) for _ in range(run.ranks)]
    sources, front = workload.sources(schedulers)
    drivers = [
        RankDriver(
            rank, group=group, scheduler=schedulers[rank], source=source,
            outcomes=Outcomes(config=config, seed=run.seed, accept_rate=run.draft_accept_rate),
            recorder=RankRecorder(rank, drafting=config.num_draft_tokens > 0),
            request_of=workload.request, shape=run.shape, cost=cost,
            fast_forward=fast_forward, on_progress=on_progress,
        )
        for rank, source in enumerate(sources)
    ]  # fmt: skip
    for driver in drivers:
        env.process(driver.run())
    try:
        reason, end_ns = _run(env, drivers, until_s)
    except OverflowError as error:
        raise ConfigError("cost", type(cost).__name__, "takes the run beyond 292 years, the most "
                          "that 64-bit nanoseconds hold") from error  # fmt: skip
    for driver in drivers:
        queues = driver.scheduler.queues
        pool = (queues.blocks.num_free, queues.slots.num_free)
        driver.recorder.closed(driver.scheduler.unfinished(), pool)
    if front is not None:
        sources.append(front)
    return build_run(
        [driver.recorder for driver in drivers], trace, _metadata(trace, run), config,
        run.shape,
        run_id=f"simulated-{run.seed}",
        arrived_ns={row: t for source in sources for row, t in source.arrived_ns.items()},
        unfinished_reason=reason,
        not_arrived=[row for source in sources for row in source.not_arrived(end_ns)],
    )  # fmt: skip


def _prepared(trace: RequestTrace, run: RunDescription) -> RequestTrace:
    """Return the trace with what the run's options ask for beyond it."""
    trace = with_predictions(trace, run.policy)
    if not run.scheduler.enable_prefix_cache:
        return trace
    return with_prefix_ids(trace, run.scheduler.block_size)


def _scheduler(run: RunDescription, chunks: ChunkPolicy) -> Scheduler:
    margin = run.shape.replay_keep_tokens
    return Scheduler(run.scheduler, chunks, run.new_policy(), hit_margin=margin)


def _run(
    env: simpy.Environment, drivers: Sequence[RankDriver], until_s: float | None
) -> tuple[str, int]:
    """Run to the end; return why what is open then is open, and when the end was, ns."""
    try:
        env.run()
    except TimeIsUp:
        assert until_s is not None, "there is a limit to reach"
        return f"time limit of {until_s:g} s", int(until_s * 1e9)
    return RAN_DRY, max(driver.now for driver in drivers)


def _metadata(trace: RequestTrace, run: RunDescription) -> Metadata:
    config = run.to_json()
    if run.scheduler.enable_prefix_cache:
        config[GRAIN] = trace.metadata.config[GRAIN]
    return replace(
        trace.metadata, table=STEPS, source="simulator", clock="virtual", model=run.shape.name,
        hardware=config["cost"].get("hardware"), config=config, seed=run.seed,
    )  # fmt: skip
