"""Latencies of requests: per request, between tokens, and against an SLO.

Every definition is written down in `definitions.py`. All functions take a whole run and work on
whole columns. Nothing here looks at device time or memory; `usage.py` does.

Read next: `summary.py`, which puts everything together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
    DECODING_KINDS,
    NS_PER_MS,
    Floats,
    Ints,
    RunLike,
    floats,
    has_arrived,
    has_items,
    ints,
    is_kind,
    kind_codes,
    series,
)
from mdi_shared.errors import TraceError, is_number, require
from mdi_shared.request import REASONS
from mdi_traces.spans import TokenSpans

OUTCOMES = {
    "stop": "completed",
    "length": "completed",
    "abort": "aborted",
    "prompt_length_exceeded": "rejected",
    "insufficient_system_resource": "rejected",
}
UNFINISHED, NEVER_ARRIVED = "unfinished", "never arrived"
LATENCIES = ("ttft_ms", "ttft_engine_ms", "tpot_ms", "tpot_with_first_ms", "e2e_ms", "queue_ms")


@runtime_checkable
class HasSpans(Protocol):
    """A run that says where requests gave tokens without a row for each token."""

    def token_spans(self) -> Iterator[TokenSpans]: ...


assert OUTCOMES.keys() == set(REASONS.values()), "every finish reason needs an outcome"


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Bounds a request must meet, ms; None is no bound. Without any, completing is enough.

    TTFT and end-to-end latency count from the arrival. Raises `ConfigError` on a bound that is
    not a positive number.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            bound = getattr(self, name)
            holds = bound is None or (is_number(bound) and bound > 0)
            require(holds, name, bound, "must be a number of ms above 0, or None")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Size, mean, percentiles (linear interpolation) and maximum of some values.

    `n` counts the values that exist; with none, everything else is None.
    """

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Floats) -> "Distribution":
        """Describe values; NaN is a missing one."""
        known = values[~np.isnan(values)]
        if not known.size:
            return cls(0)
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(known.size, float(known.mean()), p50, p90, p99, float(known.max()))

    @classmethod
    def of_counted(cls, values: Floats, counts: Ints) -> "Distribution":
        """Describe ascending values of which each occurs so often: as `of` the repeated values."""
        if not values.size:
            return cls(0)
        last = np.cumsum(counts) - 1  # place of each value's last copy
        n = int(last[-1]) + 1
        places = (n - 1) * np.array([0.5, 0.9, 0.99])
        low = values[np.searchsorted(last, np.floor(places))]
        high = values[np.searchsorted(last, np.ceil(places))]
        p50, p90, p99 = (low + (high - low) * (places - np.floor(places))).tolist()
        return cls(n, float((values * counts).sum() / n), p50, p90, p99, float(values[-1]))


def request_latencies(run: RunLike) -> pd.DataFrame:
    """Return one row per request: req_id, outcome, finish_reason and the `LATENCIES`.

    `outcome` is completed (stop, length), rejected (prompt_length_exceeded,
    insufficient_system_resource), aborted, unfinished (no finish reason), or never arrived (the
    run ended before). A latency is NaN where the request never got that far. Raises `TraceError`
    on an unknown finish reason.
    """
    frame = run.requests
    arrival, submit, first_sched, first, last, finish, tokens = (
        floats(frame, "requests", name)
        for name in ("arrival_ns", "t_submit", "t_first_sched", "t_first_token", "t_last_token",
                     "t_finish", "output_len")
    )  # fmt: skip
    gaps = np.where(tokens >= 2, tokens - 1, np.nan)
    outputs = np.where(tokens >= 1, tokens, np.nan)
    reason = series(frame, "requests", "finish_reason").astype(object)
    columns = {
        "req_id": series(frame, "requests", "req_id").to_numpy(),
        "outcome": _outcomes(reason).where(has_arrived(run), NEVER_ARRIVED),
        "finish_reason": reason.to_numpy(),
        "ttft_ms": (first - arrival) / NS_PER_MS,
        "ttft_engine_ms": (first - submit) / NS_PER_MS,
        "tpot_ms": (last - first) / gaps / NS_PER_MS,
        "tpot_with_first_ms": (last - arrival) / outputs / NS_PER_MS,
        "e2e_ms": (finish - arrival) / NS_PER_MS,
        "queue_ms": (first_sched - arrival) / NS_PER_MS,
    }
    return pd.DataFrame(columns)


def _outcomes(reason: pd.Series) -> pd.Series:
    outcome = reason.map(OUTCOMES).astype(object)
    outcome = outcome.where(reason.notna(), UNFINISHED).reset_index(drop=True)
    unknown = outcome.isna().to_numpy()
    if unknown.any():
        row = int(unknown.argmax())
        raise TraceError("requests table", f"{reason.iloc[row]!r} must be null or one of "
                         f"{', '.join(OUTCOMES)}", row=row + 1, column="finish_reason")  # fmt: skip
    return outcome


def meets_slo(latencies: pd.DataFrame, slo: SLO) -> pd.Series:
    """Return for every row of `request_latencies` whether it completed within the SLO.

    One-token outputs have no TPOT and meet any TPOT bound.
    """
    met = latencies["outcome"] == "completed"
    if slo.ttft_ms is not None:
        met &= latencies["ttft_ms"] <= slo.ttft_ms
    if slo.tpot_ms is not None:
        met &= latencies["tpot_ms"].isna() | (latencies["tpot_ms"] <= slo.tpot_ms)
    if slo.e2e_ms is not None:
        met &= latencies["e2e_ms"] <= slo.e2e_ms
    return met


def inter_token_latencies(run: RunLike) -> tuple[Floats, Ints]:
    """Return the gaps between consecutive visible moments of all requests, and how often each is.

    Gaps are distinct, ascending, ms. Tokens of one request that became visible together (accepted
    drafts) are one moment. Sequences that run share the gap from one decode step to the next, so
    that no row per token is needed. Raises `TraceError` when the run has no items, an item's step
    is not in the step table, or time runs backwards.
    """
    if not has_items(run):
        raise TraceError("items table", "absent, but inter-token latency needs it")
    order = StepOrder(run.steps)
    done_ns = floats(run.steps, "steps", "t_done")[order.rows]
    decodes = np.flatnonzero(is_kind(order.kinds, *DECODING_KINDS))
    # How many more requests than before wait from the decode step before until this one.
    joins = np.zeros(decodes.size + 1, dtype=np.int64)
    found: list[tuple[Floats, Ints]] = []  # (gaps, how often each)
    last: Floats = np.full(len(run.requests), np.nan)  # when each request was last heard of, ns
    for spans in _token_spans(run):
        at = order.find(spans.rank, spans.step)
        gave = np.flatnonzero(spans.gave > 0)
        at, request, further = at[gave], spans.request[gave], spans.further[gave]
        following = np.searchsorted(decodes, at, side="right")
        goes_on = further > 0
        first, stop = following[goes_on], (following + further)[goes_on]
        if (stop > decodes.size).any():
            raise TraceError("steps table", "ends before its items do")
        joins += np.bincount(first + 1, minlength=joins.size)
        joins -= np.bincount(stop, minlength=joins.size)
        heard = done_ns[at].copy()  # of each entry, at last
        heard[goes_on] = done_ns[decodes[stop - 1]]
        found.append(_count(done_ns[decodes[first]] - done_ns[at[goes_on]]))
        last = _grown(last, request)
        found.append(_count(_gaps_between(request, at, done_ns[at], heard, last)))
    found.append((np.diff(done_ns[decodes]), np.cumsum(joins)[1:-1]))
    return _merged(found)


def _gaps_between(request: Ints, at: Ints, begin: Floats, heard: Floats, last: Floats) -> Floats:
    """Return the gaps of requests between their entries; `last` is brought up to date."""
    order = np.lexsort((at, request))
    request, begin, heard = request[order], begin[order], heard[order]
    is_first = np.append(True, np.diff(request) != 0)[: request.size]
    before = np.append(np.nan, heard[:-1])[: request.size]
    before[is_first] = last[request[is_first]]
    is_last = np.append(is_first[1:], True)[: request.size]
    last[request[is_last]] = heard[is_last]
    gaps: Floats = (begin - before)[~np.isnan(before)]
    return gaps


def _grown(values: Floats, index: Ints) -> Floats:
    """Return the array with room for every index, NaN where there was none."""
    missing = int(index.max(initial=-1)) + 1 - values.size
    return np.append(values, np.full(missing, np.nan)) if missing > 0 else values


def _count(values: Floats) -> tuple[Floats, Ints]:
    distinct, counts = np.unique(values, return_counts=True)
    return distinct, counts


def _merged(found: Sequence[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
    """Add up gaps in ns that may come several times or never; those of 0 are no gaps."""
    gaps, times = (np.concatenate(each) for each in zip(*found, strict=True))
    gaps, times = gaps[times > 0], times[times > 0]
    if (gaps < 0).any():
        raise TraceError("steps table", "a request's later step is visible before its earlier one",
                         column="t_done")  # fmt: skip
    values, place = np.unique(gaps, return_inverse=True)
    counts = np.bincount(place, weights=times, minlength=values.size).astype(np.int64)
    return values[values > 0] / NS_PER_MS, counts[values > 0]


def _token_spans(run: RunLike) -> Iterator[TokenSpans]:
    """Yield where requests gave tokens; an item table that is a frame has an entry for each row."""
    if isinstance(run, HasSpans):
        yield from run.token_spans()
        return
    items = run.items
    assert items is not None, "whoever asks has seen that there are items"
    request, _ = pd.factorize(series(items, "items", "req_id"))
    rank, step, gave = (ints(items, "items", name) for name in ("rank", "step", "emitted"))
    yield TokenSpans(rank, step, request, gave, np.zeros(len(items), dtype=np.int64))


class StepOrder:
    """The steps in order of (rank, step), without flushes: these make earlier outputs visible.

    `rows` are their positions in the step table, `kinds` what `kind_codes` says of them.
    """

    def __init__(self, steps: pd.DataFrame) -> None:
        kinds = kind_codes(steps)
        launched = np.flatnonzero(~is_kind(kinds, "flush"))
        step, rank = (ints(steps, "steps", name)[launched] for name in ("step", "rank"))
        self._width = int(step.max(initial=0)) + 1
        key = rank * self._width + step
        order = np.argsort(key, kind="stable")
        self.rows: Ints = launched[order]
        self.kinds: Ints = kinds[self.rows]
        self._key = key[order]
        self._looked_up = 0

    def find(self, rank: Ints, step: Ints) -> Ints:
        """Return where items' steps stand in this order, given in pieces or all at once.

        Raises `TraceError` when one is not in the step table.
        """
        key = rank * self._width + step
        index: Ints = np.searchsorted(self._key, key)
        known = (index < self._key.size) & (step < self._width)
        known[known] = self._key[index[known]] == key[known]
        if not known.all():
            row = int((~known).argmax())
            raise TraceError(
                "items table", f"step {step[row]} of rank {rank[row]} is not in the step table",
                row=self._looked_up + row + 1, column="step",
            )  # fmt: skip
        self._looked_up += len(key)
        return index
