"""Which steps are the first of their kind: there kernels are compiled and graphs captured.

Such steps say little about the device. Whoever fits or explains step times asks here, so that both
mean the same. Arrays have one entry per step, in the order of the run.

Read next: `columns.py` (how columns become arrays).
"""

import numpy as np
from numpy.typing import NDArray

from mdi_traces.columns import Bools, Ints

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
