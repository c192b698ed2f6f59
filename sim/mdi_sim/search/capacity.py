"""The highest rate at which a service level holds, by bisection, for replicates of a workload.

Of each replicate (seed) the rate is doubled or halved until one rate that holds lies beside one
that does not, then the bracket is halved in ratio until it is within the tolerance. A seed's
lengths stay the same at every rate, and so do its gaps but for their scale; so its capacity is a
number of its own, and the capacity is their mean, with Student's t interval over the seeds. All
searches take one step at a time, side by side, and every run is kept as those of a lab are.

Read next: `slo.py` (what holds), `lab.py` (how runs are made), docs/lab.md.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, inf, log, nan, sqrt

from mdi_shared.errors import MiniDeepInferError, require, require_number
from mdi_sim.executors import Workers
from mdi_sim.search.lab import Lab, Planned, PlannedRuns, run_lab
from mdi_sim.search.rows import Row
from mdi_sim.search.settings import DEFAULT_TOLERANCE
from mdi_sim.search.statistics import Interval, Variant, simultaneous, t_interval
from mdi_sim.search.store import Store

RATE = "{rate}"  # where a load has the rate that is searched
BY_RATE = f"rate={RATE}"
MOST_STEPS = 80  # of one search: 40 doublings either way are beyond any rate
APART = 10  # mean gaps of so many longest latencies: requests hardly ever meet
AT_ONCE = 0.01  # arrivals within this share of the run all come at once


@dataclass(slots=True)
class Search:
    """One replicate: the highest rate seen to hold, the lowest seen to break, and what broke there.

    `reason` says why the search ended without a bracket: "never" or "always" holds.
    """

    variant: Variant
    seed: int
    rate: float
    tolerance: float
    holds: float = 0.0
    breaks: float = inf
    bound: str = ""
    reason: str = ""
    steps: int = 0

    @property
    def is_over(self) -> bool:
        return bool(self.reason) or self.breaks <= self.holds * (1 + self.tolerance)

    @property
    def capacity(self) -> float:
        """The middle of the bracket, requests per second; 0 and infinity where there is none."""
        return sqrt(self.holds * self.breaks) if self.holds and self.breaks < inf else (
            self.holds and inf)  # fmt: skip

    def learn(self, holds: bool, bound: str, row: Row) -> None:
        """Take in how the run at `rate` came out, and choose the next rate."""
        self.steps += 1
        if holds:
            self.holds = self.rate
        else:
            self.breaks, self.bound = self.rate, bound
        if self.breaks == inf:
            if _all_at_once(row) or self.steps >= MOST_STEPS:
                self.reason = "always"
            self.rate = _rounded(self.rate * 2)
        elif not self.holds:
            if _all_alone(row) or self.steps >= MOST_STEPS:
                self.reason = "never"
            self.rate = _rounded(self.rate / 2)
        else:
            self.rate = _rounded(sqrt(self.holds * self.breaks))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one variant: its replicates and, where all have one, their mean.

    `rate` is requests (sessions, of a workload of sessions) per second, None where a replicate
    never or always holds. `change` is the ratio to the baseline's less 1, paired by seed. Intervals
    are those of the seeds, widened by the brackets' width. `bound` broke first in `bound_in` of
    the replicates.
    """

    variant: Variant
    searches: tuple[Search, ...]
    rate: Interval | None
    change: Interval | None
    bound: str
    bound_in: int


def find_capacity(
    lab: Lab,
    job: Callable[[Planned], Row],
    store: Store,
    workers: Workers,
    *,
    start: float,
    load: str = BY_RATE,
    tolerance: float = DEFAULT_TOLERANCE,
    on_run: Callable[[int], None] | None = None,
) -> tuple[list[Capacity], list[Row]]:
    """Search the capacity of each variant of `lab`, which has one trace and an SLO.

    Begins at `start` requests per second; each replicate's bracket ends within `tolerance`, a
    ratio less 1. `load` is a load as in a lab, with {rate} where the rate belongs:
    `arrivals=poisson:{rate}` draws the arrivals of a recorded trace anew for each seed. `job` makes
    the row of a run. Returns what was found, and the rows of all runs.
    Raises `ConfigError`, and `MiniDeepInferError` when a run fails: then nothing is known of it.
    """
    require_number("start", start, 1e9, above_zero=True)
    require(1e-4 <= tolerance <= 1, "tolerance", tolerance, "must be from 0.0001 to 1")
    require(lab.slo is not None, "slo", None, "say which bounds are to hold")
    require(len(lab.traces) == 1, "traces", list(lab.traces), "must be one")
    require(RATE in load, "load", load, f"must have {RATE} where the rate belongs, as {BY_RATE}")
    runs, trace = PlannedRuns(lab), next(iter(lab.traces))
    searches = [
        Search(variant, seed, _rounded(start), tolerance)
        for variant in lab.variants for seed in lab.seeds
        if seed == lab.seeds[0] or runs.is_drawn(trace, variant[0], _at(load, start))
    ]  # fmt: skip
    rows: list[Row] = []
    while open_searches := [each for each in searches if not each.is_over]:
        planned = [runs.at(trace, _at(load, each.rate), each.variant, each.seed)
                   for each in open_searches]  # fmt: skip
        for index, row in run_lab(planned, job, store, workers):
            _learn(lab, open_searches[index], row)
            rows.append(row)
            if on_run is not None:
                on_run(1)
    return list(_capacities(searches, lab.variants)), rows


def _learn(lab: Lab, search: Search, row: Row) -> None:
    if row["error"] is not None:
        raise MiniDeepInferError(f"{search.variant[-1]} at {row['load']}, seed {search.seed}: "
                                 f"{row['error']}")  # fmt: skip
    assert lab.slo is not None, "required before"
    search.learn(lab.slo.holds(row), lab.slo.breaks(row), row)


def _capacities(searches: Sequence[Search], variants: Sequence[Variant]) -> Iterator[Capacity]:
    by_variant = {v: [each for each in searches if each.variant == v] for v in variants}
    base = by_variant[variants[0]]
    confidence = simultaneous(len(variants) - 1)
    for variant, own in by_variant.items():
        found = [each.capacity for each in own]
        ratios = [_log_ratio(a, b) for a, b in zip(own, base, strict=True)]
        bounds = Counter(each.bound for each in own if each.bound)
        bound, bound_in = bounds.most_common(1)[0] if bounds else ("", 0)
        tolerance = own[0].tolerance
        yield Capacity(
            variant, tuple(own),
            _rate(found, tolerance) if all(0 < rate < inf for rate in found) else None,
            _change(ratios, confidence, tolerance) if own is not base else None, bound, bound_in,
        )  # fmt: skip


def _rate(found: Sequence[float], tolerance: float) -> Interval:
    """Return the mean; its interval reaches as far beyond the seeds' as a bracket does."""
    rate = t_interval(found)
    if rate.low is None or rate.high is None:
        return rate
    half = sqrt(1 + tolerance)
    return Interval(rate.mean, max(rate.low / half, 0.0), rate.high * half, rate.n)


def _change(ratios: Sequence[float], confidence: float, tolerance: float) -> Interval | None:
    """Return the ratio less 1 that logarithms of ratios mean; both brackets widen its interval."""
    if any(ratio != ratio for ratio in ratios):
        return None
    found, reach = t_interval(ratios, confidence), log(1 + tolerance)
    low = None if found.low is None else expm1(found.low - reach)
    high = None if found.high is None else expm1(found.high + reach)
    return Interval(expm1(found.mean), low, high, found.n)


def _log_ratio(a: Search, b: Search) -> float:
    return log(a.capacity / b.capacity) if 0 < a.capacity < inf and 0 < b.capacity < inf else nan


def _all_at_once(row: Mapping[str, object]) -> bool:
    """Say whether a faster rate changes nothing: the arrivals take hardly any of the run."""
    offered, span, requests = row["offered_req_s"], row["span_s"], row["requests"]
    assert isinstance(requests, int), "every run counts its requests"
    if not isinstance(offered, float) or not isinstance(span, float):
        return True
    return requests / offered <= AT_ONCE * span


def _all_alone(row: Mapping[str, object]) -> bool:
    """Say whether a slower rate changes nothing: requests hardly ever meet, or none completes."""
    offered, longest = row["offered_req_s"], row["e2e_ms_max"]
    if not isinstance(offered, float) or not isinstance(longest, float):
        return True
    return 1 / offered >= APART * longest / 1e3


def _at(load: str, rate: float) -> str:
    return load.replace(RATE, repr(rate))


def _rounded(rate: float) -> float:
    """Return a rate of six digits: one that can be written down and found again."""
    return float(f"{rate:.6g}")
