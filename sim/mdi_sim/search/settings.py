"""Which scheduler settings a tuning tries: a coarse grid, then the neighbours of the best.

A setting is a whole `SchedulerConfig`. What varies is the chunk (token budget, or target step
time), the interval of prefill attempts and the number of seats; seats never rise above those
given, for memory is the user's to spend. Nothing here simulates.

Read next: `tune.py` (the search), `mdi_shared/config.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from mdi_shared.chunking import why_not_control
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.work import prefill_work
from mdi_shared.errors import ConfigError
from mdi_shared.run_description import RunDescription

BUDGET_STEP = 128  # tokens: budgets are multiples of it
BUDGET_FACTORS = (1 / 16, 1 / 4, 1, 4)  # of the default budget
TARGET_FACTORS = (1 / 8, 1 / 2, 1)  # of it, too: the target is what such a chunk takes
INTERVALS = (1, 8)  # beside the default
SEAT_FACTORS = (1, 1 / 4)
# What commands show before anything heavy is loaded.
DEFAULT_TRIALS = 64  # settings of one tuning
DEFAULT_SEEDS = 5  # replicates of a lab or a capacity
DEFAULT_TOLERANCE = 0.02  # how near the search of a capacity comes, a ratio
MOST_BUDGET_FACTOR = 4  # a longer step needs more workspace than the default was chosen for


def coarse_grid(run: RunDescription, mean_context: int) -> list[SchedulerConfig]:
    """Return valid settings that differ widely, the run's own not among them.

    Target step times are what chunks of some sizes take in the middle of a prompt of
    `mean_context` tokens (docs/rules.md, R33); there are none where the model is not fit for
    control.
    """
    base, cost = run.scheduler, run.step_cost
    budget = base.token_budget
    chunks: list[dict[str, Any]] = [_budget(base, budget * f) for f in BUDGET_FACTORS]
    if why_not_control(cost) is None and base.chunked_prefill:
        for factor in TARGET_FACTORS:
            tokens = _rounded(budget * factor)
            row = (tokens, mean_context + tokens, mean_context + 2 * tokens)
            ns = cost.device_ns(prefill_work(run.shape, [row]))
            chunks.append(_target(base, budget, ns / 1e6))
    intervals = dict.fromkeys((*INTERVALS, base.prefill_attempt_interval))
    seats = dict.fromkeys(max(int(base.max_num_seqs * f), 1) for f in SEAT_FACTORS)
    changes = (
        {**chunk, "prefill_attempt_interval": interval, "max_num_seqs": n}
        for chunk, interval, n in product(chunks, intervals, seats)
    )
    return _valid(base, changes)


def neighbours(
    base: SchedulerConfig, here: SchedulerConfig, factor: float
) -> list[SchedulerConfig]:
    """Return valid settings one step of `factor` away from `here`, up or down, in one thing."""
    return _valid(base, _moves(base, here, factor), here)


def _moves(base: SchedulerConfig, here: SchedulerConfig, factor: float) -> Iterator[dict[str, Any]]:
    for scale in (factor, 1 / factor):
        if here.prefill_target_ms is not None:
            yield _target(base, here.token_budget, here.prefill_target_ms * scale)
        tokens = _rounded(here.token_budget * scale)
        yield _tokens(base, min(tokens, MOST_BUDGET_FACTOR * base.token_budget))
        attempts = max(round(here.prefill_attempt_interval * scale), 1)
        yield {"prefill_attempt_interval": min(attempts, here.prefill_any_attempt_interval)}
        seats = max(round(here.max_num_seqs * scale), 1)
        yield {"max_num_seqs": min(seats, base.max_num_seqs)}


def changes_of(base: SchedulerConfig, setting: SchedulerConfig) -> dict[str, Any]:
    """Return the options in which `setting` differs from `base`."""
    names = [field.name for field in fields(SchedulerConfig)]
    return {
        name: getattr(setting, name)
        for name in names
        if getattr(setting, name) != getattr(base, name)
    }


def _budget(base: SchedulerConfig, tokens: float) -> dict[str, Any]:
    return {"chunk_policy": "token_budget", "prefill_target_ms": None, "slo_itl_ms": None,
            **_tokens(base, _rounded(tokens))}  # fmt: skip


def _target(base: SchedulerConfig, budget: int, ms: float) -> dict[str, Any]:
    return {"chunk_policy": "cost_target", "prefill_target_ms": float(f"{ms:.3g}"),
            "slo_itl_ms": None, **_tokens(base, budget)}  # fmt: skip


def _tokens(base: SchedulerConfig, budget: int) -> dict[str, Any]:
    """Return the budget as an option; the default's own is no change, however it comes about."""
    given = base.max_num_batched_tokens if budget == base.token_budget else budget
    return {"max_num_batched_tokens": given}


def _rounded(tokens: float) -> int:
    return max(round(tokens / BUDGET_STEP), 1) * BUDGET_STEP


def _valid(
    base: SchedulerConfig, changes: Iterable[dict[str, Any]], here: SchedulerConfig | None = None
) -> list[SchedulerConfig]:
    """Return the settings that `changes` make of `here`, without repeats, `base` and `here`."""
    start = base if here is None else here
    found: dict[SchedulerConfig, None] = {}
    for each in changes:
        try:
            setting = replace(start, **each)
            setting.require_pool_fits()
        except ConfigError:
            continue  # such as a budget below the seats, which a full decode step would not fit
        found[setting] = None
    return [setting for setting in found if setting not in (base, start)]


def mean_of(lengths: Sequence[int]) -> int:
    """Return the mean of prompt lengths, tokens, rounded down; 0 without any."""
    return sum(lengths) // len(lengths) if len(lengths) else 0
