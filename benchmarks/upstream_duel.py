"""Random workloads on the production engine's own scheduler and on ours: is every step the same?

Strict mode (`strict_upstream`) must make the engine's decisions, step by step and rank by rank.
The engine's C++ is fetched from the package index by name and built for the CPU (`upstream/`);
without a network, a C++ compiler or torch's headers the command says what is missing and ends
with 2. It ends with 1 when a row differs, and prints the first difference of each such workload.

    python -m benchmarks.upstream_duel [--small 3000] [--wide 1000] [--seed 0] [--build runs/duel]

A row is one step of one rank: kind; batch in order, with rows, context, slot and block ids;
finished, refused and preempted requests; the counter of decode steps; batched tokens; free blocks
and slots; tokens that became visible; and both queues in order, with every member's counters.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.upstream.engine import (
    Row,
    UpstreamMissingError,
    UpstreamRank,
    build,
    fetch,
    in_threads,
    make_groups,
)
from mdi_shared.errors import DeadlockError, UpstreamCheckError
from mdi_shared.request import Request
from tests.shared.script import Turn
from tests.shared.workloads import Workload, play, small, wide

MOST_STEPS = 1_500
STUCK_STEPS = 40  # turns for which a rank that we call stuck must stay so
EOS, TOKEN = 1, 7


# ---- both sides --------------------------------------------------------------------------------


def _rows(turns: list[Turn]) -> list[Row]:
    tables: dict[int, list[int]] = {}
    rows = []
    for turn in turns:
        if turn.free_after < 0:
            break  # the run ended inside this turn
        plan, batch = turn.plan, []
        for item in plan.items:
            kept = item.num_blocks - len(item.new_blocks)
            table = tables[item.seq_id] = [*tables.get(item.seq_id, [])[:kept], *item.new_blocks]
            batch.append((turn.names[item.seq_id], item.q, item.k, item.slot, table))
        rows.append({
            "kind": "P" if plan.is_prefill else "D",
            "batch": batch,
            "finished": [turn.names[seq_id] for seq_id in plan.finished],
            "ignored": [(turn.names[ending.seq_id], ending.reason) for ending in plan.ignored],
            "preempted": len(plan.preempted),
            "decode_step": plan.decode_step,
            "batched_tokens": plan.num_batched_tokens,
            "free": (plan.free_blocks, plan.free_slots),
            "visible": turn.emitted,
            "waiting": _queue(turn, turn.waiting),
            "running": _queue(turn, turn.running),
            "free_after": turn.free_after,
        })  # fmt: skip
    return rows


def _queue(turn: Turn, names: str) -> list[tuple[Any, ...]]:
    """Return a queue's members with their counters; what a dead one had in flight means nothing."""
    members = []
    for name in names.split(",") if names else ():
        length, cached, in_flight = map(int, turn.state[name].split("/"))
        members.append((name, length, cached, 0 if name in turn.dead else in_flight))
    return members


def make_upstream(
    module: ModuleType,
    workload: Workload,
    groups: list[Any],
) -> list[UpstreamRank]:
    """Return the engine's ranks for a workload."""

    def tokens_of(rank: int) -> Callable[[str, int, int, int, bool], tuple[int, ...]]:
        def tokens(name: str, step: int, q: int, done: int, is_prefill: bool) -> tuple[int, ...]:
            count = 1 if is_prefill else 1 + min(workload.accepted(name, step), q - 1)
            left = workload.stops[rank].get(name, 1 << 30) - done
            return tuple(EOS if i + 1 == left else TOKEN for i in range(count))

        return tokens

    return [UpstreamRank(module, workload.config, group, tokens_of(rank))
            for rank, group in enumerate(groups)]  # fmt: skip


class Upstream:
    """The engine's ranks on a workload, a step at a time."""

    def __init__(self, module: ModuleType, workload: Workload, groups: list[Any]) -> None:
        self.ranks = make_upstream(module, workload, groups)
        self.scripts = [dict(script) for script in workload.scripts]

    def turn(self) -> list[Row] | None:
        """Run a step of all ranks; None when everything has ended."""
        self._take_news()
        while not any(rank.has_unfinished() for rank in self.ranks):
            for rank in self.ranks:
                rank.process_before()
            if not any(self.scripts):
                return None
            for rank, script in zip(self.ranks, self.scripts, strict=True):
                if script:
                    script[rank.step + 1] = script.pop(min(script))
            self._take_news()
        return in_threads([rank.turn for rank in self.ranks])

    def _take_news(self) -> None:
        for rank, script in zip(self.ranks, self.scripts, strict=True):
            news = [one for step in sorted(s for s in script if s <= rank.step + 1)
                    for one in script.pop(step)]  # fmt: skip
            for one in news:
                if isinstance(one, Request):
                    rank.add(one)
            for one in news:
                if isinstance(one, str):
                    rank.abort(one)


# ---- comparison --------------------------------------------------------------------------------


def compare(
    module: ModuleType, workload: Workload, groups: list[Any]
) -> tuple[int, str | None, str]:
    """Return how many rows were equal, the first difference if any, and how the run ended."""
    ranks, end = play(workload, MOST_STEPS)
    ours = [_rows(rank.turns) for rank in ranks]
    upstream = Upstream(module, workload, groups)
    equal = 0
    for step in range(max(map(len, ours))):
        theirs = upstream.turn()
        if theirs is None:
            return equal, f"step {step + 1}: the engine has nothing left to do", "ended"
        for rank, (rows, other) in enumerate(zip(ours, theirs, strict=True)):
            if step >= len(rows):
                continue  # a rank met its deadlock in this turn, before others planned
            for name, value in other.items():
                if rows[step][name] != value:
                    where = f"step {step + 1}, rank {rank}, {name}"
                    return equal, f"{where}: ours {rows[step][name]}, theirs {value}", "ended"
            equal += 1
    if isinstance(end, UpstreamCheckError):
        try:
            upstream.turn()
        except RuntimeError:
            return equal, None, "ended by the engine's check"
        return equal, f"the engine goes on where we say: {end}", "ended"
    if isinstance(end, DeadlockError):
        return equal, _check_stuck(upstream, end), "deadlock"
    left = upstream.turn()
    return equal, f"the engine goes on: {left}" if left is not None else None, "ended"


def _check_stuck(upstream: Upstream, end: DeadlockError) -> str | None:
    """Say where the engine gets on although we say that no step can change anything.

    Requests and aborts that come later are kept from it: they may.
    """
    stuck = {name for name, _ in end.holders}
    for turn in range(STUCK_STEPS):
        rows = upstream.turn()
        if turn == 0:
            upstream.scripts = [{} for _ in upstream.scripts]
        batches = [[name for name, *_ in row["batch"]] for row in rows or []]
        if rows is None or any(stuck & set(batch) for batch in batches):
            return f"the engine gets on where we say: {end}"
    return None


def duel(
    module: ModuleType,
    make: Callable[[int], Workload],
    seeds: range,
    groups: dict[int, list[Any]],
) -> tuple[int, int, dict[str, int]]:
    """Compare workloads; return differing ones, rows that were equal, and how runs ended."""
    differing, equal, ends = 0, 0, {}
    for seed in seeds:
        workload = make(seed)
        rows, difference, end = compare(module, workload, groups[len(workload.scripts)])
        equal += rows
        ends[end] = ends.get(end, 0) + 1
        if difference is not None:
            differing += 1
            print(f"{make.__name__} workload {seed}: {difference}")
    return differing, equal, ends


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", type=int, default=3_000, help="workloads of a few requests")
    parser.add_argument("--wide", type=int, default=1_000, help="workloads of large batches")
    parser.add_argument("--seed", type=int, default=0, help="number of the first workload")
    parser.add_argument("--build", type=Path, default=Path("runs/duel"), help="folder to build in")
    options = parser.parse_args()
    try:
        folder = options.build.resolve()  # pip runs inside it
        module = build(fetch(folder), folder)
    except UpstreamMissingError as error:
        print(f"no duel: {error}", file=sys.stderr)
        return 2
    groups = {size: make_groups(size) for size in range(1, 5)}
    failed = 0
    for make, count in ((small, options.small), (wide, options.wide)):
        seeds = range(options.seed, options.seed + count)
        differing, equal, ends = duel(module, make, seeds, groups)
        failed += differing
        how = ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items()))
        print(f"{make.__name__}: {count:,} workloads ({how}), {equal:,} equal rows, "
              f"{differing} workloads with a difference")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
