"""Who pays for a schedule: service of clients over time, and slowdown of small and large requests.

Everything comes from a run's request table. Service is tokens: an uncached prompt token counts 1,
an output token 2, as in VTC (Sheng et al., OSDI 2024). Of a request, prompt and first token are
spread evenly from its first planning to its first token, the rest from there to its last token.
A client is backlogged while one of its requests has arrived and was never planned; only then can a
schedule treat it unfairly, so only such times are looked at.

Read next: `definitions.py` (the other metrics), `metrics.py` (latencies of requests).
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
    NS_PER_S,
    Bools,
    Floats,
    RunLike,
    floats,
    has_arrived,
    ratio,
    series,
    span_ns,
)
from mdi_analysis.metrics import Distribution

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
MOST_CLIENTS = 16  # those with the most requests; pairs of all would take long
LEAST_SHARE = 0.01  # of the span that clients must compete for, to be compared at all
SIZE_QUANTILES = (0.5, 0.9)

Intervals = Floats  # (n, 2): begin and end, ns, ascending and apart


@dataclass(frozen=True, slots=True)
class Fairness:
    """How evenly clients were served while they competed.

    `clients` counts those the trace names. `jain` is Jain's index, (sum x)^2 / (n sum x^2), of
    the service per second x that each got while it and another one were backlogged (Jain et al.,
    DEC-TR-301, 1984). `service_gap` is the most by which the service of two clients differed over
    any interval in which both were backlogged throughout, weighted tokens: what VTC bounds by
    twice the larger of a request's prompt and output weight. None where two clients never were
    backlogged together, for `jain` for less than LEAST_SHARE of the span.
    """

    clients: int
    jain: float | None = None
    service_gap: float | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """Service of one client as a curve, weighted tokens at times (ns), and its backlog."""

    times: Floats
    service: Floats
    backlog: Intervals

    def at(self, times: Floats) -> Floats:
        """Return the service up to each time."""
        if not self.times.size:
            return np.zeros_like(times)
        found: Floats = np.interp(times, self.times, self.service)
        return found


def fairness(run: RunLike) -> Fairness:
    """Return how evenly a run served the clients of its requests."""
    names = series(run.requests, "requests", "client").astype(object)
    counts = names[has_arrived(run)].value_counts()
    span = span_ns(run)
    if len(counts) < 2 or span is None:
        return Fairness(len(counts))
    chosen = sorted(counts.index, key=lambda name: (-counts[name], name))[:MOST_CLIENTS]
    served = [client_service(run, (names == name).to_numpy(), span[1]) for name in chosen]
    gaps = [gap for a, b in combinations(served, 2) if (gap := _gap(a, b)) is not None]
    rates = _rates(served, LEAST_SHARE * (span[1] - span[0]))
    return Fairness(len(counts), jain_index(rates), max(gaps, default=None))


def jain_index(rates: Floats) -> float | None:
    """Return (sum x)^2 / (n sum x^2): 1 for equal rates, 1/n if one has all; None below two."""
    if rates.size < 2:
        return None
    return ratio(float(rates.sum()) ** 2, rates.size * float((rates**2).sum()))


def client_service(run: RunLike, rows: Bools, end_ns: float) -> Client:
    """Return the service curve and the backlog of the requests in `rows`; the run ends then."""
    arrival, sched, first, last, finish, prompt, cached, output = (
        floats(run.requests, "requests", name)[rows]
        for name in ("arrival_ns", "t_first_sched", "t_first_token", "t_last_token", "t_finish",
                     "prompt_len", "cached_len", "output_len")
    )  # fmt: skip
    arrived = has_arrived(run)[rows]
    begin = np.concatenate([sched, first])
    end = np.concatenate([first, last])
    amount = np.concatenate([
        PROMPT_WEIGHT * (prompt - cached) + OUTPUT_WEIGHT, OUTPUT_WEIGHT * (output - 1),
    ])  # fmt: skip
    known = ~np.isnan(begin) & ~np.isnan(end) & (amount > 0)
    begin, end, amount = begin[known], end[known], amount[known]
    end = np.maximum(end, begin + 1)
    times, place = np.unique(np.concatenate([begin, end]), return_inverse=True)
    rate = amount / (end - begin)
    slope = np.cumsum(np.bincount(place, weights=np.concatenate([rate, -rate])))
    service = np.append(0.0, np.cumsum(slope[:-1] * np.diff(times)))[: times.size]
    gone = np.where(np.isnan(finish), end_ns, finish)  # refused, or never planned
    waits = np.column_stack([arrival, np.where(np.isnan(sched), gone, sched)])
    return Client(times, service, _merged(waits[arrived]))


def longest_wait_s(run: RunLike, latencies: pd.DataFrame) -> float | None:
    """Return the longest wait for a first token, s; open requests wait until the run's end.

    `latencies` are `request_latencies(run)`. Starvation shows here before it shows in a percentile.
    Requests that the engine refused or that were aborted do not count. None where nobody waited.
    """
    outcome = latencies["outcome"].to_numpy()
    arrival, first = (
        floats(run.requests, "requests", name) for name in ("arrival_ns", "t_first_token")
    )
    span = span_ns(run)
    if span is None:
        return None
    waits = np.where(np.isnan(first), span[1], first) - arrival
    counted = waits[np.isin(outcome, ("completed", "unfinished"))]
    return float(counted.max()) / NS_PER_S if counted.size else None


def slowdowns(latencies: pd.DataFrame, alone_ms: Floats) -> Floats:
    """Return e2e over `alone_ms`, what the same request takes alone; NaN where not completed.

    By size it shows whom a size-based order starves (Wierman and Harchol-Balter, SIGMETRICS 2003).
    """
    found = np.where(latencies["outcome"] == "completed", latencies["e2e_ms"] / alone_ms, np.nan)
    return np.asarray(found, dtype=np.float64)


def by_size(values: Floats, alone_ms: Floats) -> tuple[Distribution, ...]:
    """Return the distributions of values of small, medium and large requests.

    The size of a request is its time alone; the classes end at its SIZE_QUANTILES.
    """
    known = alone_ms[~np.isnan(alone_ms)]
    bounds = np.quantile(known, SIZE_QUANTILES) if known.size else np.zeros(len(SIZE_QUANTILES))
    classes = np.searchsorted(bounds, alone_ms)  # equal to a bound: the smaller class
    classes[np.isnan(alone_ms)] = -1
    return tuple(Distribution.of(values[classes == each]) for each in range(bounds.size + 1))


def _gap(a: Client, b: Client) -> float | None:
    """Return the largest difference of service over an interval of common backlog, tokens."""
    common = _intersection(a.backlog, b.backlog)
    if not len(common):
        return None
    largest = 0.0
    for begin, end in common:
        inside = [t[(t > begin) & (t < end)] for t in (a.times, b.times)]
        times = np.concatenate([[begin, end], *inside])
        difference = a.at(times) - b.at(times)
        largest = max(largest, float(np.ptp(difference)))
    return largest


def _rates(clients: list[Client], least_ns: float) -> Floats:
    """Return service per second of each client while it and another one were backlogged."""
    rates = []
    for own in clients:
        others = [other.backlog for other in clients if other is not own]
        common = _intersection(own.backlog, _merged(np.concatenate(others)))
        length = float((common[:, 1] - common[:, 0]).sum())
        if length > least_ns:
            got = own.at(common[:, 1]) - own.at(common[:, 0])
            rates.append(float(got.sum()) / length * NS_PER_S)
    return np.array(rates)


def _merged(intervals: Intervals) -> Intervals:
    """Return the union of intervals as ones that ascend and lie apart; empty ones are left out."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    reach = np.maximum.accumulate(intervals[:, 1])
    begins = np.append(True, intervals[1:, 0] > reach[:-1])
    last = np.append(np.flatnonzero(begins)[1:] - 1, len(intervals) - 1)
    return np.column_stack([intervals[begins, 0], reach[last]])


def _intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return where both hold; each ascends and its intervals lie apart."""
    found: list[tuple[float, float]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if begin < end:
            found.append((begin, end))
        if a[i, 1] <= b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(found, dtype=np.float64).reshape(-1, 2)
