"""A slice of each suite, the same at every run; `python -m tests.fuzz` has the rest."""

from collections import Counter

import pytest

from tests.fuzz.readers import readers
from tests.fuzz.suite import run

SEEDS = range(10**6, 2 * 10**6)  # others than those of docs/reliability.md begin with


def sliced(case, count, limit_s=40.0):
    counts: Counter[str] = Counter()
    failed = run(case, SEEDS[:count], counts, limit_s=limit_s)
    for seed, error in failed.items():
        raise AssertionError(f"seed {seed}") from error
    return counts


def test_damaged_traces(tmp_path):
    counts = sliced(readers(tmp_path), 600)
    assert min(counts[name] for name in ("texts read twice", "texts refused")) > 10
    assert counts["sealed files refused"] > 50


class TestWithModel:
    """What needs torch."""

    @pytest.fixture(autouse=True)
    def _torch(self):
        pytest.importorskip("torch", reason="running models needs the exec extra").set_num_threads(
            1
        )

    def test_commands(self, tmp_path):
        from tests.fuzz.commands import commands

        counts = sliced(commands(tmp_path), 40)
        assert min(counts[f"exit code {code}"] for code in (0, 2)) > 10

    def test_damaged_checkpoints(self, tmp_path):
        from tests.fuzz.checkpoints import checkpoints

        counts = sliced(checkpoints(tmp_path), 60)
        assert sum(count for name, count in counts.items() if "refused" in name) > 20
        assert counts["cases"] == 60

    def test_hostile_calls(self, tmp_path):
        from tests.fuzz.calls import calls

        counts = sliced(calls(tmp_path), 20)
        assert counts["honest requests answered"] > 20
        assert counts["calls refused"] > 50
        assert counts["engines stopped in the middle"] > 0

    @pytest.mark.parametrize("what", ["model differs", "worker interrupted"])
    def test_groups(self, tmp_path, what):
        from tests.fuzz.groups import FATES, MISFITS, groups

        counts: Counter[str] = Counter()
        groups(tmp_path)([*MISFITS, *FATES].index(what), counts)
        assert counts == {what: 1}
