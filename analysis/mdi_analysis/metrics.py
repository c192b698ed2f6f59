"""Latencies of requests: per request, between tokens, and against an SLO.

Every definition is written down in `definitions.py`. All functions take a whole run and work on
whole columns. Nothing here looks at device time or memory; `usage.py` does.

Read next: `summary.py`, which puts everything together.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
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
class HasPieces(Protocol):
    """A run whose items come in pieces, Arrow tables, so that they need not all be in memory."""

    def item_pieces(self) -> Iterator[Any]: ...


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
    drafts) are one moment. The sequences of a decode step share a gap, so that there are far fewer
    than tokens. Raises `TraceError` when the run has no items, an item's step is not in the step
    table, or time runs backwards.
    """
    pieces = _token_pieces(run)
    distinct: list[Floats] = [np.empty(0)]
    times: list[Ints] = [np.empty(0, dtype=np.int64)]
    last: Floats = np.full(len(run.requests), np.nan)  # when each request was last heard of, ns
    for codes, steps, done_ns in pieces:
        # One integer per emitting row, ordered by (request, step): sorting it beats sorting rows.
        width = max(done_ns.size, 1)
        order = np.sort(codes * width + steps)
        code, done = order // width, done_ns[order % width]
        if code.size and code[-1] >= last.size:
            last = np.append(last, np.full(int(code[-1]) + 1 - last.size, np.nan))
        begins = np.append(True, np.diff(code) != 0)[: code.size]
        before = np.append(np.nan, done[:-1])[: code.size]
        before[begins] = last[code[begins]]
        ends = np.append(begins[1:], True)[: code.size]
        last[code[ends]] = done[ends]
        gaps = (done - before)[~np.isnan(before)]
        if (gaps < 0).any():
            raise TraceError("steps table", "a request's later step is visible before its earlier "
                             "one", column="t_done")  # fmt: skip
        values, counts = np.unique(gaps, return_counts=True)
        distinct.append(values[values > 0])
        times.append(counts[values > 0])
    values, place = np.unique(np.concatenate(distinct), return_inverse=True)
    counts = np.bincount(place, weights=np.concatenate(times), minlength=values.size)
    return values / NS_PER_MS, counts.astype(np.int64)


def _token_pieces(run: RunLike) -> Iterator[tuple[Ints, Ints, Floats]]:
    """Yield per piece of the items that gave tokens: request, step, and the time of every step.

    A piece's steps lie after those of the pieces before it. Requests are numbered as they come.
    """
    if not has_items(run):
        raise TraceError("items table", "absent, but inter-token latency needs it")
    pieces: Iterable[Any] = run.item_pieces() if isinstance(run, HasPieces) else [run.items]
    number: dict[str, int] = {}
    for piece in pieces:
        frame = (
            piece
            if isinstance(piece, pd.DataFrame)
            else piece.select(["step", "rank", "req_id", "emitted"]).to_pandas()
        )
        emitted = floats(frame, "items", "emitted") > 0
        order_of_steps, step_index = locate_items(run.steps, frame)
        codes, names = pd.factorize(series(frame, "items", "req_id").array[emitted])
        known = np.array([number.setdefault(str(name), len(number)) for name in names], np.int64)
        done_ns = floats(run.steps, "steps", "t_done")[order_of_steps]
        yield known[codes] if names.size else codes.astype(np.int64), step_index[emitted], done_ns


def locate_items(steps: pd.DataFrame, items: pd.DataFrame) -> tuple[Ints, Ints]:
    """Return the positions of the steps in order of (rank, step), and each item's index into them.

    A flush makes outputs of an earlier step visible and has no items of its own; it is left out.
    Raises `TraceError` when an item's step is not in the step table.
    """
    launched = np.flatnonzero(~is_kind(kind_codes(steps), "flush"))
    step, item_step = ints(steps, "steps", "step")[launched], ints(items, "items", "step")
    width = int(max(step.max(initial=0), item_step.max(initial=0))) + 1
    key = ints(steps, "steps", "rank")[launched] * width + step
    order = np.argsort(key, kind="stable")
    key = key[order]
    item_key = ints(items, "items", "rank") * width + item_step
    index: Ints = np.searchsorted(key, item_key)
    known = index < key.size
    known[known] = key[index[known]] == item_key[known]
    if not known.all():
        row = int((~known).argmax())
        raise TraceError("items table", f"step {item_step[row]} of rank "
                         f"{items['rank'].iloc[row]} is not in the step table",
                         row=row + 1, column="step")  # fmt: skip
    return launched[order], index
