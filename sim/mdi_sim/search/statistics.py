"""What the rows of a lab say: paired differences with intervals, a ranking, the Pareto front.

Replicates are seeds. Two variants (setting, placement, policy) that served the same workload
(trace, load, seed) are compared with each other, so that what the workload itself does cancels out.
The intervals are Student's t over the seeds' paired differences: a bootstrap of five or ten values
is too narrow. Where k variants are compared with one baseline, each interval has the confidence
1 - 0.05 / k (Bonferroni), so that all of them hold at once with 95 %.

Read next: `rows.py` (the columns), `minideepinfer/lab_report.py` (what is shown).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mdi_shared.errors import require
from mdi_sim.search.rows import COLUMNS, MEASURE_NAMES

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Variant = tuple[str, str, str]  # setting, placement, policy

VARIANT, WORKLOAD = ("setting", "placement", "policy"), ("trace", "load")
CONFIDENCE = 0.95
HIGHER_IS_BETTER = frozenset({
    "completed", "requests_s", "input_tok_s", "output_tok_s", "goodput_share", "goodput_s", "jain",
    "within_ttft_share", "within_tpot_share", "within_e2e_share",
})  # fmt: skip
# Shares, counts and queueing may be 0, so they are compared by difference, the others by ratio.
_RATIO_UNITS = ("ms", "s", "1/s", "tokens/s")
_MAY_BE_ZERO = ("queue", "goodput")


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of replicates and its confidence interval; the ends are None for fewer than two."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is sure."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True, slots=True)
class Standing:
    """One variant of a lab: its place, its mean figures, and its difference from the baseline.

    `change` is of the measure that ranks: a relative difference (-0.1: a tenth less), or a plain
    one for shares and counts; None for the baseline and for a variant with failed runs.
    `values` are means over workloads and seeds, geometric where changes are relative.
    """

    variant: Variant
    values: dict[str, float]
    change: Interval | None
    failed: int
    on_front: bool


def t_interval(values: Sequence[float] | Floats, confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of independent replicates with Student's t interval, mean +- t s / sqrt(n).

    Raises `ConfigError` without any value.
    """
    from scipy.special import stdtrit  # Student's t; scipy.stats takes a second to import

    known = np.asarray(values, dtype=np.float64)
    require(known.size > 0, "values", [], "must hold at least one replicate")
    mean = float(known.mean())
    if known.size < 2:
        return Interval(mean, None, None, 1)
    reach = float(stdtrit(known.size - 1, (1 + confidence) / 2))
    half = reach * float(known.std(ddof=1)) / known.size**0.5
    return Interval(mean, mean - half, mean + half, known.size)


def simultaneous(comparisons: int) -> float:
    """Return the confidence of each interval by which all of them hold with CONFIDENCE."""
    return 1 - (1 - CONFIDENCE) / max(comparisons, 1)


def is_relative(measure: str) -> bool:
    """Say whether differences of a measure are ratios less 1."""
    unit = next(unit for name, _, unit, _ in COLUMNS if name == measure)
    by_ratio = unit in _RATIO_UNITS or measure.startswith("slowdown")
    return by_ratio and not measure.startswith(_MAY_BE_ZERO)


def paired_differences(
    frame: "pd.DataFrame",
    measure: str,
    baseline: Variant,
    confidence: float = CONFIDENCE,
) -> "pd.DataFrame":
    """Return what each variant changes against `baseline`, by workload, with its interval.

    One row per variant and workload: its names, `value` and `baseline` (means over the seeds both
    have), `change` (relative where `is_relative`), `low`, `high` (NaN for a single seed), `n`.
    """
    import pandas as pd

    require_measure(measure)
    ran = frame[frame["error"].isna() & frame[measure].notna()]
    found = []
    for workload, group in ran.groupby(list(WORKLOAD), sort=False):
        table = group.pivot_table(index="seed", columns=list(VARIANT), values=measure, sort=False)
        if baseline not in table:
            continue
        for variant in table:
            if variant == baseline:
                continue
            both = table[[baseline, variant]].dropna()
            if both.empty:
                continue
            base, own = (both[each].to_numpy() for each in (baseline, variant))
            change = t_interval(_differences(measure, own, base), confidence)
            low, high = (np.nan if end is None else _undo(measure, end)
                         for end in (change.low, change.high))  # fmt: skip
            found.append((*workload, *variant, own.mean(), base.mean(),
                          _undo(measure, change.mean), low, high, change.n))  # fmt: skip
    names = (*WORKLOAD, *VARIANT, "value", "baseline", "change", "low", "high", "n")
    return pd.DataFrame(found, columns=list(names))


def ranking(
    frame: "pd.DataFrame",
    measure: str,
    front: tuple[str, str],
    baseline: Variant,
    shown: Sequence[str] = (),
) -> list[Standing]:
    """Return all variants, the best mean of `measure` first; those with failed runs come last.

    A change is against `baseline`; it averages over workloads, then over seeds, whose spread gives
    the interval; a trace that no seed changes counts alike in each. On the front are the variants
    that no other beats in both measures of `front`.
    """
    for name in (measure, *front, *shown):
        require_measure(name)
    names = list(dict.fromkeys((measure, *front, *shown)))
    variants = list(dict.fromkeys(frame[list(VARIANT)].itertuples(index=False, name=None)))
    by_seed = {name: _by_seed(frame, name) for name in names}
    confidence = simultaneous(len(variants) - 1)
    failed = frame[frame["error"].notna()].groupby(list(VARIANT)).size().to_dict()
    values = {variant: {name: _undo_level(name, by_seed[name].get(variant)) for name in names}
              for variant in variants}  # fmt: skip
    whole = [variant for variant in variants if not failed.get(variant)]
    beaten = _pareto([[values[v][name] * (-1 if name in HIGHER_IS_BETTER else 1) for name in front]
                      for v in whole])  # fmt: skip
    fronts = dict(zip(whole, beaten, strict=True))
    levels = by_seed[measure]
    standings = []
    for variant in variants:
        change = _change(measure, levels, variant, baseline, confidence)
        standings.append(Standing(
            variant, values[variant], change if variant in fronts else None,
            int(failed.get(variant, 0)), fronts.get(variant, False),
        ))  # fmt: skip

    def order(standing: Standing) -> tuple[bool, float]:
        value = standing.values[measure]
        sign = -1 if measure in HIGHER_IS_BETTER else 1
        return bool(standing.failed) or np.isnan(value), sign * value

    return sorted(standings, key=order)


def _by_seed(frame: "pd.DataFrame", measure: str) -> dict[Variant, Floats]:
    """Return for each variant its level by seed: the mean over workloads, of logarithms for ratios.

    A workload that ran for one seed only stands for every seed.
    """
    ran = frame[frame["error"].isna()]
    values = ran.assign(level=_levels(measure, ran[measure].to_numpy(dtype=np.float64)))
    seeds = sorted(ran["seed"].unique())
    found = {}
    for variant, group in values.groupby(list(VARIANT), sort=False):
        table = group.pivot_table(
            index="seed", columns=list(WORKLOAD), values="level", dropna=False
        ).reindex(seeds)
        drawn = table.notna().sum() > 1
        table.loc[:, ~drawn] = table.loc[:, ~drawn].ffill().bfill()
        found[variant] = table.mean(axis=1, skipna=False).to_numpy()
    return found


def _change(
    measure: str,
    levels: dict[Variant, Floats],
    variant: Variant,
    baseline: Variant,
    confidence: float,
) -> Interval | None:
    if variant == baseline or baseline not in levels or variant not in levels:
        return None
    difference = levels[variant] - levels[baseline]
    difference = difference[~np.isnan(difference)]
    if not difference.size:
        return None
    found = t_interval(difference, confidence)
    low, high = (None if end is None else _undo(measure, end) for end in (found.low, found.high))
    return Interval(_undo(measure, found.mean), low, high, found.n)


def _pareto(points: Sequence[Sequence[float]]) -> list[bool]:
    """Say of each point, less is better, whether no other is at least as good and once better."""
    if not points:
        return []  # every variant failed
    at = np.asarray(points, dtype=np.float64).reshape(len(points), -1)
    found = []
    for own in at:
        better = (at <= own).all(axis=1) & (at < own).any(axis=1)
        found.append(not better.any() and not bool(np.isnan(own).any()))
    return found


def _levels(measure: str, values: Floats) -> Floats:
    """Return what is averaged: logarithms where changes are relative; 0 has none there."""
    if not is_relative(measure):
        return values
    positive = np.where(values > 0, values, np.nan)
    return np.asarray(np.log(positive), dtype=np.float64)


def _undo_level(measure: str, levels: Floats | None) -> float:
    known = np.array([]) if levels is None else levels[~np.isnan(levels)]
    if not known.size:
        return float("nan")
    mean = float(known.mean())
    return float(np.exp(mean)) if is_relative(measure) else mean


def _differences(measure: str, own: Floats, base: Floats) -> Floats:
    found = _levels(measure, own) - _levels(measure, base)
    return found[~np.isnan(found)]


def _undo(measure: str, difference: float) -> float:
    return float(np.expm1(difference)) if is_relative(measure) else difference


def require_measure(measure: str, field: str = "measure") -> None:
    """Raise `ConfigError` unless `measure` is a column that can rank."""
    require(measure in MEASURE_NAMES, field, measure, f"must be one of {', '.join(MEASURE_NAMES)}")
