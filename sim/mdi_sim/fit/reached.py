"""Which share of its hardware's peak rates a fitted model's steps reach.

The times of a fitted model, over the ranges it has seen, are explained by a roofline: a share of
each peak rate and a fixed time per layer. What hardly took part in the recorded steps says nothing
about its share; that one stays the roofline's assumption and is named so. No run is read here.

Read next: `transfer.py`, the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.optimize import least_squares

from mdi_shared.cost.hardware import Hardware
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.roofline import PEAK, UNITS_OF_COMPONENT, Efficiencies, RooflineCost
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.work import StepWork, decode_work, prefill_work
from mdi_shared.errors import ConfigError
from mdi_sim.fit.diagnostics import errors
from mdi_sim.fit.features import DECODE, PREFILL, Floats

RESOURCES = ("fp8", "bf16", "fp32", "memory")
OVERHEAD = "overhead"
# One efficiency off its assumption by a factor e must make the fit better by 5 % of its error.
PRIOR_WEIGHT = 0.05
LEAST_SHARE = 0.03  # of the recorded time: a resource below it stays as assumed
# Of the largest prefill step's rows, the least that say what hardware reaches: with fewer, launches
# and the experts that happen to be touched decide, which no roofline explains. Chosen with the step
# in view that transfer is judged by (docs/calibration.md).
LEAST_ROWS = 1 / 64
POINTS = {"rows": 8, "n_seqs": 5, "lengths": 6}  # of the grid, per feature


@dataclass(frozen=True, slots=True)
class Reached:
    """What a kind of recorded step reaches of its hardware.

    `shares` is the part of the steps' time that each resource takes, the fixed time as
    "overhead"; `assumed` names the resources that took part too little to tell. `fit` holds the
    errors of this explanation against the fitted model (`diagnostics.errors`).
    """

    efficiencies: Efficiencies
    shares: dict[str, float]
    assumed: tuple[str, ...]
    fit: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return efficiency, share of the time and origin of every term, JSON-able."""
        values = _by_resource(self.efficiencies)
        terms = {
            name: {
                "efficiency": values[name],
                "share_of_time": self.shares[name],
                "from": "assumed" if name in self.assumed else "fitted",
            }
            for name in RESOURCES
        }
        link = {"efficiency": self.efficiencies.link, "share_of_time": 0.0, "from": "assumed"}
        overhead = {
            "ns_per_layer": self.efficiencies.overhead_ns_per_layer,
            "share_of_time": self.shares[OVERHEAD],
            "from": "fitted",
        }
        return {"terms": {**terms, "link": link, OVERHEAD: overhead}, "explains_fit": self.fit}


def reached_by(
    fitted: LinearCost,
    hardware: Hardware,
    shape: ModelShape,
    *,
    is_prefill: bool,
    expected: Efficiencies | None = None,
) -> Reached:
    """Explain the times of a fitted model, over its ranges, by a roofline; see `Reached`.

    `expected` decides where the steps leave a choice (left out: the roofline's assumptions).
    """
    works = _grid(fitted, shape, is_prefill=is_prefill)
    if not works:
        kind = PREFILL if is_prefill else DECODE
        raise ConfigError(f"{kind}.ranges", None, "hold no step that the dimensions allow")
    times = np.array([fitted.device_ns(work) for work in works], dtype=np.float64)
    peak = RooflineCost(hardware, shape, efficiencies=PEAK)
    parts = [list(peak.explain(work).values())[:-1] for work in works]  # without the fixed time
    compute = np.array([[part.compute_ns for part in each] for each in parts])
    memory = np.array([[part.memory_ns for part in each] for each in parts])
    solver = _Explanation(compute, memory, times, expected or Efficiencies())
    assumed: tuple[str, ...] = ()
    while True:
        solution = solver.solve(assumed)
        shares = solver.shares(solution)
        weak = [n for n in RESOURCES if n not in assumed and shares[n] < LEAST_SHARE]
        if not weak:
            break
        assumed += tuple(weak)
    fp8, bf16, fp32, memory_share, fixed_ns = solution
    return Reached(
        efficiencies=Efficiencies(
            tensor=fp8, tensor_bf16=bf16, vector=fp32, memory=memory_share,
            overhead_ns_per_layer=int(fixed_ns / shape.num_hidden_layers + 0.5),
        ),
        shares=shares,
        assumed=tuple(name for name in RESOURCES if name in assumed),
        fit=errors(times, solver.predict(solution)),
    )  # fmt: skip


class _Explanation:
    """Least squares of log times over efficiencies and a fixed time.

    `compute` and `memory` [steps, components] are times at peak rates, `times` [steps], ns. A
    solution is the efficiencies in the order of RESOURCES and the fixed time of a step, ns.
    """

    def __init__(
        self, compute: Floats, memory: Floats, times: Floats, expected: Efficiencies
    ) -> None:
        self._compute, self._memory, self._times = compute, memory, times
        # The exchange of experts is not there on one rank: it computes and moves nothing.
        self._unit = [RESOURCES.index(name) if name else 0 for name in UNITS_OF_COMPONENT]
        values = _by_resource(expected)
        self._assumed = np.array([values[name] for name in RESOURCES])

    def solve(self, assumed: Sequence[str]) -> list[float]:
        """Return the solution, with the resources of `assumed` at their assumed efficiency."""
        free = np.array([name not in assumed for name in RESOURCES])
        unit = float(self._times.min())  # a step's fixed time is at most the fastest step's

        def whole(x: Floats) -> list[float]:
            logs = np.log(self._assumed)
            logs[free] = x[:-1]
            return [*np.exp(logs).tolist(), float(x[-1]) * unit]

        def residuals(x: Floats) -> Floats:
            misses = np.log(self.predict(whole(x)) / self._times) / np.sqrt(len(self._times))
            prior = PRIOR_WEIGHT * (x[:-1] - np.log(self._assumed)[free])
            return cast("Floats", np.concatenate([misses, prior]))

        count = int(free.sum())
        start = np.append(np.log(self._assumed)[free], 0.1)
        low, high = np.append(np.full(count, -7.0), 0.0), np.append(np.zeros(count), 1.0)
        return whole(least_squares(residuals, start, bounds=(low, high)).x)

    def predict(self, solution: Sequence[float]) -> Floats:
        """Return the time of each step, ns."""
        compute, memory = self._slowed(solution)
        total: Floats = np.maximum(compute, memory).sum(axis=1) + solution[4]
        return total

    def shares(self, solution: Sequence[float]) -> dict[str, float]:
        """Return the part of the time each resource takes, mean over the steps."""
        compute, memory = self._slowed(solution)
        whole = self.predict(solution)
        by_compute = np.where(compute >= memory, compute, 0.0).T @ (1 / whole) / len(whole)
        shares = {
            name: float(by_compute[np.equal(self._unit, index)].sum())
            for index, name in enumerate(RESOURCES[:-1])
        }
        shares["memory"] = float((np.where(compute < memory, memory, 0.0).sum(1) / whole).mean())
        shares[OVERHEAD] = float((solution[4] / whole).mean())
        return shares

    def _slowed(self, solution: Sequence[float]) -> tuple[Floats, Floats]:
        return (self._compute / np.array([solution[i] for i in self._unit]),
                self._memory / solution[3])  # fmt: skip


def _by_resource(efficiencies: Efficiencies) -> dict[str, float]:
    return {"fp8": efficiencies.tensor, "bf16": efficiencies.bf16, "fp32": efficiencies.vector,
            "memory": efficiencies.memory}  # fmt: skip


def _grid(fitted: LinearCost, shape: ModelShape, *, is_prefill: bool) -> list[StepWork]:
    """Return steps spread evenly, by factors, over what a fitted model has seen."""
    ranges = fitted.prefill_ranges if is_prefill else fitted.decode_ranges
    lengths = "cached_rows" if is_prefill else "sum_k"
    for name in ("rows", "n_seqs", lengths):
        if name not in ranges:
            raise ConfigError(f"ranges.{name}", None, "is missing: the model has seen no such step")
    low, high = ranges["rows"]
    least = max(low, int(high * LEAST_ROWS)) if is_prefill else low
    works = [
        even_work(shape, rows, n_seqs, total, is_prefill=is_prefill)
        for rows in _spread((least, high), POINTS["rows"])
        for n_seqs in (_spread(ranges["n_seqs"], POINTS["n_seqs"]) if is_prefill else [rows])
        for total in _spread(ranges[lengths], POINTS["lengths"])
        if n_seqs <= rows <= total
    ]
    return [work for work in works if fitted.in_range(work)]


def _spread(seen: tuple[int, int], count: int) -> list[int]:
    low, high = max(seen[0], 1), max(seen[1], 1)
    return sorted({int(value + 0.5) for value in np.geomspace(low, high, count)})


def even_work(
    shape: ModelShape, rows: int, n_seqs: int, sum_k: int, *, is_prefill: bool
) -> StepWork:
    """Return the work of `n_seqs` sequences as equal as whole tokens allow.

    `rows` are their query rows and `sum_k` their context lengths, both in all. Decode steps have
    one row a sequence.
    """
    ks = _even(sum_k, n_seqs)
    if not is_prefill:
        return decode_work(shape, ks)
    return prefill_work(shape, [(q, max(k, q), max(k, q))
                                for q, k in zip(_even(rows, n_seqs), ks, strict=True)])  # fmt: skip


def _even(total: int, parts: int) -> list[int]:
    base, more = divmod(total, parts)
    return [base + (i < more) for i in range(parts)]
