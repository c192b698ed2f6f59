"""What this package asks of a run, and how it reads the columns of its tables.

`RunLike` is the whole contract: three data frames and the metadata, so hand-made tables serve as
well as a recorded run. Times leave this module as float64 nanoseconds (exact up to 104 days) with
NaN for null. It reads nothing from disk; `mdi_traces` does.

Read next: `metrics.py` (per request), `usage.py` (per step).
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mdi_shared.errors import TraceError
from mdi_shared.plan import DECODE, IDLE_DECODE, IDLE_MIXED, MIXED, PREFILL, STEP_KINDS
from mdi_shared.request import NOT_ARRIVED

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NS_PER_MS = 1e6
NS_PER_S = 1e9
KINDS = (*STEP_KINDS, "flush")
OWN_KINDS = (PREFILL, DECODE, MIXED)  # steps that run sequences of the rank itself
DECODING_KINDS = (DECODE, IDLE_DECODE, MIXED, IDLE_MIXED)  # in which all that run get a token


class MetadataLike(Protocol):
    """Where a run comes from; None where that is not known."""

    @property
    def model(self) -> str | None: ...
    @property
    def hardware(self) -> str | None: ...
    @property
    def source(self) -> str | None: ...
    @property
    def clock(self) -> str | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def config(self) -> Mapping[str, Any] | None: ...


class RunLike(Protocol):
    """A recorded or simulated run: the tables of docs/trace-format.md as data frames."""

    @property
    def steps(self) -> pd.DataFrame: ...
    @property
    def items(self) -> pd.DataFrame | None: ...
    @property
    def requests(self) -> pd.DataFrame: ...
    @property
    def metadata(self) -> MetadataLike: ...


def series(frame: pd.DataFrame, table: str, name: str) -> pd.Series:
    """Return a column; raises `TraceError` naming table and column when there is none."""
    if name not in frame.columns:
        raise TraceError(f"{table} table", "the column is missing", column=name)
    return frame[name]


def floats(frame: pd.DataFrame, table: str, name: str) -> Floats:
    """Return a numeric column as float64, null as NaN; raises `TraceError` when it is missing."""
    column: Floats = series(frame, table, name).to_numpy(dtype="float64", na_value=np.nan)
    return column


def ints(frame: pd.DataFrame, table: str, name: str) -> Ints:
    """Return a column of whole numbers as int64; raises `TraceError` on a null or no column."""
    column = series(frame, table, name)
    null = column.isna().to_numpy()
    if null.any():
        raise TraceError(f"{table} table", "null is not allowed here",
                         row=int(null.argmax()) + 1, column=name)  # fmt: skip
    whole: Ints = column.to_numpy(dtype="int64")
    return whole


def kind_codes(steps: pd.DataFrame) -> Ints:
    """Return for every step the index of its kind in `KINDS`; raises `TraceError` on another."""
    codes, found = pd.factorize(series(steps, "steps", "kind"))
    index = [KINDS.index(kind) if kind in KINDS else -1 for kind in found]
    table = np.array([*index, -1], dtype=np.int64)  # the last entry answers code -1: null
    kinds: Ints = table[codes]
    if (kinds < 0).any():
        row = int((kinds < 0).argmax())
        raise TraceError("steps table", f"{steps['kind'].iloc[row]!r} must be one of "
                         f"{', '.join(KINDS)}", row=row + 1, column="kind")  # fmt: skip
    return kinds


def is_kind(kinds: Ints, *names: str) -> Bools:
    """Return which of the `kind_codes` are one of the named kinds."""
    chosen: Bools = np.isin(kinds, [KINDS.index(name) for name in names])
    return chosen


def prompt_rows(steps: pd.DataFrame) -> Floats:
    """Return the rows of every step that belong to prompts; older runs have no mixed steps."""
    rows = np.where(is_kind(kind_codes(steps), PREFILL), floats(steps, "steps", "n_tokens"), 0.0)
    if "n_prompt_rows" not in steps.columns:
        return rows
    stated = floats(steps, "steps", "n_prompt_rows")
    return np.where(np.isnan(stated), rows, stated)


def device_ns(steps: pd.DataFrame) -> Floats:
    """Return the device time of every step, ns."""
    return floats(steps, "steps", "t_dev_end") - floats(steps, "steps", "t_dev_start")


def config_option(run: RunLike, name: str) -> int | None:
    """Return an integer option the run was made with, or None when its metadata lacks it.

    The options may lie at the top of the recorded configuration or under `scheduler`.
    """
    config = run.metadata.config or {}
    nested = config.get("scheduler")
    value = config.get(name)
    if value is None and isinstance(nested, Mapping):
        value = nested.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError("metadata", f"{name} = {value!r} must be an integer")
    return value


def has_arrived(run: RunLike) -> Bools:
    """Return for every request whether it arrived before the run ended."""
    reasons = series(run.requests, "requests", "unfinished_reason").astype(object)
    arrived: Bools = (reasons != NOT_ARRIVED).to_numpy()
    return arrived


def has_items(run: RunLike) -> bool:
    """Say whether a run has items; a `Run` is asked without making or reading them."""
    known = getattr(run, "has_items", None)
    return run.items is not None if known is None else bool(known)


def span_ns(run: RunLike) -> tuple[float, float] | None:
    """Return start and end of a run, ns: first arrival or scheduling, last output or finish.

    Requests that had not arrived when the run ended do not count. None when the run holds neither
    a request nor a step.
    """
    requests, steps = run.requests, run.steps
    arrivals = floats(requests, "requests", "arrival_ns")[has_arrived(run)]
    starts = np.concatenate([arrivals, floats(steps, "steps", "t_sched")])
    ends = np.concatenate(
        [starts, floats(requests, "requests", "t_finish"), floats(steps, "steps", "t_done")]
    )
    starts, ends = starts[~np.isnan(starts)], ends[~np.isnan(ends)]
    if not starts.size:
        return None
    return float(starts.min()), float(ends.max())


def count_gpus(run: RunLike) -> int:
    """Return the number of GPUs: context-parallel groups times context_parallel_size (or 1).

    A group counts by its rank 0, whether or not its other ranks left rows.
    """
    first = run.steps[ints(run.steps, "steps", "cp") == 0]
    groups = int(series(first, "steps", "rank").nunique())
    return groups * (config_option(run, "context_parallel_size") or 1)


def ratio(part: float, whole: float | None) -> float | None:
    """Return part / whole, or None when there is nothing to divide by."""
    return part / whole if whole else None
