"""Fits device times of steps to their work: the terms of `LinearCost`, with prediction on arrays.

Errors count relative to a step's own time, coefficients are at least 0. A captured decode graph
has a time of its own, in a table that never falls with size; lengths add to it.

Read next: `features.py` (what is fitted), `robust.py` (how), `diagnostics.py` (how well).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mdi_shared.linear_cost import PREFILL_FEATURES, DecodeTerms, PrefillTerms
from mdi_sim.features import PREFILL, Floats, Steps
from mdi_sim.robust import choose_columns, fit_nonnegative

# Which of two columns that look alike goes: window and selected pairs saturate and turn into rows,
# consumer rows are rows without bounded replay, ratio-1 pairs follow ratio-2 ones (§7.3).
EXPENDABLE = ("swa_pairs", "consumer_rows", "core_pairs", "idx_pairs_r1", "cached_rows", "n_seqs",
              "idx_pairs_r2")  # fmt: skip
DECODE_EXPENDABLE = ("n_seqs", "sum_k")


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Terms of one kind of step, and the columns that were dropped with the reason."""

    terms: PrefillTerms | DecodeTerms
    dropped: Mapping[str, str]

    def predict(self, steps: Steps) -> Floats:
        """Return device times, ns, as `LinearCost.device_ns` does but for rounding."""
        if isinstance(self.terms, PrefillTerms):
            rates = np.array([getattr(self.terms, name) for name in PREFILL_FEATURES])
            predicted: Floats = self.terms.const + steps.x @ rates
            return predicted
        terms = self.terms
        rows = steps.column("rows")
        forward = terms.const + terms.rows * rows
        if terms.graphs:
            sizes, times = np.array(terms.graphs, dtype=np.float64).T
            at = np.searchsorted(sizes, rows)
            inside = at < len(sizes)
            forward = np.maximum(forward, times[-1])
            forward[inside] = times[at[inside]]
        lengths = terms.sum_k * steps.column("sum_k")
        whole: Floats = forward + lengths + terms.n_seqs * steps.column("n_seqs")
        return whole


def fit_steps(steps: Steps) -> FittedSteps:
    """Fit the terms of the kind that `steps` are; there must be some."""
    return fit_prefill(steps) if steps.kind == PREFILL else fit_decode(steps)


def fit_prefill(steps: Steps) -> FittedSteps:
    """Fit theta of engine-semantics §7.3."""
    kept, dropped = choose_columns(steps.x, PREFILL_FEATURES, EXPENDABLE)
    x = np.column_stack([np.ones(len(steps)), steps.x[:, kept]])
    const, *rates = fit_nonnegative(x, steps.ns, 1.0 / steps.ns).tolist()
    found = dict.fromkeys(PREFILL_FEATURES, 0.0)
    found.update({PREFILL_FEATURES[i]: rate for i, rate in zip(kept, rates, strict=True)})
    return FittedSteps(PrefillTerms(const=const, **found), dropped)


def fit_decode(steps: Steps) -> FittedSteps:
    """Fit a table of captured graphs, an eager line, and what lengths and sequences add."""
    graphs, eager = np.unique(steps.graph[steps.graph > 0]), steps.graph == 0
    base = {f"graph {size}": (steps.graph >= size) * 1.0 for size in graphs.tolist()}
    if eager.any():
        base |= {"const": eager * 1.0, "rows": eager * steps.column("rows")}
    columns = base | {name: steps.column(name) for name in ("sum_k", "n_seqs")}
    names, x = list(columns), np.column_stack(list(columns.values()))
    kept, dropped = _decode_columns(x, names)
    rates = dict.fromkeys(names, 0.0)
    solved = fit_nonnegative(x[:, kept], steps.ns, 1.0 / steps.ns).tolist()
    rates.update({names[i]: rate for i, rate in zip(kept, solved, strict=True)})
    times = np.cumsum([rates[f"graph {size}"] for size in graphs.tolist()])
    table = tuple((int(g), int(t + 0.5)) for g, t in zip(graphs, times, strict=True))
    if not eager.any():
        rates |= _line_through(table)
    terms = DecodeTerms(
        const=rates["const"], rows=rates["rows"], sum_k=rates["sum_k"], n_seqs=rates["n_seqs"],
        graphs=table,
    )  # fmt: skip
    return FittedSteps(terms, dropped)


def _decode_columns(x: Floats, names: list[str]) -> tuple[list[int], dict[str, str]]:
    """Choose columns; the bases (graphs, the eager constant) replace a constant and stay."""
    kept, dropped = choose_columns(x, names, DECODE_EXPENDABLE)
    bases = [i for i, name in enumerate(names) if name.startswith("graph ") or name == "const"]
    own = {name: why for name, why in dropped.items() if names.index(name) not in bases}
    return sorted({*kept, *bases}), own


def _line_through(table: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """Return const and rows for steps beyond the largest graph: a line through the table."""
    sizes, times = np.array(table, dtype=np.float64).T
    x = np.column_stack([np.ones(len(sizes)), sizes])
    const, rows = fit_nonnegative(x, times, 1.0 / np.maximum(times, 1.0)).tolist()
    return {"const": const, "rows": rows}
