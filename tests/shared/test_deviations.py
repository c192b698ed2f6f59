"""Every difference between strict and default mode belongs to a row of `docs/design.md`'s table.

Strict mode makes the production engine's decisions (`benchmarks/upstream_duel.py`). What default
mode does otherwise, it does where the core asks for `strict_upstream`: those places are listed here
with their rows. A configuration that is strict in some places only shows each row's effect alone.
"""

import ast
import sys
from pathlib import Path

import pytest

import mdi_shared
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from tests.shared.script import Turn
from tests.shared.workloads import Workload, play, small

CORE = Path(next(iter(mdi_shared.__path__)))
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
MOST_STEPS = 400

# Function that asks -> the row of the table it belongs to.
PLACES = {
    "_is_starved": "who is preempted",
    "below_watermark": "watermark",
    "_tokens_to_run": "`lookahead`, fewest tokens of a chunk",
    "requeue": "place of a preempted sequence",
    "_book_out": "aborted between two chunks",
    "_sort": "order of ties",
    "prompt_limit": "longest prompt without chunking",
    "_given_budget_rules": "least token budget",
    "token_budget": "default token budget",
    "_check_progress": "deadlock",
}
# Orders that are kept are those that sorting gives; checks and refusals of options decide nothing.
NO_RULES = {"keeps_order", "check_integrity", "require_allowed", "_prefix_rules"}


def places_that_ask():
    places = set()
    for path in CORE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                asks = (isinstance(node, ast.Attribute) and node.attr == "strict_upstream"
                        for node in ast.walk(function))  # fmt: skip
                places |= {function.name} if any(asks) else set()
    return places


def rows_of_the_table():
    lines = DESIGN.read_text(encoding="utf-8").splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]


def test_every_place_that_asks_has_its_row():
    assert places_that_ask() == set(PLACES) | NO_RULES
    assert set(PLACES.values()) <= set(rows_of_the_table())


class PartlyStrict(SchedulerConfig):
    """Strict but where `ours` says: a set of functions, for which default mode holds."""

    __slots__ = ()
    ours: frozenset[str] = frozenset()

    def __getattribute__(self, name):
        if name == "strict_upstream":
            return sys._getframe(1).f_code.co_name not in PartlyStrict.ours
        return super().__getattribute__(name)


def log_of(workload: Workload) -> tuple[list[list[Turn]], str]:
    ranks, end = play(workload, MOST_STEPS)
    rows = [[(turn.plan, turn.free_after, turn.waiting, turn.running) for turn in rank.turns]
            for rank in ranks]  # fmt: skip
    return rows, type(end).__name__


def played(seed, ours, monkeypatch):
    """Play a workload, strict but for `ours`."""
    monkeypatch.setattr(PartlyStrict, "ours", frozenset(ours))
    plain = small(seed)
    options = {n: getattr(plain.config, n) for n in SchedulerConfig.__dataclass_fields__}
    config = PartlyStrict(**options)
    return log_of(Workload(config, plain.scripts, plain.stops, plain.seed))


@pytest.mark.parametrize("seed", range(40))
def test_the_places_make_all_of_the_difference(seed, monkeypatch):
    assert played(seed, (), monkeypatch) == log_of(small(seed))
    ours = set(PLACES) | NO_RULES
    assert played(seed, ours, monkeypatch) == log_of(small(seed, strict=False))


# The token budget is derived in none of the workloads, and a pool below a block starts in neither.
SHOWN_ELSEWHERE = {"_given_budget_rules", "token_budget"}


@pytest.mark.parametrize("place", sorted(set(PLACES) - SHOWN_ELSEWHERE))
def test_each_row_alone_changes_some_run(place, monkeypatch):
    alone, none = {place}, set()
    assert any(
        played(seed, alone, monkeypatch) != played(seed, none, monkeypatch) for seed in range(400)
    )


def test_budgets_differ():
    assert SchedulerConfig().token_budget == 8_192
    assert SchedulerConfig(strict_upstream=True).token_budget == 131_072
    options = {"max_num_batched_tokens": 100, "max_num_seqs": 4}
    assert SchedulerConfig(**options).token_budget == 100
    with pytest.raises(ConfigError, match="does not start with less than a block"):
        SchedulerConfig(**options, strict_upstream=True)
