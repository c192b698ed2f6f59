"""The slowest steps of a run and why each was slow: reasons the trace shows, largest first.

Every reason carries the ms it is held to account for. Some are read off directly (a compiling
launch, a gap); rows and context are priced by what the run's own steps of that kind cost per row
and per context token, fitted non-negative and relative to each step's time. An estimate, no proof:
reasons may overlap, and need not add up.

Read next: `step_frames.py` (the columns), docs/rules.md, R32 (what a step's time depends on).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mdi_analysis.frames import OWN_KINDS, Floats
from mdi_analysis.report import counted, number
from mdi_shared.errors import ConfigError

ORDERS = ("device_ms", "turn_ms", "gap_ms", "host_ms")
SHOWN = ("step", "rank", "kind", "n_seqs", "n_tokens", "max_k", "n_waiting", "device_ms", "gap_ms",
         "host_ms", "predicted_ms")  # fmt: skip
NOTABLE = 0.05  # of the step's time: smaller reasons are not told
LAUNCH_BOUND = 0.9  # of the device time spent launching: the device worked at the host's pace
UNEVEN = 1.5  # times the usual imbalance of steps of its size
OFF = 0.1  # relative error from which a prediction counts as missed
FEWEST_TO_FIT = 8  # steps that measure the device
ORDINARY = "nothing unusual: an ordinary step of its size"
UNEXPLAINED = "no reason in the trace"


class Reason(NamedTuple):
    """`ms` is the part of the time it accounts for, NaN where nothing says how much."""

    ms: float
    text: str


@dataclass(frozen=True, slots=True)
class Typical:
    """What is usual among a run's steps of one kind: medians, and ms per row and context token.

    The last two are 0 when fewer than `FEWEST_TO_FIT` steps measure the device.
    """

    steps: pd.DataFrame
    rows: float
    context: float
    device_ms: float
    launch_ms: float
    plan_ms: float
    gap_ms: float
    visible_ms: float
    uses_graphs: bool
    ms_per_row: float
    ms_per_context: float

    @classmethod
    def of(cls, steps: pd.DataFrame) -> "Typical":
        clean = steps[~(steps["is_first"] | steps["is_compile"]) & (steps["device_ms"] > 0)]
        usual = next(s for s in (clean, steps[~steps["is_compile"]], steps) if len(s) or s is steps)
        per_row, per_context = _prices(clean)
        return cls(
            steps=usual,
            rows=float(usual["rows"].median()),
            context=float(usual["cached_rows"].median()),
            device_ms=_median(clean, "device_ms"),
            launch_ms=_median(usual, "cpu_launch_ms"),
            plan_ms=_median(usual, "plan_ms"),
            gap_ms=_median(usual[usual["had_requests"]], "gap_ms"),
            visible_ms=_median(usual, "visible_ms"),
            uses_graphs="graph_size" in steps and bool((steps["graph_size"] > 0).any()),
            ms_per_row=per_row,
            ms_per_context=per_context,
        )


def slowest_steps(
    frame: pd.DataFrame, n: int = 5, *, by: str = "device_ms", kind: str | None = None
) -> pd.DataFrame:
    """Return the `n` steps of a `steps_frame` that took longest, with `why`, a text for each.

    `by` is device_ms, turn_ms (what users feel), gap_ms (where requests were there) or host_ms.
    Prefill and decode steps count, or those of `kind` only; of a step that several ranks ran, the
    rank with the most rows. Reasons in `why` stand in the order of the ms they account for: a
    compiling launch, a graph captured or missing, rows, context, recomputed rows, preemption,
    uneven experts, a launch as long as the step, gaps, results read late. A prediction missed by
    10 % or more is added at the end. Raises `ConfigError` for another `by` or `kind`, or `n` below
    1.
    """
    if by not in ORDERS:
        raise ConfigError("by", by, f"must be one of {', '.join(ORDERS)}")
    if kind is not None and kind not in OWN_KINDS:
        raise ConfigError("kind", kind, f"must be None or one of {', '.join(OWN_KINDS)}")
    if n < 1:
        raise ConfigError("n", n, "must be at least 1")
    kinds = OWN_KINDS if kind is None else (kind,)
    own = frame[frame["kind"].isin(kinds) & (frame["rows"] > 0)]
    typical = {name: Typical.of(own[own["kind"] == name]) for name in kinds}
    timed = own[own[by].notna() & (own["had_requests"] | (by != "gap_ms"))]
    order = timed.sort_values([by, "rows"], ascending=False, kind="stable")
    chosen = order.drop_duplicates("step").head(n)
    rows = [row._asdict() for row in chosen.itertuples(index=False)]
    shown = list(SHOWN) if by in SHOWN else [*SHOWN, by]
    why = [_why(row, typical[str(row["kind"])], by) for row in rows]
    return chosen[shown].assign(why=why).reset_index(drop=True)


def reasons(row: dict[str, Any], typical: Typical) -> list[Reason]:
    """Return what slowed a row of a `steps_frame` down, largest first, small ones too."""
    found = [*_first_use(row, typical), *_work(row, typical), *_host(row, typical),
             *_imbalance(row, typical)]  # fmt: skip
    return sorted(found, key=lambda reason: -np.nan_to_num(reason.ms))


def _why(row: dict[str, Any], typical: Typical, by: str) -> str:
    notable = NOTABLE * max(float(row[by]), float(row["device_ms"]))
    texts = [r.text for r in reasons(row, typical) if np.isnan(r.ms) or r.ms >= notable]
    predicted, device = float(row["predicted_ms"]), float(row["device_ms"])
    missed = predicted > 0 and abs(device / predicted - 1) >= OFF
    if not texts:
        texts = [UNEXPLAINED if missed else ORDINARY]
    if missed:
        outside = f", outside its range in {row['extrapolated']}" if row["extrapolated"] else ""
        texts.append(f"{device / predicted - 1:+.0%} against the model's {number(predicted)} ms"
                     f"{outside}")  # fmt: skip
    return "; ".join(texts)


def _first_use(row: dict[str, Any], typical: Typical) -> Iterator[Reason]:
    device, launch = float(row["device_ms"]), _value(row, "cpu_launch_ms")
    graph, is_decode = int(_value(row, "graph_size", 0)), row["kind"] == "decode"
    if row["is_compile"]:
        extra = launch - typical.launch_ms
        yield Reason(extra, f"kernels compiled during its launch: {number(launch)} ms, "
                     f"{number(typical.launch_ms)} ms is usual")  # fmt: skip
    elif row["is_first"] and not device <= typical.device_ms:
        rows = counted(graph, "row")
        what = f"first use of the graph for {rows}" if graph else "first step of its kind"
        yield Reason(device - typical.device_ms, what)
    if is_decode and typical.uses_graphs and graph == 0:
        graphs = typical.steps[typical.steps["graph_size"] >= row["rows"]]
        extra = device - float(graphs["device_ms"].median()) if len(graphs) else np.nan
        yield Reason(extra, "no captured graph holds its rows")


def _work(row: dict[str, Any], typical: Typical) -> Iterator[Reason]:
    """Yield what rows and context account for, against the kind's median step."""
    rows, context = float(row["rows"]), float(row["cached_rows"])
    extra = typical.ms_per_row * (rows - typical.rows)
    if extra > 0:
        yield Reason(extra, f"{rows:,.0f} rows, the median is {typical.rows:,.0f}: about "
                     f"{number(extra)} ms")  # fmt: skip
    extra = typical.ms_per_context * (context - typical.context)
    if extra > 0:
        yield Reason(extra, f"{context:,.0f} tokens of context, the longest {row['max_k']:,}, the "
                     f"median sum is {typical.context:,.0f}: about {number(extra)} ms")  # fmt: skip
    again = _value(row, "recomputed_rows", 0.0)
    if again > 0:
        share = again / rows * float(row["device_ms"])
        yield Reason(share, f"{again:,.0f} of its rows recomputed after a preemption")


def _host(row: dict[str, Any], typical: Typical) -> Iterator[Reason]:
    device, launch = float(row["device_ms"]), _value(row, "cpu_launch_ms")
    if launch >= LAUNCH_BOUND * device and not row["is_compile"]:
        yield Reason(max(launch - typical.launch_ms, NOTABLE * device), "bound by its launch: the "
                     f"host took {number(launch)} ms to hand the work over")  # fmt: skip
    gap = _value(row, "gap_ms", 0.0)
    if row["had_requests"] and gap > 0:
        usual = (
            f", {number(typical.gap_ms)} ms is usual" if typical.gap_ms == typical.gap_ms else ""
        )
        yield Reason(gap, f"the device had been idle for {number(gap)} ms{usual}")
    late = _value(row, "visible_ms", 0.0) - typical.visible_ms
    if late > 0:
        yield Reason(late, f"its results were read {number(late)} ms later than usual: the "
                     "host was busy")  # fmt: skip
    wait = _value(row, "wait_ms", 0.0)
    if wait > 0:
        yield Reason(wait, f"{number(wait)} ms at barriers")
    preempted = int(_value(row, "n_preempted", 0))
    if preempted:
        extra = max(float(row["plan_ms"]) - typical.plan_ms, 0.0)
        yield Reason(np.nan if np.isnan(extra) else max(extra, NOTABLE * device),
                     f"{preempted} preempted while it was planned")  # fmt: skip


def _imbalance(row: dict[str, Any], typical: Typical) -> Iterator[Reason]:
    """Yield uneven experts: imbalance falls with rows, so only steps of its size tell the usual."""
    uneven = _value(row, "moe_imbalance")
    if np.isnan(uneven):
        return
    size = np.floor(np.log2(typical.steps["rows"]))
    peers = typical.steps[size == np.floor(np.log2(row["rows"]))]
    usual = _median(peers, "moe_imbalance")
    if uneven >= UNEVEN * usual:
        extra = float(row["device_ms"]) - float(peers["device_ms"].median())
        yield Reason(max(extra, 0.0), f"busiest expert at {number(uneven)} times the mean, "
                     f"{number(usual)} is usual for its rows")  # fmt: skip


def _prices(clean: pd.DataFrame) -> tuple[float, float]:
    """Return ms per row and per context token, by non-negative least squares of relative errors."""
    if len(clean) < FEWEST_TO_FIT:
        return 0.0, 0.0
    from scipy.optimize import nnls

    columns = [np.ones(len(clean)), clean["rows"].to_numpy(), clean["cached_rows"].to_numpy()]
    x: Floats = np.stack(columns, axis=1).astype(np.float64)
    scale = x.max(axis=0)
    y = clean["device_ms"].to_numpy(dtype=np.float64)
    prices = nnls(x / scale / y[:, None], np.ones(len(y)))[0] / scale
    return float(prices[1]), float(prices[2])


def _median(frame: pd.DataFrame, name: str) -> float:
    return float(frame[name].median()) if name in frame and len(frame) else np.nan


def _value(row: dict[str, Any], name: str, otherwise: float = np.nan) -> float:
    """Return a number that a table may lack or leave null."""
    value = row.get(name)
    return otherwise if value is None or pd.isna(value) else float(value)
