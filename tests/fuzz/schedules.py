"""Random schedules by the hundred thousand: nothing hangs, nothing leaks, nobody is lost.

One rank and groups, aborts, preemption, asynchronous scheduling, drafts, context parallelism,
chunking on and off, checkpoints, cost targets, steps taken many at once, default and strict mode.
Every invariant of the scheduler is checked after every turn, and that a driver who knows only the
plans has the block tables of the core. In default mode each run must end with all requests answered
once and all memory back; in strict mode it may instead end with the production engine's deadlock or
its own check, and what an abort has lost must be accounted for.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mdi_shared.chunking import ChunkPolicy, CostTarget
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import NO_HOST_COST
from mdi_shared.cost.work import StepWork
from tests.shared.script import ended
from tests.shared.workloads import Workload, play, small, wide

MOST_STEPS = 100_000  # a run that takes more spins; a token per prefill step takes some thousand
WIDE_SHARE, STRICT_SHARE, TARGET_SHARE, REPEAT_SHARE = 0.02, 0.3, 0.25, 0.25


class RowCost:
    """A millisecond a step and 50 us a row; contexts cost, too, so that chunks shrink."""

    host = NO_HOST_COST

    def device_ns(self, work: StepWork) -> int:
        return 1_000_000 + 50_000 * work.rows + 2_000 * work.sum_k


def schedule(seed: int) -> tuple[Workload, ChunkPolicy | None, int]:
    """Return a workload, its chunk policy, and how many steps a launch may take."""
    rng = random.Random(f"schedule {seed}")
    make = wide if rng.random() < WIDE_SHARE else small
    workload = make(seed, strict=rng.random() < STRICT_SHARE)
    config, policy = workload.config, None
    if config.chunked_prefill and rng.random() < TARGET_SHARE:
        target_ns = rng.choice([1_050_000, 1_300_000, 2_000_000, 5_000_000])
        policy = CostTarget(TINY, RowCost(), target_ns, align=rng.choice([1, 4]),
                            cp_align=config.cp_align, tail_min=rng.choice([0, 3]),
                            min_chunk=rng.choice([1, 4]))  # fmt: skip
    can_repeat = len(workload.scripts) == 1 and not config.strict_upstream
    repeat = rng.randint(2, 30) if can_repeat and rng.random() < REPEAT_SHARE else 1
    if repeat > 1:
        workload = replace(workload, config=replace(config, num_draft_tokens=0))
    return workload, policy, repeat


def run(seed: int, counts: Counter[str]) -> None:
    """Play one schedule; raise `AssertionError` for what must not be, and count what was."""
    workload, policy, repeat = schedule(seed)
    ranks, end = play(workload, MOST_STEPS, policy=policy, repeat=repeat)
    is_strict = workload.config.strict_upstream
    assert end is None or is_strict, f"default mode ended with: {end}"
    counts["schedules in strict mode" if is_strict else "schedules in default mode"] += 1
    counts["schedules of groups"] += len(ranks) > 1
    counts["schedules with a cost target"] += policy is not None
    if end is not None:
        counts[f"strict mode: {type(end).__name__}"] += 1
    for rank in ranks:
        assert rank.scheduler.step < MOST_STEPS, f"no end within {MOST_STEPS:,} steps"
        if end is None:
            for reason in ended(rank).values():
                counts[f"requests ended: {reason}"] += 1
        counts["turns"] += len(rank.turns)
        counts["preemptions"] += rank.scheduler.num_preempted


def schedules(folder: Path) -> Callable[[int, Counter[str]], None]:
    """Return the suite."""
    return run
