"""Random workloads: options, and requests and aborts that come before given steps.

A seed makes the same workload everywhere. The duel with the production engine
(`benchmarks/upstream_duel.py`), the fuzzing of schedules (`tests/fuzz/schedules.py`) and the test
of the deviation table play them.
"""

import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mdi_shared.chunking import ChunkPolicy
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import DeadlockError, UpstreamCheckError
from mdi_shared.policies import NO_POLICY, Policy, new_policy
from mdi_shared.request import Hints, Request
from tests.shared.script import STEP_NS, ScriptedRank, run_together

Script = dict[int, list[Request | str]]


@dataclass(frozen=True)
class Workload:
    """Requests and aborts per rank by the step before which they come, and where outputs stop."""

    config: SchedulerConfig
    scripts: list[Script]
    stops: list[dict[str, int]]
    seed: int

    def accepted(self, name: str, step: int) -> int:
        """Return how many drafts of a request the device accepts in a step."""
        most = self.config.num_draft_tokens
        return zlib.crc32(f"{self.seed} {name} {step}".encode()) % (most + 1)


def play(
    workload: Workload,
    most_steps: int,
    *,
    policy: ChunkPolicy | None = None,
    repeat: int = 1,
    scheduling: str | Policy = NO_POLICY,
) -> tuple[list[ScriptedRank], Exception | None]:
    """Return our ranks after the run, and the error that ended it before its time, if one did."""
    ranks = [
        ScriptedRank(
            workload.config, {step: list(news) for step, news in script.items()}, policy=policy,
            repeat=repeat, scheduling=new_policy(scheduling),
            num_ranks=len(workload.scripts), stops=stops, accepted=Accepted(workload),
        )
        for script, stops in zip(workload.scripts, workload.stops, strict=True)
    ]  # fmt: skip
    try:
        run_together(ranks, most_steps)
    except (DeadlockError, UpstreamCheckError) as error:
        return ranks, error
    return ranks, None


class Accepted(Mapping[tuple[str, int], int]):
    """`Workload.accepted` for a scripted rank, which looks it up."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __getitem__(self, key: tuple[str, int]) -> int:
        return self.workload.accepted(*key)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[tuple[str, int]]:
        raise NotImplementedError


def with_hints(workload: Workload) -> Workload:
    """Return the workload with hints and arrival times for scheduling policies."""
    scripts = [
        {step: [_hinted(workload.seed, step, entry) for entry in script[step]] for step in script}
        for script in workload.scripts
    ]
    return replace(workload, scripts=scripts)


def _hinted(seed: int, step: int, entry: Request | str) -> Request | str:
    if isinstance(entry, str):
        return entry
    rng = random.Random(f"hints {seed} {entry.req_id}")
    hints = Hints(
        predicted_len=rng.choice([None, rng.randint(1, 30)]), client=rng.choice([None, "a", "b"]),
        deadline_ns=rng.choice([None, rng.randint(1, 100) * STEP_NS]),
        priority=rng.randint(-1, 2), program=rng.choice([None, "p", "q"]),
    )  # fmt: skip
    return replace(entry, hints=hints, arrived_ns=(step - 1) * STEP_NS)


def small(seed: int, *, strict: bool = True) -> Workload:
    """A few requests, pools that are short of blocks, every option there is."""
    rng = random.Random(f"small {seed}")
    ranks = rng.choice([1, 1, 1, 2, 3, 4])
    block_size, seats, nextn = rng.choice([4, 8]), rng.randint(1, 5), rng.choice([0, 0, 1, 2, 3])
    chunked, cp = rng.random() < 0.75, rng.choice([1, 1, 1, 2, 3])
    most_len = rng.choice([12, 24, 40])
    least = max(seats * (1 + nextn), block_size, 2 * cp)
    budget = rng.randint(least, max(least, 24)) if chunked else max(least, most_len)
    config = SchedulerConfig(
        block_size=block_size, num_blocks=rng.randint(4, 24), max_num_seqs=seats,
        max_model_len=most_len, max_num_batched_tokens=budget, chunked_prefill=chunked,
        context_parallel_size=cp, num_draft_tokens=nextn, enable_zos=rng.random() < 0.6,
        prefill_attempt_interval=rng.choice([1, 1, 2, 5]),
        prefill_any_attempt_interval=rng.choice([1, 3, 8]),
        stop_preempted_request=rng.random() < 0.3,
        lookahead=rng.choice([0, 0, 0, 2, 5]) if ranks == 1 else 0,  # a check ends one rank only
        prefill_max_sum_seqlen_k=rng.choice([2**30, 2**30, most_len + 6]),
        state_slot_ratio=rng.choice([1.0, 1.2, 2.0]), strict_upstream=strict,
    )  # fmt: skip
    return _fill(config, ranks, seed, rng, requests=8, last_step=30, longest=most_len + 4)


def wide(seed: int, *, strict: bool = True) -> Workload:
    """Batches above sixteen, whose order of equals is the library's, and pools that run short."""
    rng = random.Random(f"wide {seed}")
    seats, nextn = rng.randint(17, 96), rng.choice([0, 0, 0, 1, 3])
    rows = seats * (1 + nextn)
    config = SchedulerConfig(
        block_size=rng.choice([8, 16]), num_blocks=rng.randint(60, 400), max_num_seqs=seats,
        max_model_len=200, max_num_batched_tokens=max(rows, rng.choice([32, 64, 256])),
        num_draft_tokens=nextn, enable_zos=rng.random() < 0.7,
        prefill_attempt_interval=rng.choice([1, 3, 10]),
        prefill_any_attempt_interval=rng.choice([1, 7, 20]),
        stop_preempted_request=rng.random() < 0.2, strict_upstream=strict,
    )  # fmt: skip
    return _fill(config, rng.choice([1, 1, 2]), seed, rng, requests=rng.randint(20, 160),
                 last_step=60, longest=rng.choice([4, 20, 90]))  # fmt: skip


def _fill(
    config: SchedulerConfig, ranks: int, seed: int, rng: random.Random, *, requests: int,
    last_step: int, longest: int,
) -> Workload:  # fmt: skip
    scripts, stops = [], []
    for rank in range(ranks):
        script: Script = {}
        ends: dict[str, int] = {}
        for i in range(rng.randint(requests // 2, requests)):
            name, step, prompt = f"r{rank}.{i}", rng.randint(1, last_step), rng.randint(1, longest)
            cuts = sorted(rng.sample(range(1, prompt + 1), min(prompt, rng.choice([0, 0, 1, 2]))))
            script.setdefault(step, []).append(Request(
                req_id=name, prompt_len=prompt, max_tokens=rng.choice([1, 4, 4, 12, 30]),
                cached_len=rng.randrange(prompt) if rng.random() < 0.2 else 0,
                chunk_checkpoints=tuple(cuts),
            ))  # fmt: skip
            if rng.random() < 0.3:
                ends[name] = rng.randint(1, 12)
            if rng.random() < 0.15:
                script.setdefault(step + rng.randint(1, 25), []).append(name)
        scripts.append(script)
        stops.append(ends)
    return Workload(config, scripts, stops, seed)
