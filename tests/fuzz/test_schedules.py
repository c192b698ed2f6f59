"""A slice of the random schedules, small enough for every run of the tests."""

from collections import Counter

import pytest

from tests.fuzz.policies import run as run_under_policy
from tests.fuzz.schedules import run

SLICE = 400


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_end_with_everything_answered(part):
    counts: Counter[str] = Counter()
    for seed in range(part * SLICE, (part + 1) * SLICE):
        run(seed, counts)
    met = {"schedules of groups", "schedules with a cost target", "preemptions",
           "schedules in strict mode", "requests ended: abort", "strict mode: DeadlockError",
           "requests ended: insufficient_system_resource"}  # fmt: skip
    assert all(counts[name] > 0 for name in met), counts


def test_random_schedules_under_random_policies():
    counts: Counter[str] = Counter()
    for seed in range(SLICE):
        run_under_policy(seed, counts)
    met = {"preemptions", "schedules of groups", "schedules with axes combined",
           "schedules of the engine's own rules", "schedules taken many steps at once"}  # fmt: skip
    assert all(counts[name] > 0 for name in met), counts
