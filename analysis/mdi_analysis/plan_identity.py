"""Did two runs make the same decisions? The first step at which they did not, if any.

A decision is the kind of a step and its rows in order: request, query rows `q`, context `k`, last
chunk or not. Times, memory left and whatever the model said are not decisions. Without items in
both runs only the step rows are compared, and the answer says so.

Read next: `compare.py`, which pairs steps when the plans are identical.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mdi_analysis.frames import KINDS, Ints, RunLike, ints, kind_codes, series

STEP_COLUMNS = ("n_seqs", "n_tokens", "n_preempted")
ITEM_COLUMNS = ("q", "k", "is_last_chunk")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step row on which two runs disagree, and the value each has there."""

    step: int
    rank: int
    what: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class PlanIdentity:
    """`identical_steps` step rows agree from the start; `basis` is what was compared."""

    identical_steps: int
    basis: str  # step rows | step rows and items
    difference: Difference | None

    @property
    def identical(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        d = self.difference
        if d is None:
            return f"identical for {self.identical_steps:,} steps (compared: {self.basis})"
        return (
            f"identical for {self.identical_steps:,} steps, then step {d.step} of rank {d.rank} "
            f"differs in {d.what}: {d.a} vs {d.b} (compared: {self.basis})"
        )


def compare_plans(a: RunLike, b: RunLike) -> PlanIdentity:
    """Compare two plan logs in order of (step, rank); raises `TraceError` on a broken table."""
    key_a, rows_a = _step_rows(a)
    key_b, rows_b = _step_rows(b)
    found = [_first_step_difference((key_a, rows_a), (key_b, rows_b))]
    items_a, items_b = a.items, b.items
    basis = "step rows"
    if items_a is not None and items_b is not None:
        basis = "step rows and items"
        found.append(_first_item_difference(items_a, items_b))
    # On one step the step row speaks first: min() keeps the earlier of equals.
    first = min((d for d in found if d is not None), key=lambda d: (d.step, d.rank), default=None)
    if first is None:
        return PlanIdentity(len(key_a), basis, None)
    before = (key_a[:, 0] < first.step) | ((key_a[:, 0] == first.step) & (key_a[:, 1] < first.rank))
    return PlanIdentity(int(before.sum()), basis, first)


def _step_rows(run: RunLike) -> tuple[Ints, Ints]:
    """Return (step, rank) and (kind, *STEP_COLUMNS) of every step, ordered by (step, rank)."""
    steps = run.steps
    key = np.stack([ints(steps, "steps", "step"), ints(steps, "steps", "rank")], axis=1)
    columns = [kind_codes(steps), *(ints(steps, "steps", name) for name in STEP_COLUMNS)]
    order = np.lexsort((key[:, 1], key[:, 0]))
    return key[order], np.stack(columns, axis=1)[order]


def _first_step_difference(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> Difference | None:
    (key_a, rows_a), (key_b, rows_b) = a, b
    at = _first_unequal(np.hstack([key_a, rows_a]), np.hstack([key_b, rows_b]))
    if at is None:
        return None
    if at >= min(len(key_a), len(key_b)) or (key_a[at] != key_b[at]).any():
        return _unpaired(key_a, key_b, at, "presence of the step")
    column = int((rows_a[at] != rows_b[at]).argmax())
    what = ("kind", *STEP_COLUMNS)[column]
    values = [int(rows[at, column]) for rows in (rows_a, rows_b)]
    shown = [KINDS[value] if what == "kind" else str(value) for value in values]
    return Difference(int(key_a[at, 0]), int(key_a[at, 1]), what, *shown)


def _first_item_difference(a: pd.DataFrame, b: pd.DataFrame) -> Difference | None:
    key_a, key_b = _item_keys(a), _item_keys(b)
    order_a, order_b = (np.lexsort((key[:, 1], key[:, 0])) for key in (key_a, key_b))
    names_a, names_b = (series(f, "items", "req_id").astype(object) for f in (a, b))
    codes, _ = pd.factorize(pd.concat([names_a, names_b], ignore_index=True))
    rows_a = _item_rows(a, key_a, codes[: len(a)])[order_a]
    rows_b = _item_rows(b, key_b, codes[len(a) :])[order_b]
    at = _first_unequal(rows_a, rows_b)
    if at is None:
        return None
    key_a, key_b = key_a[order_a], key_b[order_b]
    if at >= min(len(key_a), len(key_b)) or (key_a[at] != key_b[at]).any():
        return _unpaired(key_a, key_b, at, "presence of an item")
    shown = [
        f"{frame['req_id'].iloc[order[at]]} q={rows[at, 3]} k={rows[at, 4]}"
        f"{' last chunk' if rows[at, 5] else ''}"
        for frame, order, rows in ((a, order_a, rows_a), (b, order_b, rows_b))
    ]
    return Difference(int(key_a[at, 0]), int(key_a[at, 1]), "items", *shown)


def _item_keys(items: pd.DataFrame) -> Ints:
    return np.stack([ints(items, "items", "step"), ints(items, "items", "rank")], axis=1)


def _item_rows(items: pd.DataFrame, key: Ints, requests: Ints) -> Ints:
    columns = [requests, *(ints(items, "items", name) for name in ITEM_COLUMNS)]
    return np.hstack([key, np.stack(columns, axis=1)])


def _first_unequal(a: Ints, b: Ints) -> int | None:
    """Return the first row that differs, one past the shorter if only lengths do, else None."""
    n = min(len(a), len(b))
    unequal = (a[:n] != b[:n]).any(axis=1)
    if unequal.any():
        return int(unequal.argmax())
    return None if len(a) == len(b) else n


def _unpaired(key_a: Ints, key_b: Ints, at: int, what: str) -> Difference:
    """Describe a row one run has and the other lacks: the earlier of the two at this place."""
    pair = [(int(key[at, 0]), int(key[at, 1])) if at < len(key) else None for key in (key_a, key_b)]
    step, rank = min(key for key in pair if key is not None)
    in_a, in_b = ("there" if key == (step, rank) else "missing" for key in pair)
    return Difference(step, rank, what, in_a, in_b)
