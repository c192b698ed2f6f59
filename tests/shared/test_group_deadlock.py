"""Why a preempted sequence queues behind a half-prefilled head (docs/design.md).

In a group whose ranks want to prefill at different times, a half-prefilled prompt can wait for
many decode steps. A victim put in front of it, as upstream does, then waits for blocks that only
the prompt behind it can return. `python -m tests.shared.test_group_deadlock 3000` counts more.
"""

import random
import sys

import pytest

from mdi_shared.errors import DeadlockError
from mdi_shared.queues import Queues
from tests.shared.script import play_group_ranks, request, toy


def workload(seed):
    """Two ranks, a pool that obeys the start-up check, rare votes."""
    rng = random.Random(seed)
    num_blocks = rng.randint(10, 18)
    config = toy(
        num_blocks=num_blocks, max_model_len=int(0.8 * 4 * num_blocks) - 2,
        prefill_attempt_interval=rng.choice([1, 7]),
        prefill_any_attempt_interval=rng.choice([15, 30]), enable_zos=rng.random() < 0.5,
    )  # fmt: skip
    config.require_pool_fits()
    scripts = []
    for rank in range(2):
        script = {}
        for i in range(rng.randint(1, 4)):
            prompt = rng.randint(8, min(30, config.max_model_len))
            arrival = request(f"r{rank}_{i}", prompt, max_tokens=rng.randint(8, 20))
            script.setdefault(rng.randint(1, 12), []).append(arrival)
        scripts.append(script)
    return [config, config], scripts


def count_deadlocks(seeds):
    deadlocks = 0
    for seed in seeds:
        configs, scripts = workload(seed)
        try:
            play_group_ranks(configs, scripts, 3_000)
        except DeadlockError:
            deadlocks += 1
    return deadlocks


def overtake(queues, seq):
    """Upstream's place for a victim: in front of everybody."""
    queues.waiting.appendleft(seq)


def test_overtaking_a_half_prefilled_head_can_deadlock_a_group(monkeypatch):
    monkeypatch.setattr(Queues, "requeue", overtake)
    monkeypatch.setattr(Queues, "check_integrity", lambda queues: None)
    assert count_deadlocks(range(40)) > 0


@pytest.mark.parametrize("seeds", [range(0, 100), range(100, 200)], ids=["first", "second"])
def test_queueing_behind_it_never_does(seeds):
    assert count_deadlocks(seeds) == 0


if __name__ == "__main__":
    total = int(sys.argv[1])
    print(f"ours: {count_deadlocks(range(total))} of {total}")  # noqa: T201
    Queues.requeue = overtake
    Queues.check_integrity = lambda queues: None
    print(f"overtaking: {count_deadlocks(range(total))} of {total}")  # noqa: T201
