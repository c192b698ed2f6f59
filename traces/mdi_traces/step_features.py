"""What step-time models see in a step table: where features are, and which steps measure nothing.

In the first step of a kind and the first use of a graph kernels are compiled and graphs captured,
which says little about the device. Whoever fits step times or explains them asks here, so that both
mean the same. Arrays have one entry per step, in the order of the run.

Read next: `mdi_shared/cost/linear.py` (the features), `columns.py` (how columns become arrays).
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mdi_traces.columns import Bools, Ints

# Feature of `linear_cost` -> column of the step table, where the names differ.
COLUMN_OF: Mapping[str, str] = {
    "rows": "n_tokens", "consumer_rows": "n_consumer_rows", "cached_rows": "sum_k",
}  # fmt: skip

SLOW_LAUNCH = 10.0  # times the median: the host compiled a kernel, which says nothing of a device
SHORTEST_COMPILE_MS = 100.0  # hiccups below belong to a step's time


def is_warm(graph: Ints, busy: Bools) -> Bools:
    """False for the first busy step (kernels compile) and each graph's first (it is captured)."""
    warm = np.ones(len(graph), dtype=bool)
    rows = np.flatnonzero(busy)
    _, first = np.unique(graph[rows], return_index=True)
    warm[rows[first]] = False
    warm[rows[:1]] = False
    return warm


def is_compile(launch_ms: NDArray[np.float64], usual_ms: float) -> Bools:
    """True where launching took so much longer than usual that the host compiled; NaN is False."""
    slow: Bools = np.nan_to_num(launch_ms) > max(SLOW_LAUNCH * usual_ms, SHORTEST_COMPILE_MS)
    return slow
