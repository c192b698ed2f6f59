"""Where a step's time goes, from its time marks: host, device, and the gap between.

A real run and a simulation leave the same marks, so these times compare, which single host columns
do not: a simulation fills only some of them. Arrays have one float64 per step, in the order of the
table, NaN where there is no value.

Read next: `compare.py` (two runs), `step_frames.py` (one table of everything).
"""

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
    NS_PER_MS,
    OWN_KINDS,
    Bools,
    Floats,
    Ints,
    device_ns,
    floats,
    ints,
    is_kind,
    kind_codes,
)

# Name -> what it is; the names of `host_times`.
HOST_TIMES = {
    "gap_ms": "the device was idle before a step although its rank had requests",
    "plan_ms": "planning and laying out a step, t_launch - t_sched",
    "visible_ms": "from the device's end to visible outputs, t_done - t_dev_end",
    "turn_ms": "from the rank's last visible step to this one, while it had requests",
}


def host_times(steps: pd.DataFrame) -> dict[str, Floats]:
    """Return the `HOST_TIMES` of every prefill and decode step, ms; NaN for other steps.

    A step all of whose rows were dropped shows nothing to anybody: the engine reads its results
    whenever it wakes up next, and no `visible_ms` or `turn_ms` is taken from it. Raises
    `TraceError` when a time mark is missing.
    """
    own = is_kind(kind_codes(steps), *OWN_KINDS)
    busy = own & had_requests(steps)
    shows = floats(steps, "steps", "n_dropped") < floats(steps, "steps", "n_seqs")
    sched, launch, end, done = (
        floats(steps, "steps", name) for name in ("t_sched", "t_launch", "t_dev_end", "t_done")
    )
    since_before = (done - of_step_before(steps, done)) / NS_PER_MS
    return {
        "gap_ms": np.where(busy, gap_ms(steps), np.nan),
        "plan_ms": np.where(own, (launch - sched) / NS_PER_MS, np.nan),
        "visible_ms": np.where(own & shows, (done - end) / NS_PER_MS, np.nan),
        "turn_ms": np.where(busy & shows, since_before, np.nan),
    }


def gap_ms(steps: pd.DataFrame) -> Floats:
    """Return how long the device was idle before each step, ms; NaN before a rank's first.

    The recorded `gap_ms` where there is one, else from the device's end of the step before to the
    start of this one. Idle for want of requests counts, too; `had_requests` tells the two apart.
    """
    start, end = (floats(steps, "steps", name) for name in ("t_dev_start", "t_dev_end"))
    between = np.maximum(start - of_step_before(steps, end), 0.0) / NS_PER_MS
    recorded = optional(steps, "gap_ms")
    gap: Floats = np.where(np.isnan(recorded), between, recorded)
    gap[is_kind(kind_codes(steps), "flush")] = np.nan  # nothing was launched
    return gap


def had_requests(steps: pd.DataFrame) -> Bools:
    """Return which steps follow a step that left requests queued or running on their rank."""
    left = floats(steps, "steps", "n_waiting") + floats(steps, "steps", "n_running")
    had: Bools = np.nan_to_num(of_step_before(steps, left)) > 0
    return had


def device_ms(steps: pd.DataFrame) -> Floats:
    """Return the device time of every step, ms."""
    return device_ns(steps) / NS_PER_MS


def in_order(steps: pd.DataFrame) -> Ints:
    """Return the positions of the steps in order of (rank, step)."""
    return np.lexsort((ints(steps, "steps", "step"), ints(steps, "steps", "rank")))


def of_step_before(steps: pd.DataFrame, values: Floats) -> Floats:
    """Return for every step the value of its rank's step before; NaN for a rank's first."""
    order = in_order(steps)
    rank = ints(steps, "steps", "rank")[order]
    found = np.full(len(steps), np.nan)
    same = np.flatnonzero(np.diff(rank) == 0)
    found[order[same + 1]] = values[order[same]]
    return found


def optional(steps: pd.DataFrame, name: str) -> Floats:
    """Return a column that older runs and hand-made tables may lack; all NaN without it."""
    if name not in steps.columns:
        return np.full(len(steps), np.nan)
    return floats(steps, "steps", name)
