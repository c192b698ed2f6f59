"""Step timings as data frames: a row per step with all known of it, or per step and request.

Columns of the step table keep their names (docs/trace-format.md); what is added is listed in
`STEP_COLUMNS` and `ITEM_COLUMNS` with its meaning. Times are ms. Nothing is judged here.

Read next: `step_roofline.py` (how fast a step could be), `step_reasons.py` (why it was slow).
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
    KINDS,
    NS_PER_MS,
    Bools,
    Floats,
    RunLike,
    floats,
    ints,
    is_kind,
    kind_codes,
    series,
)
from mdi_analysis.metrics import StepOrder
from mdi_analysis.step_roofline import run_shape, step_works
from mdi_analysis.step_times import device_ms, gap_ms, had_requests, host_times, in_order, optional
from mdi_analysis.usage import emitted_tokens
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.errors import TraceError
from mdi_traces.step_features import COLUMN_OF, is_compile, is_warm

# What `steps_frame` adds to the step table.
STEP_COLUMNS = {
    "rows": "n_tokens, under its name in the cost model",
    "consumer_rows": "n_consumer_rows, likewise",
    "cached_rows": "sum_k, likewise: context tokens the step can reach",
    "device_ms": "t_dev_end - t_dev_start",
    "gap_ms": "the device was idle before the step: recorded, else from the time marks",
    "had_requests": "the rank's step before left requests queued or running: a gap is the engine's",
    "plan_ms": "t_launch - t_sched: planning and laying out",
    "visible_ms": "t_done - t_dev_end; NaN where all rows were dropped",
    "turn_ms": "t_done since the rank's step before; NaN where that left no requests",
    "host_ms": "plan_ms + cpu_launch_ms + cpu_proc_ms, as far as recorded",
    "is_first": "first step of its kind or first use of its graph on the rank",
    "is_compile": "its launch took so long that the host must have compiled kernels",
    "emitted": "output tokens",
    "predicted_ms": "device time by the cost model, else the recorded pred_ms; NaN without either",
    "error": "predicted_ms / device_ms - 1",
    "extrapolated": "features outside what a fitted cost model has seen, with spaces between",
    "max_q": "most query rows of one sequence (from items)",
    "first_chunks": "requests that ran for the first time (from items)",
    "recomputed_rows": "prompt rows that had been computed before a preemption (from items)",
    "longest_req": "request with the longest context (from items)",
    "oldest_wait_ms": "longest wait from arrival to planning of a first chunk (items and requests)",
}

# What `step_items_frame` adds to the item table.
ITEM_COLUMNS = {
    "kind": "of the step",
    "t_sched": "of the step, ns",
    "t_done": "of the step, ns",
    "step_device_ms": "device time of the whole step",
    "share_ms": "of it by rows: step_device_ms * q / n_tokens",
    "is_first_chunk": "the request ran for the first time",
    "recomputed_rows": "rows of a prompt chunk that had been computed before a preemption",
    "arrival_ns": "of the request",
    "prompt_len": "of the request",
}


def columns_markdown(columns: Mapping[str, str]) -> str:
    """Return added columns as a Markdown table; docs/step-timings.md holds both."""
    lines = ["| column | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in columns.items())]) + "\n"


def steps_frame(
    run: RunLike,
    *,
    cost: StepCost | None = None,
    shape: ModelShape | None = None,
    items: bool = True,
) -> pd.DataFrame:
    """Return the step table with the `STEP_COLUMNS`, ordered by (rank, step).

    `cost` predicts the device times; it needs the model's dimensions, `shape`, where the run's
    metadata lack them. `items=False` leaves out what comes from the item table, which can be large;
    so does a run without items. Raises `TraceError` on a table that breaks the trace format and
    `ConfigError` when the dimensions are unknown or not the run's.
    """
    frame = run.steps.iloc[in_order(run.steps)].reset_index(drop=True)
    times = host_times(frame)
    added: dict[str, object] = {
        name: series(frame, "steps", column) for name, column in COLUMN_OF.items()
    }
    added["device_ms"] = device_ms(frame)
    added["gap_ms"] = gap_ms(frame)
    added["had_requests"] = had_requests(frame)
    added |= {name: times[name] for name in ("plan_ms", "visible_ms", "turn_ms")}
    rest = [np.nan_to_num(optional(frame, name)) for name in ("cpu_launch_ms", "cpu_proc_ms")]
    added["host_ms"] = times["plan_ms"] + sum(rest)
    added |= _first_uses(frame)
    added["emitted"] = emitted_tokens(frame)
    frame = frame.assign(**added)
    frame = frame.assign(**_predicted(run, frame, cost, shape))
    if items and run.items is not None:
        frame = frame.assign(**_from_items(step_items_frame(run), frame))
    return frame


def step_items_frame(run: RunLike) -> pd.DataFrame:
    """Return the item table with the `ITEM_COLUMNS`, ordered by (rank, step).

    Raises `TraceError` when the run has no items, or one whose step is not in the step table.
    """
    items = run.items
    if items is None:
        raise TraceError("items table", "absent: the run was saved without it")
    ordered = StepOrder(run.steps)
    at = ordered.find(ints(items, "items", "rank"), ints(items, "items", "step"))
    steps = run.steps.iloc[ordered.rows]
    per_step = pd.DataFrame({
        "kind": steps["kind"].to_numpy(), "t_sched": steps["t_sched"].to_numpy(),
        "t_done": steps["t_done"].to_numpy(), "step_device_ms": device_ms(steps),
        "n_tokens": steps["n_tokens"].to_numpy(),
    }).iloc[at]  # fmt: skip
    order = np.argsort(at, kind="stable")
    frame = pd.concat([items.reset_index(drop=True), per_step.reset_index(drop=True)], axis=1).iloc[
        order
    ]
    about = pd.DataFrame({
        name: series(run.requests, "requests", name)
        for name in ("req_id", "arrival_ns", "prompt_len")
    })  # fmt: skip
    frame = frame.astype({"req_id": str}).merge(
        about.astype({"req_id": str}), on="req_id", how="left", validate="many_to_one"
    )
    share = frame["q"] / frame["n_tokens"].where(frame["n_tokens"] > 0)
    return frame.drop(columns="n_tokens").assign(
        share_ms=frame["step_device_ms"] * share,
        is_first_chunk=~frame.duplicated("req_id"),
        recomputed_rows=_recomputed(frame),
    )


def per_kind_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per kind of step that occurs, from a `steps_frame`.

    Columns: `steps`, of them `compiling` (included in all that follows); `rows` and `n_seqs`
    (means); `device_*` as total, share, mean, p50, p90, p99 and max; medians of `host_ms` and
    `turn_ms`; `gap_p50` and `gap_p90` where the rank had requests; `rows_s`, rows per second of
    device time. With predictions `error_p50` and `error_p90` of their size, and `error_mean`,
    signed; with `roofline_position` joined `roofline_share`, the share of the device time that
    floors make up.
    """
    whole = float(np.nansum(frame["device_ms"]))
    kinds = kind_codes(frame)
    found = {
        kind: _kind_summary(frame[is_kind(kinds, kind)], whole)
        for kind in KINDS
        if is_kind(kinds, kind).any()
    }
    summary = pd.DataFrame.from_dict(found, orient="index")
    summary.index.name = "kind"
    return summary


def _kind_summary(mine: pd.DataFrame, whole_ms: float) -> dict[str, float]:
    device = mine["device_ms"]
    total = float(np.nansum(device))
    gaps = mine["gap_ms"].where(mine["had_requests"])
    row = {
        "steps": len(mine),
        "compiling": int(mine["is_compile"].sum()),
        "rows": float(mine["rows"].mean()),
        "n_seqs": float(mine["n_seqs"].mean()),
        "device_total_ms": total,
        "device_share": total / whole_ms if whole_ms > 0 else np.nan,
        "device_mean": float(device.mean()),
        **{f"device_p{p}": float(device.quantile(p / 100)) for p in (50, 90, 99)},
        "device_max": float(device.max()),
        "host_p50": float(mine["host_ms"].median()),
        "turn_p50": float(mine["turn_ms"].median()),
        "gap_p50": float(gaps.median()),
        "gap_p90": float(gaps.quantile(0.9)),
        "rows_s": float(mine["rows"].sum()) / total * 1e3 if total > 0 else np.nan,
    }
    error = mine["error"].dropna()
    if len(error):
        size = error.abs()
        row |= {"error_p50": float(size.median()), "error_p90": float(size.quantile(0.9)),
                "error_mean": float(error.mean())}  # fmt: skip
    if "floor_ms" in mine and total > 0:
        row["roofline_share"] = float(np.nansum(mine["floor_ms"])) / total
    return row


def _first_uses(frame: pd.DataFrame) -> dict[str, Bools]:
    first, compiles = np.zeros(len(frame), dtype=bool), np.zeros(len(frame), dtype=bool)
    graph = np.nan_to_num(optional(frame, "graph_size")).astype(np.int64)
    launch = optional(frame, "cpu_launch_ms")
    rank, kinds = ints(frame, "steps", "rank"), kind_codes(frame)
    has_rows = floats(frame, "steps", "n_tokens") > 0
    for kind in range(len(KINDS)):
        busy = (kinds == kind) & has_rows
        known = launch[busy & ~np.isnan(launch)]
        if known.size:
            # The lower middle: of two launches one may be the compiling one.
            usual = float(np.quantile(known, 0.5, method="lower"))
            compiles |= busy & is_compile(launch, usual)
        for one in np.unique(rank[busy]).tolist():
            own = busy & (rank == one)
            first |= own & ~is_warm(graph, own)
    return {"is_first": first, "is_compile": compiles}


def _predicted(
    run: RunLike, frame: pd.DataFrame, cost: StepCost | None, shape: ModelShape | None
) -> dict[str, object]:
    predicted = optional(frame, "pred_ms")
    outside = np.full(len(frame), "", dtype=object)
    if cost is not None:
        works = step_works(frame, shape if shape is not None else run_shape(run))
        predicted = np.array(
            [np.nan if work is None else cost.device_ns(work) / NS_PER_MS for work in works]
        )
        if isinstance(cost, LinearCost):
            outside[:] = ["" if w is None else " ".join(cost.extrapolated(w)) for w in works]
    device = frame["device_ms"].to_numpy()
    error = np.full(len(frame), np.nan)
    np.divide(predicted, device, out=error, where=device > 0)
    return {"predicted_ms": predicted, "error": error - 1, "extrapolated": outside}


def _from_items(items: pd.DataFrame, frame: pd.DataFrame) -> dict[str, object]:
    """Return the columns that sum up the items of each step, in the order of `frame`."""
    first = items[items["is_first_chunk"]]
    waited = (first["t_sched"] - first["arrival_ns"]) / NS_PER_MS
    keys = ["rank", "step"]
    by_step = items.groupby(keys, sort=False)
    longest = items.loc[by_step["k"].idxmax(), [*keys, "req_id"]].set_index(keys)["req_id"]
    columns = {
        "max_q": by_step["q"].max(),
        "first_chunks": by_step["is_first_chunk"].sum(),
        "recomputed_rows": by_step["recomputed_rows"].sum(),
        "longest_req": longest,
        "oldest_wait_ms": waited.groupby([first[key] for key in keys]).max(),
    }
    index = pd.MultiIndex.from_frame(frame[keys])
    return {name: column.reindex(index).to_numpy() for name, column in columns.items()}


def _recomputed(frame: pd.DataFrame) -> Floats:
    """Return the rows of each prompt chunk that lie below what its request had reached before."""
    reached = frame.groupby("req_id", sort=False)["k"].cummax()
    before = reached.groupby(frame["req_id"], sort=False).shift(fill_value=0)
    again = (np.minimum(frame["k"], before) - (frame["k"] - frame["q"])).clip(lower=0)
    prompt = series(frame, "items", "kind").isin(["prefill", "mixed"]).to_numpy()
    rows: Floats = np.where(prompt, again, 0)
    return rows
