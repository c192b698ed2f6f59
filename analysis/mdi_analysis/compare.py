"""Two runs side by side: latencies, step times, decisions, throughput, balance of the ranks.

Made for a recorded run against its simulation, but any two runs will do. Relative differences are
(b - a) / a. It judges nothing: which error is acceptable is the reader's business.

Read next: `plan_identity.py`, which decides whether steps can be paired.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from mdi_analysis.frames import (
    KINDS,
    NS_PER_MS,
    OWN_KINDS,
    Floats,
    Ints,
    RunLike,
    device_ns,
    has_items,
    ints,
    is_kind,
    kind_codes,
)
from mdi_analysis.metrics import SLO, Distribution
from mdi_analysis.names import name_of, verdict
from mdi_analysis.options_diff import option_differences
from mdi_analysis.plan_identity import PlanIdentity, compare_plans
from mdi_analysis.report import Sheet, change, number, percent, plain, stack
from mdi_analysis.step_times import HOST_TIMES, host_times
from mdi_analysis.summary import Summary, describe_counts, summarize
from mdi_shared.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

STATS = ("mean", "p50", "p90", "p99")
QUANTILE_LEVELS = np.arange(1, 100) / 100


@dataclass(frozen=True, slots=True)
class Pair:
    """One value of both runs; `relative` is (b - a) / a, None without a or with a = 0."""

    a: float | None
    b: float | None
    relative: float | None

    @classmethod
    def of(cls, a: float | None, b: float | None) -> "Pair":
        relative = (b - a) / a if a and b is not None else None
        return cls(a, b, relative)


@dataclass(frozen=True, slots=True)
class KindComparison:
    """Steps of one kind in both runs; `device_ms` is statistic -> pair.

    `paired=True`: `error` describes |b - a| / a of the device time, step by step. Otherwise the
    plans differ, and it describes the same for each percentile 1..99 of the two distributions.
    `bias` is the signed mean of the same differences.
    """

    count: Pair
    device_total_ms: Pair
    device_ms: dict[str, Pair]
    paired: bool
    error: Distribution
    bias: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found; `latency` and `host` are metric -> statistic -> pair, in ms.

    `options` are those in which the runs differ: name and both values.
    `host` has the times of `step_times.HOST_TIMES`, prefill and decode steps together.
    """

    names: tuple[str, str]
    options: list[tuple[str, str, str]]
    plans: PlanIdentity
    latency: dict[str, dict[str, Pair]]
    kinds: dict[str, KindComparison]
    host: dict[str, dict[str, Pair]]
    rates: dict[str, Pair]
    a: Summary
    b: Summary

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; what does not exist is None, never NaN."""
        data: dict[str, Any] = plain(self)
        data["plans"]["identical"] = self.plans.identical
        return data

    def sheets(self) -> list[Sheet]:
        """Return what there is to read, as text: options, requests, steps, host, the whole run."""
        return [self.options_sheet(), _latency_sheet(self), _kind_sheet(self),
                _step_time_sheet(self), _host_sheet(self), _rate_sheet(self)]  # fmt: skip

    def options_sheet(self) -> Sheet:
        """Return the options that differ."""
        title = "options that differ" if self.options else "options: no recorded one differs"
        return Sheet(title, ("option", *self.names) if self.options else (), self.options, n_text=3)

    def table(self) -> "Table":
        """Return a rich table for people; print it with a rich console."""
        return stack([sheet.rich() for sheet in self.sheets()])


def compare(
    a: RunLike,
    b: RunLike,
    names: tuple[str, str] = ("real", "simulated"),
    *,
    slo: SLO | None = None,
) -> Comparison:
    """Set two runs side by side; with an SLO their goodputs too.

    Inter-token latency is compared when both runs have items. Raises `ConfigError` when the names
    are equal, `TraceError` on a table that breaks the trace format.
    """
    if len(names) != 2 or names[0] == names[1]:
        raise ConfigError("names", names, "must be two different names")
    plans = compare_plans(a, b)
    both = has_items(a) and has_items(b)
    summary_a, summary_b = (summarize(run, slo, itl=both) for run in (a, b))
    return Comparison(
        names=names,
        options=option_differences(a, b),
        plans=plans,
        latency=_latencies(summary_a, summary_b),
        kinds=_kinds(a, b, paired=plans.identical),
        host=_host(a, b),
        rates=_rates(summary_a, summary_b),
        a=summary_a,
        b=summary_b,
    )


def _latencies(a: Summary, b: Summary) -> dict[str, dict[str, Pair]]:
    found_a, found_b = dict(a.latency.known()), dict(b.latency.known())
    return {name: _stats(found_a[name], found_b[name]) for name in found_a}


def _stats(a: Distribution, b: Distribution) -> dict[str, Pair]:
    return {stat: Pair.of(getattr(a, stat), getattr(b, stat)) for stat in STATS}


def _host(a: RunLike, b: RunLike) -> dict[str, dict[str, Pair]]:
    times_a, times_b = host_times(a.steps), host_times(b.steps)
    return {
        name: _stats(Distribution.of(times_a[name]), Distribution.of(times_b[name]))
        for name in HOST_TIMES
    }


def _kinds(a: RunLike, b: RunLike, *, paired: bool) -> dict[str, KindComparison]:
    kind_a, device_a = _device_by_step(a)
    kind_b, device_b = _device_by_step(b)
    found = {}
    for kind in KINDS:
        in_a, in_b = is_kind(kind_a, kind), is_kind(kind_b, kind)
        if not (in_a.any() or in_b.any()):
            continue
        times = device_a[in_a], device_b[in_b]
        differences = _relative(*(times if paired else _quantiles(*times)))
        found[kind] = KindComparison(
            count=Pair.of(int(in_a.sum()), int(in_b.sum())),
            device_total_ms=Pair.of(*(float(np.nansum(t)) / NS_PER_MS for t in times)),
            device_ms=_stats(*(Distribution.of(t / NS_PER_MS) for t in times)),
            paired=paired,
            error=Distribution.of(np.abs(differences)),
            bias=Distribution.of(differences).mean,
        )
    return found


def _device_by_step(run: RunLike) -> tuple[Ints, Floats]:
    """Return kind and device ns of the steps ordered by (rank, step): the order that pairs them."""
    steps = run.steps
    order = np.lexsort((ints(steps, "steps", "step"), ints(steps, "steps", "rank")))
    return kind_codes(steps)[order], device_ns(steps)[order]


def _relative(a: Floats, b: Floats) -> Floats:
    """Return (b - a) / a where a is above zero; placeholder steps may cost nothing."""
    known = a > 0
    return (b[known] - a[known]) / a[known]


def _quantiles(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    if not a.size or not b.size:
        return np.empty(0), np.empty(0)
    return np.quantile(a, QUANTILE_LEVELS), np.quantile(b, QUANTILE_LEVELS)


def _rates(a: Summary, b: Summary) -> dict[str, Pair]:
    rates = {
        name: Pair.of(getattr(a.throughput, name), getattr(b.throughput, name))
        for name in (field.name for field in fields(a.throughput))
    }
    for name in ("kv_occupancy_mean", "preemptions", "dropped_rows", "barrier_wait_share",
                 "vote_wait_share", "rank_imbalance"):  # fmt: skip
        rates[name] = Pair.of(getattr(a.engine, name), getattr(b.engine, name))
    if a.goodput is not None and b.goodput is not None:
        for name in ("goodput_s", "goodput_share"):
            rates[name] = Pair.of(getattr(a.goodput, name), getattr(b.goodput, name))
    return rates


def _latency_sheet(found: Comparison) -> Sheet:
    counts = zip(found.names, (found.a, found.b), strict=True)
    title = "\n".join(f"{name}: {describe_counts(run.requests)}" for name, run in counts)
    return _stat_sheet(found, title, "latency", found.latency)


def _stat_sheet(
    found: Comparison, title: str, what: str, metrics: dict[str, dict[str, Pair]]
) -> Sheet:
    entries = [
        (name_of(name, stat), name, pair)
        for name, stats in metrics.items()
        for stat, pair in stats.items()
    ]
    return pair_sheet(title, (what, *found.names, "difference"), entries)


def pair_sheet(
    title: str, headers: tuple[str, ...], entries: Sequence[tuple[str, str, Pair]]
) -> Sheet:
    """Return a sheet of (label, metric, values of both runs), each with its verdict."""
    rows = [(label, number(p.a), number(p.b), change(p.relative)) for label, _, p in entries]
    return Sheet(title, headers, rows, verdicts=[verdict(key, p.relative) for _, key, p in entries])


def _kind_sheet(found: Comparison) -> Sheet:
    rows = [
        (kind, number(k.count.a), number(k.count.b), number(k.device_total_ms.a),
         number(k.device_total_ms.b), change(k.bias), percent(k.error.p50), percent(k.error.p90),
         percent(k.error.p99))
        for kind, k in found.kinds.items()
    ]  # fmt: skip
    how = "steps paired" if found.plans.identical else "percentiles paired: the plans differ"
    first, second = found.names
    title = f"plans: {found.plans}\ndevice time, a = {first}, b = {second} ({how})"
    headers = ("kind", "a", "b", "a ms", "b ms", "bias", "err p50", "p90", "p99")
    return Sheet(title, headers, rows)


def _step_time_sheet(found: Comparison) -> Sheet:
    times = {kind: k.device_ms for kind, k in found.kinds.items() if kind in OWN_KINDS}
    return _stat_sheet(found, "device time of a step", "kind", times)


def _host_sheet(found: Comparison) -> Sheet:
    return _stat_sheet(found, "host times of prefill and decode steps", "time", found.host)


def _rate_sheet(found: Comparison) -> Sheet:
    entries = [(name_of(name), name, pair) for name, pair in found.rates.items()]
    return pair_sheet("whole run", ("metric", *found.names, "difference"), entries)
