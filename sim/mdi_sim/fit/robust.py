"""Non-negative, robust least squares, and which columns can be told apart at all.

Plain numerics on matrices: nothing here knows a step, a feature or a unit.

Read next: `steps.py` and `host.py`, the users.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]

RIDGE = 1e-6  # share of a column's own norm: decides between columns the data cannot tell apart
PASSES = 20
WIDTH = 2.0  # residuals beyond so many standard deviations count linearly, not by their square
TO_SIGMA = 1.4826  # from median absolute deviation to standard deviation, for normal residuals
# Engine-semantics §7.3 proposes 50. Held-out errors were smaller with more columns kept: signs are
# bound and steps are many, so that likeness alone does no harm (docs/log.md).
LARGEST_VIF = 1_000.0
STILL = 1e-9
NO_OUTLIER = 1e-4  # of the largest value: what misses by less is right, and keeps its full weight


def fit_nonnegative(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Return coefficients >= 0 with x @ coefficients near y; `weights` multiply residuals.

    x [n, columns], y [n], weights [n]. The loss is soft-L1 (scipy's name) of residuals in units
    of their own spread, by reweighted least squares, so that outliers pull but do not decide.
    """
    scale = np.maximum(np.percentile(x, 95, axis=0), np.finfo(float).tiny)
    scale = np.where(scale > np.finfo(float).tiny, scale, np.maximum(x.max(axis=0), 1.0))
    a, b = x / scale * weights[:, None], y * weights
    trust = np.ones(len(b))
    found = _solve(a, b, trust)
    for _ in range(PASSES):
        residual = a @ found - b
        spread = TO_SIGMA * float(np.median(np.abs(residual - np.median(residual))))
        width = max(WIDTH * spread, NO_OUTLIER * float(np.abs(b).max()))
        trust = 1.0 / np.sqrt(1.0 + (residual / width) ** 2)
        last, found = found, _solve(a, b, trust)
        if np.abs(found - last).max() <= STILL * max(float(np.abs(found).max()), STILL):
            break
    coefficients: Floats = found / scale
    return coefficients


def _solve(a: Floats, b: Floats, trust: Floats) -> Floats:
    """Solve the ridged non-negative problem on its triangle, which has as many rows as columns."""
    whole = np.column_stack([a, b]) * np.sqrt(trust)[:, None]
    ridge = np.zeros((a.shape[1], whole.shape[1]))
    np.fill_diagonal(ridge, np.sqrt(RIDGE) * np.linalg.norm(whole[:, :-1], axis=0))
    whole = np.vstack([whole, ridge])
    triangle = np.asarray(np.linalg.qr(whole, mode="r"))
    solution: Floats = nnls(triangle[:, :-1], triangle[:, -1])[0]
    return solution


def inflation(x: Floats, column: int) -> float:
    """Return the variance-inflation factor of a column among the others and a constant."""
    target = x[:, column] - x[:, column].mean()
    total = float(target @ target)
    if total == 0:
        return np.inf
    others = np.delete(x, column, axis=1)
    others = others - others.mean(axis=0)
    others = others / np.maximum(np.abs(others).max(axis=0), np.finfo(float).tiny)
    rest = target - others @ np.linalg.lstsq(others, target, rcond=None)[0]
    left = float(rest @ rest) / total
    return 1.0 / left if left > np.finfo(float).eps else np.inf


def choose_columns(
    x: Floats, names: Sequence[str], expendable: Sequence[str]
) -> tuple[list[int], dict[str, str]]:
    """Return the columns that can be told apart, and why each other one cannot.

    A constant column goes. While some column is all but a combination of the others
    (LARGEST_VIF), the first such of `expendable` goes; columns not listed there stay.
    """
    dropped: dict[str, str] = {}
    for i, name in enumerate(names):
        if np.ptp(x[:, i]) == 0:
            dropped[name] = f"constant at {x[0, i]:g}"
    kept = [i for i, name in enumerate(names) if name not in dropped]
    while True:
        factors = {names[i]: inflation(x[:, kept], place) for place, i in enumerate(kept)}
        loose = [name for name in expendable if factors.get(name, 0.0) > LARGEST_VIF]
        if not loose or len(kept) < 2:
            return kept, dropped
        factor = factors[loose[0]]
        size = "infinite" if factor == np.inf else f"{factor:.0f}"
        dropped[loose[0]] = f"collinear with the others, variance inflation {size}"
        kept.remove(list(names).index(loose[0]))
