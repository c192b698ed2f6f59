"""Non-negative, robust least squares, and which columns can be told apart at all.

Plain numerics on matrices: nothing here knows a step, a feature or a unit. A matrix of n rows and c
columns is worked on through its triangle, the [c, c] factor of its QR decomposition, which has the
same lengths and angles between columns.

Read next: `steps.py` and `host.py`, the users.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RIDGE = 1e-6  # share of a column's own norm: decides between columns the data cannot tell apart
PASSES = 20
WIDTH = 2.0  # residuals beyond so many standard deviations count linearly, not by their square
TO_SIGMA = 1.4826  # from median absolute deviation to standard deviation, for normal residuals
# 50 is usual. Held-out errors were smaller with more columns kept: signs are
# bound and steps are many, so that likeness alone does no harm (docs/log.md).
LARGEST_VIF = 1_000.0
STILL = 1e-9
NO_OUTLIER = 1e-4  # of the largest value: what misses by less is right, and keeps its full weight
MOST_NUMBERS = 8_192  # decomposed at once: with more, BLAS starts threads that mostly wait
TINY = np.finfo(float).tiny


class Blocks:
    """A matrix whose rows are sorted into blocks; columns constant in a block are kept as one.

    A table of 40 graphs has 80 columns, of which three vary among the steps of one graph: a block
    shrinks to a triangle of four columns, and the whole matrix to these. That is 20 times less work
    than on all rows and columns at once, and the same up to rounding.
    """

    def __init__(self, x: Floats, labels: Ints | None) -> None:
        """`x` [n, c]; `labels` [n] are equal for rows of one block (left out: all are)."""
        labels = np.zeros(len(x), np.int64) if labels is None else labels
        order = np.argsort(labels, kind="stable")
        self._length = len(x)
        self._blocks: list[tuple[Ints, Floats, Floats]] = []
        for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
            own = x[rows]
            varying = np.flatnonzero(np.ptp(own, axis=0) > 0)
            # own == small @ spread
            small = np.column_stack([np.ones(len(rows)), own[:, varying]])
            spread = np.zeros((1 + len(varying), x.shape[1]))
            spread[0] = own[0]
            spread[:, varying] = np.eye(1 + len(varying))[:, 1:]
            pieces = -(-small.size // MOST_NUMBERS)
            self._blocks += [
                (rows[piece], small[piece], spread)
                for piece in np.array_split(np.arange(len(rows)), pieces)
            ]

    def times(self, vector: Floats) -> Floats:
        """Return the matrix times `vector` [c]."""
        product = np.empty(self._length)
        for rows, small, spread in self._blocks:
            product[rows] = small @ (spread @ vector)
        return product

    def shrunk(self, weights: Floats) -> Floats:
        """Return a matrix of few rows whose columns have the lengths and angles of this one's.

        The rows of this one count multiplied by `weights` [n].
        """
        return np.vstack([
            _triangle(small * weights[rows, None]) @ spread for rows, small, spread in self._blocks
        ])  # fmt: skip


def _triangle(x: Floats) -> Floats:
    """Return the triangle of the QR decomposition: its columns' lengths and angles are x's."""
    return np.asarray(np.linalg.qr(x, mode="r"))


def fit_nonnegative(x: Floats, y: Floats, weights: Floats, blocks: Ints | None = None) -> Floats:
    """Return coefficients >= 0 with x @ coefficients near y; `weights` multiply residuals.

    x [n, columns], y [n], weights [n]; `blocks` [n] as in `Blocks`. The loss is soft-L1 (scipy's
    name) of residuals in units of their own spread, by reweighted least squares, so that outliers
    pull but do not decide.
    """
    scale = np.maximum(np.percentile(x, 95, axis=0), TINY)
    scale = np.where(scale > TINY, scale, np.maximum(x.max(axis=0), 1.0))
    whole = Blocks(np.column_stack([x / scale, y]), blocks)
    solution = _solve(whole.shrunk(weights))
    width = NO_OUTLIER * float(np.abs(y * weights).max())
    for _ in range(PASSES):
        residual = whole.times(np.append(solution, -1.0)) * weights
        spread = TO_SIGMA * float(np.median(np.abs(residual - np.median(residual))))
        trust = (1.0 + (residual / max(WIDTH * spread, width)) ** 2) ** -0.25
        last, solution = solution, _solve(whole.shrunk(weights * trust))
        if np.abs(solution - last).max() <= STILL * max(float(np.abs(solution).max()), STILL):
            break
    coefficients: Floats = solution / scale
    return coefficients


def _solve(shrunk: Floats) -> Floats:
    """Solve the ridged non-negative problem, given its columns and, last, its target."""
    norms = np.linalg.norm(shrunk[:, :-1], axis=0)
    ridge = np.eye(len(norms), 1 + len(norms)) * np.sqrt(RIDGE) * norms[:, None]
    triangle = _triangle(np.vstack([shrunk, ridge]))
    solution: Floats = nnls(triangle[:, :-1], triangle[:, -1])[0]
    return solution


def choose_columns(
    x: Floats, names: Sequence[str], expendable: Sequence[str], blocks: Ints | None = None
) -> tuple[list[int], dict[str, str]]:
    """Return the columns that can be told apart, and why each other one cannot.

    A constant column goes. While some column is all but a combination of the others
    (LARGEST_VIF), the first such of `expendable` goes; columns not listed there stay.
    """
    constant = np.ptp(x, axis=0) == 0
    dropped = {name: f"constant at {x[0, i]:g}" for i, name in enumerate(names) if constant[i]}
    kept = [i for i, name in enumerate(names) if name not in dropped]
    scaled = x / np.maximum(np.abs(x).max(axis=0), TINY)
    whole = Blocks(np.column_stack([np.ones(len(x)), scaled]), blocks).shrunk(np.ones(len(x)))
    # Without its first row, which the constant explains, the triangle is that of centred columns.
    centred = _triangle(whole)[1:, 1:]
    candidates = [i for i in map(list(names).index, expendable) if i in kept]
    while len(kept) > 1:
        factors = ((i, _inflation(centred, i, kept)) for i in candidates if i in kept)
        loose = next(((i, factor) for i, factor in factors if factor > LARGEST_VIF), None)
        if loose is None:
            break
        size = "infinite" if loose[1] == np.inf else f"{loose[1]:.0f}"
        dropped[names[loose[0]]] = f"collinear with the others, variance inflation {size}"
        kept.remove(loose[0])
    return kept, dropped


def _inflation(centred: Floats, column: int, kept: Sequence[int]) -> float:
    """Return the variance-inflation factor of a column among the other ones of `kept`."""
    target, others = centred[:, column], centred[:, [i for i in kept if i != column]]
    rest = target - others @ np.linalg.lstsq(others, target, rcond=None)[0]
    left = float(rest @ rest) / float(target @ target)
    return 1.0 / left if left > np.finfo(float).eps else np.inf
