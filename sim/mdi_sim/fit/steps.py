"""Fits device times of steps to their work: the terms of `LinearCost`, with prediction on arrays.

Errors count relative to a step's own time, coefficients are at least 0. A captured decode graph
has a time of its own, in a table that never falls with size; lengths add to it.

Read next: `features.py` (what is fitted), `robust.py` (how), `diagnostics.py` (how well).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mdi_shared.cost.graph_sizes import graph_sizes
from mdi_shared.cost.linear import DECODE_FEATURES, PREFILL_FEATURES, DecodeTerms, PrefillTerms
from mdi_sim.fit.features import PREFILL, Floats, Steps
from mdi_sim.fit.robust import choose_columns, fit_nonnegative

# Which of two columns that look alike goes: window and selected pairs saturate and turn into rows,
# consumer rows are rows without bounded replay, ratio-1 pairs follow ratio-2 ones (R31).
EXPENDABLE = ("swa_pairs", "consumer_rows", "core_pairs", "idx_pairs_r1", "cached_rows", "n_seqs",
              "idx_pairs_r2")  # fmt: skip
DECODE_EXPENDABLE = ("n_seqs", "sum_k")
FEWEST_IN_STRETCH = 3  # steps between two bends of the table of rows


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Terms of one kind of step, and the columns that were dropped with the reason."""

    terms: PrefillTerms | DecodeTerms
    dropped: Mapping[str, str]


def predict(terms: PrefillTerms | DecodeTerms, steps: Steps) -> Floats:
    """Return device times, ns, as `LinearCost.device_ns` does but for rounding."""
    rows = steps.column("rows")
    if isinstance(terms, PrefillTerms):
        rates = np.array([getattr(terms, name) for name in PREFILL_FEATURES])
        predicted: Floats = terms.const + steps.x @ rates
        if terms.base:
            sizes, times = np.array(terms.base, dtype=np.float64).T
            last = np.minimum(rows, sizes[-1])  # beyond it, rows cost what they cost anyway
            predicted += np.interp(rows, sizes, times) - terms.const - terms.rows * last
        return predicted
    forward = terms.const + terms.rows * rows
    if terms.graphs:
        sizes, times = np.array(terms.graphs, dtype=np.float64).T
        slopes = np.array(terms.graph_slopes or (0.0,) * len(sizes))
        fits = rows <= sizes[-1]
        at = np.searchsorted(sizes, rows[fits])
        forward = np.maximum(forward, times[-1])
        forward[fits] = times[at] - slopes[at] * (sizes[at] - rows[fits])
    whole: Floats = forward + steps.x[:, 1:] @ np.array([terms.sum_k, terms.n_seqs])
    return whole


def fit_steps(steps: Steps) -> FittedSteps:
    """Fit the terms of the kind that `steps` are; there must be some."""
    return fit_prefill(steps) if steps.kind == PREFILL else fit_decode(steps)


def fit_prefill(steps: Steps) -> FittedSteps:
    """Fit the coefficients (docs/rules.md, R32), constant and rows as a table with bends.

    A few rows cost less than the constant of many: they touch fewer experts. More rows then cost
    little until arithmetic outweighs reading weights. So each stretch of rows has its own slope.
    """
    kept, dropped = choose_columns(steps.x, PREFILL_FEATURES, EXPENDABLE)
    others = [i for i in kept if PREFILL_FEATURES[i] != "rows"]
    rows = steps.column("rows")
    knots = _knots(rows)
    stretches = [np.clip(rows - low, 0, high - low) for low, high in pairwise(knots)]
    x = np.column_stack([np.ones(len(steps)), *stretches, steps.x[:, others]])
    first, *rates = fit_nonnegative(x, steps.ns, 1.0 / steps.ns).tolist()
    slopes, rates = rates[: len(stretches)], rates[len(stretches) :]
    times = first + np.cumsum([0.0, *(np.array(slopes) * np.diff(knots))])
    terms = dict.fromkeys(PREFILL_FEATURES, 0.0)
    terms.update({PREFILL_FEATURES[i]: rate for i, rate in zip(others, rates, strict=True)})
    terms["rows"] = slopes[-1] if slopes else 0.0
    base = tuple((knot, int(time + 0.5)) for knot, time in zip(knots, times, strict=True))
    return FittedSteps(PrefillTerms(const=0.0, base=base, **terms), dropped)


def _knots(rows: Floats) -> list[int]:
    """Return where the slope may change: powers of two with enough steps on either side."""
    least, most = int(rows.min()), int(rows.max())
    knots = [least]
    for knot in (2**i for i in range(most.bit_length())):
        if knot > least and _count(rows, knots[-1], knot) >= FEWEST_IN_STRETCH:
            knots.append(knot)
    while len(knots) > 1 and _count(rows, knots[-1], most) < FEWEST_IN_STRETCH:
        knots.pop()
    return [*knots, most] if most > knots[-1] else knots


def _count(rows: Floats, above: int, up_to: int) -> int:
    return int(((rows > above) & (rows <= up_to)).sum())


def fit_decode(steps: Steps) -> FittedSteps:
    """Fit a table of captured graphs, an eager line, and what lengths and sequences add.

    Each graph takes a step up from the one before, and a slope over its rows where they vary.
    """
    graphs, eager = np.unique(steps.graph[steps.graph > 0]).astype(int).tolist(), steps.graph == 0
    rows = steps.column("rows")
    columns = {f"graph {size}": (steps.graph >= size) * 1.0 for size in graphs}
    for below, size in pairwise([0, *graphs]):
        if len(np.unique(rows[steps.graph == size])) > 1:
            columns[f"row {size}"] = np.clip(rows - below, 0, size - below) * ~eager
    if eager.any():
        columns |= {"const": eager * 1.0, "rows": eager * rows}
    columns |= {name: steps.column(name) for name in ("sum_k", "n_seqs")}
    names, x = list(columns), np.column_stack(list(columns.values()))
    kept, dropped = choose_columns(x, names, DECODE_EXPENDABLE, steps.graph)
    # Graphs and the eager constant stand in for a constant, and stay whatever they are like.
    bases = [i for i, name in enumerate(names) if name not in DECODE_FEATURES]
    kept = sorted({*kept, *bases})
    rates = dict.fromkeys([*names, "const", "rows"], 0.0)
    solved = fit_nonnegative(x[:, kept], steps.ns, 1.0 / steps.ns, steps.graph).tolist()
    rates.update({names[i]: rate for i, rate in zip(kept, solved, strict=True)})
    slope_of = {size: rates.get(f"row {size}", 0.0) for size in graphs}
    table = _graph_table([
        (size, rates[f"graph {size}"] + slope_of[size] * (size - below))
        for below, size in pairwise([0, *graphs])
    ])  # fmt: skip
    if not eager.any():
        rates |= _line_through(table)
    terms = DecodeTerms(
        const=rates["const"], rows=rates["rows"], sum_k=rates["sum_k"], n_seqs=rates["n_seqs"],
        graphs=table, graph_slopes=tuple(slope_of.get(size, 0.0) for size, _ in table),
    )  # fmt: skip
    return FittedSteps(terms, {n: why for n, why in dropped.items() if n in DECODE_FEATURES})


def _graph_table(increments: list[tuple[int, float]]) -> tuple[tuple[int, int], ...]:
    """Return (size, ns) of captured graphs; sizes not seen follow a power law between neighbours.

    `increments` are what each size seen, full, takes longer than the one before. Decode time bends
    as batches grow, first with the experts they touch and then not: a straight line lies too low.
    """
    if not increments:
        return ()
    seen = np.array([size for size, _ in increments])
    times = np.cumsum([more for _, more in increments])
    sizes = np.union1d(seen, graph_sizes(int(seen[-1])))
    sizes = sizes[sizes >= seen[0]]
    filled = np.exp(np.interp(np.log(sizes), np.log(seen), np.log(np.maximum(times, 1.0))))
    return tuple((int(size), int(ns + 0.5)) for size, ns in zip(sizes, filled, strict=True))


def _line_through(table: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """Return const and rows for steps beyond the largest graph: on from the table's upper half."""
    largest, most_ns = table[-1]
    size, ns = min(table, key=lambda entry: abs(entry[0] - largest / 2))
    slope = (most_ns - ns) / (largest - size) if largest > size else most_ns / largest
    slope = min(slope, most_ns / largest)
    return {"const": max(most_ns - slope * largest, 0.0), "rows": slope}
