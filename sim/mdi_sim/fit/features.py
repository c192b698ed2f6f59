"""What a fit sees of recorded steps: features and device times as arrays, and the groups they form.

Columns are those of the step table, which hold the features of `mdi_shared.cost.linear` already;
runs too large for their items to be kept can be fitted, too. Steps without rows, each run's first
ones, and steps whose device waited for its host are no measurement of the device and are left out,
by name and count.

Read next: `steps.py` (the fits), `host.py` (the host's times), docs/rules.md, R32.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_shared.cost.linear import DECODE_FEATURES, PREFILL_FEATURES, LinearCost
from mdi_traces.columns import Bools, Ints, codes, floats, ints, valid_rows
from mdi_traces.step_features import COLUMN_OF, SLOW_LAUNCH, is_compile, is_warm

Floats = NDArray[np.float64]

PREFILL, DECODE = "prefill", "decode"
FEATURES: Mapping[str, tuple[str, ...]] = {PREFILL: PREFILL_FEATURES, DECODE: DECODE_FEATURES}

LONG_CONTEXT = 8_192  # tokens: longer contexts count as long in error tables
LAST_WORK_NS = 1_000_000  # what a device still has to do when all is queued, if it was kept waiting
FEWEST_UNSTARVED = 10  # prefill steps of a run
PER_STEP = ("x", "ns", "graph", "max_k", "run")  # the arrays of `Steps`
FEWEST_OWN = 3  # undisturbed steps of a graph that make the disturbed ones dispensable


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one kind, over all runs. Arrays have one entry per step.

    `x` [steps, features] is in the order of FEATURES[kind], `ns` the device time, `graph` the size
    of the captured graph that ran (0 = none), `max_k` the longest context, `run` the number of the
    run. `left_out` counts steps that are not among them, by reason.
    """

    kind: str
    x: Floats
    ns: Floats
    graph: Ints
    max_k: Ints
    run: Ints
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.ns)

    def column(self, name: str) -> Floats:
        """Return one feature."""
        column: Floats = self.x[:, FEATURES[self.kind].index(name)]
        return column

    def take(self, which: Bools) -> "Steps":
        """Return the steps where `which` is True."""
        return replace(self, **{name: getattr(self, name)[which] for name in PER_STEP})

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return the least and the greatest value of each feature."""
        low, high = self.x.min(axis=0), self.x.max(axis=0)
        names = FEATURES[self.kind]
        return {name: (int(low[i]), int(high[i])) for i, name in enumerate(names)}

    def groups(self) -> list[tuple[int, ...]]:
        """Return each step's shape class: rows or graph, longest context and sequences, by octave.

        Steps of one class are held out together: a step among its like is no test.
        """
        rows = self.column("rows")
        size = np.where(self.graph > 0, -self.graph, _octave(rows))
        keys = np.stack([size, _octave(1 + self.max_k), _octave(self.column("n_seqs"))], axis=1)
        return [tuple(key) for key in keys.astype(int).tolist()]

    def classes(self) -> dict[str, Bools]:
        """Return named subsets whose errors are stated on their own."""
        is_long = self.max_k > LONG_CONTEXT
        named = {"short context": ~is_long, "long context": is_long}
        if self.kind == PREFILL:
            alone = self.column("n_seqs") == 1
            named = {"one sequence": alone, "several sequences": ~alone, **named}
        return {name: which for name, which in named.items() if bool(which.any())}


def _octave(values: NDArray[Any]) -> NDArray[Any]:
    octave: NDArray[Any] = np.floor(np.log2(np.maximum(values, 1)))
    return octave


def step_features(table: pa.Table, kind: str) -> Floats:
    """Return the features of all rows of a step table as [steps, features]."""
    columns = [ints(table[COLUMN_OF.get(name, name)]) for name in FEATURES[kind]]
    return np.stack(columns, axis=1).astype(np.float64)


def kind_rows(table: pa.Table, kind: str) -> Bools:
    """Say of each step whether it is of `kind` and has rows.

    A mixed step runs as a prefill step does, and prefill terms say what it takes.
    """
    indices, labels = codes(table["kind"])
    wanted = (kind, "mixed") if kind == PREFILL else (kind,)
    of_kind = np.isin(indices, [i for i, label in enumerate(labels) if label in wanted])
    busy: Bools = of_kind & (ints(table["n_tokens"]) > 0)
    return busy


def gather_steps(tables: Sequence[pa.Table], kind: str) -> Steps:
    """Return the steps of a kind that say how long the device takes, from step tables of runs."""
    usual_ms = usual_launch_ms(tables, kind)
    parts, left_out = [], Counter[str]()
    for number, table in enumerate(tables):
        keep, reasons = measuring_steps(table, kind, usual_ms)
        left_out.update({reason: int(which.sum()) for reason, which in reasons.items()})
        parts.append(all_steps(table, kind, number).take(keep))
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_STEP}
    return Steps(kind=kind, left_out=dict(+left_out), **columns)


def all_steps(table: pa.Table, kind: str, number: int = 0) -> Steps:
    """Return every step of a run, as if it were of `kind`."""
    return Steps(kind, step_features(table, kind), device_times(table), ints(table["graph_size"]),
                 ints(table["max_k"]), np.full(len(table), number), {})  # fmt: skip


def device_times(table: pa.Table) -> Floats:
    """Return how long each step took the device, ns."""
    times: Floats = (ints(table["t_dev_end"]) - ints(table["t_dev_start"])).astype(np.float64)
    return times


def measuring_steps(
    table: pa.Table, kind: str, usual_ms: float
) -> tuple[Bools, dict[str, Bools]]:  # fmt: skip
    """Say which steps of a rank say how long the device takes, and of the others why they do not.

    `usual_ms` is what launching a step of the kind usually takes the host.
    """
    busy, graph = kind_rows(table, kind), ints(table["graph_size"])
    warm = busy & is_warm(graph, busy)
    slow = warm & is_compile(floats(table["cpu_launch_ms"]), usual_ms)
    starved = (_starved_decode if kind == DECODE else _starved_prefill)(table, warm) & ~slow
    timeless = warm & ~starved & ~slow & (device_times(table) <= 0)
    return warm & ~starved & ~slow & ~timeless, {
        "first of its kind in a run": busy & ~warm,
        "the device waited for the host": starved,
        f"launched in over {SLOW_LAUNCH:g} times the usual time": slow,
        "no device time": timeless,
    }


def usual_launch_ms(tables: Sequence[pa.Table], kind: str) -> float:
    """Return the median time that launching a step of a kind took, over all runs; 0 if unknown."""
    times = np.concatenate([floats(t["cpu_launch_ms"])[kind_rows(t, kind)] for t in tables])
    known = times[~np.isnan(times)]
    return float(np.median(known)) if len(known) else 0.0


def queued_ns(table: pa.Table) -> Floats:
    """Return when the host had queued all of each step's work, ns.

    A step that does not say how long that took, such as a simulated one, was queued when it was
    handed to the device.
    """
    queued: Floats = ints(table["t_launch"]) + np.nan_to_num(floats(table["cpu_launch_ms"])) * 1e6
    return queued


def _starved_decode(table: pa.Table, busy: Bools) -> Bools:
    """True for graph steps that began before the host had queued all of their work.

    Their time on the device is partly the host's. A graph seldom seen otherwise keeps them.
    """
    graph = ints(table["graph_size"])
    starved: Bools = busy & (graph > 0) & (queued_ns(table) > ints(table["t_dev_start"]))
    for size in np.unique(graph[starved]).tolist():
        if int((busy & (graph == size) & ~starved).sum()) < FEWEST_OWN:
            starved &= graph != size
    return starved


def ends_with_its_launch(table: pa.Table) -> Bools:
    """True for steps whose device was done as soon as the host had queued all of their work.

    They took as long as the host did. A step that does not say how long its launch took is False.
    """
    lag = ints(table["t_dev_end"]) - queued_ns(table)
    ends: Bools = valid_rows(table["cpu_launch_ms"]) & (lag < LAST_WORK_NS)
    return ends


def _starved_prefill(table: pa.Table, busy: Bools) -> Bools:
    """True for prefill steps that say nothing of the device; for none where few others are."""
    starved: Bools = busy & ends_with_its_launch(table)
    return starved if int((busy & ~starved).sum()) >= FEWEST_UNSTARVED else np.zeros_like(starved)


def extrapolated_steps(table: pa.Table, cost: LinearCost) -> dict[str, Bools]:
    """Say of each step, by feature, whether it lies outside what `cost` was fitted on.

    Keys are "prefill.rows" and so on, those without such a step left out. A step without rows has
    no features.
    """
    flagged: dict[str, Bools] = {}
    for kind, ranges in ((PREFILL, cost.prefill_ranges), (DECODE, cost.decode_ranges)):
        busy, x = kind_rows(table, kind), step_features(table, kind)
        for i, name in enumerate(FEATURES[kind]):
            low, high = ranges.get(name, (np.inf, -np.inf))
            outside: Bools = busy & ~((x[:, i] >= low) & (x[:, i] <= high))
            if name == "consumer_rows" and not cost.knows_replay:
                outside |= busy & (x[:, i] != x[:, FEATURES[kind].index("rows")])
            if outside.any():
                flagged[f"{kind}.{name}"] = outside
    return flagged
