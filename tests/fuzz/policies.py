"""Random workloads under random scheduling policies: every rule of docs/policies.md holds.

Policies by name, axes put together at random, bounds on waiting. After every turn the scheduler's
own invariants are checked; each run must end with all requests answered once and all memory back
within a bound on its steps, nobody may be preempted twice without a token in between, runs taken
many steps at once make the plans of single steps, and a policy object with the engine's own rules
makes the plans of none.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from mdi_shared.config import SchedulerConfig
from mdi_shared.plan import PREFILL
from mdi_shared.policies import NO_POLICY, POLICIES, Policy, policy_from_spec
from mdi_shared.policies.base import SECOND
from mdi_shared.policies.registry import AXES, names_of
from mdi_shared.request import Request
from tests.shared.script import STEP_NS, ScriptedRank, ended
from tests.shared.workloads import Workload, play, small, wide, with_hints

WIDE_SHARE, REPEAT_SHARE, COMBINED_SHARE, EVICT_SHARE = 0.02, 0.4, 0.4, 0.6
PARAMETERS = {
    "mlfq": "quantum=8,levels=3,promote_s=0.2", "las": "quantum=16", "wait": "threshold=2,width=8",
    "two_lanes": "threshold=8,bound_s=0.1", "vtc": "predict=1,weights=a:2", "sjf": "sigma=1",
    "priority": "aging_s=0.1", "past_future": "alpha=0.3,reserve=0.1", "srpt": "tau=0.5",
    "watermark": "share=0.5", "qoe": "ttft_s=0.01,horizon_s=0.1", "sjf_decay": "rate=100",
    "mixed": "budget=6",
}  # fmt: skip
EVICTING = {
    "srpt": "evict=2", "limited_srpt": "evict=1,limit=0.5", "priority": "evict=3",
    "mlfq": "quantum=8,levels=3,promote_s=0.2,evict=2", "las": "quantum=16,evict=1",
    "qoe": "ttft_s=0.01,horizon_s=0.1,evict=2",
}  # fmt: skip


class Plain(Policy):
    """The engine's own rules as an object: each question is asked, and answered as before."""


def named(rng: random.Random, names: list[str], *, may_evict: bool = True) -> str:
    """Return a policy, with its default parameters or with those of a workload this small."""
    name = rng.choice(names)
    if may_evict and name in EVICTING and rng.random() < EVICT_SHARE:
        return f"{name}:{EVICTING[name]}"
    has_own = name in PARAMETERS and rng.random() < 0.7
    return f"{name}:{PARAMETERS[name]}" if has_own else name


def fitting(config: SchedulerConfig, spec: str) -> SchedulerConfig:
    """Return the options with which the policy can run."""
    policy = policy_from_spec(spec)
    if policy.evict:  # whom it evicts must not end
        config = replace(config, stop_preempted_request=False)
    if not policy.mixes:
        return config
    budget = max(config.token_budget, policy.budget)
    return replace(config, num_draft_tokens=0, context_parallel_size=1, chunked_prefill=True,
                   max_num_batched_tokens=budget)  # fmt: skip


def specification(rng: random.Random) -> str:
    """Return a random policy."""
    if rng.random() >= COMBINED_SHARE:
        parts = [named(rng, list(POLICIES))]
    else:
        axes = [axis for axis in AXES if rng.random() < 0.8]
        parts = []
        for axis in axes:
            may_evict = axis == "order" and not "".join(parts).startswith("phase=mixed")
            parts.append(f"{axis}={named(rng, names_of(axis), may_evict=may_evict)}")
    if not parts or rng.random() < 0.2:
        parts.append(f"max_wait_s={rng.choice([0, 0.05, 0.3])}")
    return "+".join(parts)


def schedule(seed: int) -> tuple[Workload, str, int]:
    """Return a workload, the policy it runs under, and how many steps a launch may take."""
    rng = random.Random(f"policy {seed}")
    workload = with_hints((wide if rng.random() < WIDE_SHARE else small)(seed, strict=False))
    repeat = 1
    if len(workload.scripts) == 1 and rng.random() < REPEAT_SHARE:
        repeat = rng.randint(2, 30)
        workload = replace(workload, config=replace(workload.config, num_draft_tokens=0))
    spec = specification(rng)
    return replace(workload, config=fitting(workload.config, spec)), spec, repeat


def most_steps(workload: Workload, num_preempted: int) -> int:
    """Bound the steps of a run: whatever is waited for, some step brings a token or a chunk.

    A request's prompt takes at most a step per token, its outputs one each, again after each
    preemption; between two prefill attempts lie at most `prefill_any_attempt_interval` decode
    steps for a group, plus those until the last arrival and those that return memory.
    """
    config: SchedulerConfig = workload.config
    requests = [r for script in workload.scripts for news in script.values() for r in news
                if isinstance(r, Request)]  # fmt: skip
    longest = max((r.prompt_len + r.max_tokens for r in requests), default=0)
    work = sum(r.prompt_len + r.max_tokens + 2 for r in requests) + longest * num_preempted
    between = config.prefill_any_attempt_interval * config.prefill_attempt_interval + 2
    arrivals = max((max(script, default=0) for script in workload.scripts), default=0)
    return arrivals + work * between + 3 * between


def run(seed: int, counts: Counter[str]) -> None:
    """Play one schedule; raise `AssertionError` for what must not be, and count what was."""
    workload, spec, repeat = schedule(seed)
    try:
        ranks = check(workload, spec)
    except Exception as error:
        error.add_note(f"under {spec}")
        raise
    counts["preemptions"] += sum(rank.scheduler.num_preempted for rank in ranks)
    counts["evictions"] += sum(
        len(turn.plan.preempted)
        for rank in ranks
        for turn in rank.turns
        if turn.plan.kind == PREFILL
    )
    counts["turns"] += sum(len(rank.turns) for rank in ranks)
    counts["schedules with axes combined"] += "=" in spec.partition(":")[0]
    counts["schedules of groups"] += len(ranks) > 1
    if repeat > 1:
        again, _ = play(workload, 10**6, scheduling=spec, repeat=repeat)
        assert singles(again[0]) == singles(ranks[0]), f"{repeat} steps at once made other plans"
        counts["schedules taken many steps at once"] += 1
    if seed % 5 == 0:
        plain, _ = play(workload, 10**6, scheduling=Plain())
        none, _ = play(workload, 10**6, scheduling=NO_POLICY)
        for one, other in zip(plain, none, strict=True):
            assert [t.plan for t in one.turns] == [t.plan for t in other.turns], "not the same"
        counts["schedules of the engine's own rules"] += 1


def check(workload: Workload, spec: str) -> list[ScriptedRank]:
    """Play a workload and hold it to the rules; return its ranks."""
    ranks, end = play(workload, 10**6, scheduling=spec)
    assert end is None, f"ended with: {end}"
    preempted = sum(rank.scheduler.num_preempted for rank in ranks)
    for rank in ranks:
        ended(rank)
        assert rank.scheduler.step <= most_steps(workload, preempted), "too many steps"
        progress(rank)
        evictions(rank, policy_from_spec(spec).evict)
        overdue_first(rank, policy_from_spec(spec).max_wait_s)
    return ranks


def progress(rank: ScriptedRank) -> None:
    """Assert that whoever is preempted again was given a token in between."""
    given: Counter[int] = Counter()
    at_preemption: dict[int, int] = {}
    ids = {name: seq_id for seq_id, name in rank.names.items()}
    for turn in rank.turns:
        for seq_id in turn.plan.preempted:
            assert at_preemption.get(seq_id, -1) < given[seq_id], "preempted again for nothing"
            at_preemption[seq_id] = given[seq_id]
        for name, count in turn.emitted.items():
            given[ids[name]] += count


def evictions(rank: ScriptedRank, most: int) -> None:
    """Assert that who gives way does so for a request that gets on, and not too often."""
    times: Counter[int] = Counter()
    for turn in rank.turns:
        plan = turn.plan
        if plan.kind == PREFILL and plan.preempted:
            assert plan.seq_ids, "evicted for nobody"
            assert not set(plan.preempted) & set(plan.seq_ids), "evicted for itself"
            assert max(times[seq_id] for seq_id in plan.preempted) < most, "evicted too often"
        times.update(plan.preempted)


def overdue_first(rank: ScriptedRank, max_wait_s: float) -> None:
    """Assert that nobody is admitted past a request that has waited for longer than the bound."""
    ids = {name: seq_id for seq_id, name in rank.names.items()}
    begun: set[int] = set()
    for turn in rank.turns if max_wait_s < inf else ():
        if turn.plan.kind == PREFILL:
            due_ns = (turn.plan.step - 1) * STEP_NS - max_wait_s * SECOND
            late = {ids[n] for n in filter(None, turn.waiting.split(",")) if n not in turn.dead
                    and rank.arrived_ns[n] <= due_ns}  # fmt: skip
            for seq_id in set(turn.plan.seq_ids) - begun:
                is_late = rank.arrived_ns[rank.names[seq_id]] <= due_ns
                assert is_late or not late - set(turn.plan.seq_ids), "an overdue one was passed"
        begun |= set(turn.plan.seq_ids)
        begun -= set(turn.plan.preempted)


def singles(rank: ScriptedRank) -> list[tuple[Any, ...]]:
    """Return one entry per step: what plans of many steps at once and of single ones share."""
    rows: list[tuple[Any, ...]] = []
    for turn in rank.turns:
        plan = turn.plan
        for shift in range(turn.taken):
            grown = tuple(k + shift for k in plan.ks)
            first = (plan.preempted, plan.ignored, plan.finished) if shift == 0 else ((), (), ())
            rows.append((plan.step + shift, plan.kind, plan.seq_ids, plan.qs, grown, *first))
    return rows


def policies(folder: Path) -> Callable[[int, Counter[str]], None]:
    """Return the suite."""
    return run
