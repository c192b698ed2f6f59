"""Facts of a trace file as plain data: rows, columns, lengths, time span. Nothing is printed.

Read next: `show.py`, which prints them.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from mdi_shared.config import SchedulerConfig

if TYPE_CHECKING:
    import pyarrow as pa

    from mdi_traces.requests import RequestTrace
    from mdi_traces.run import Run
    from mdi_traces.schema import Metadata

LENGTHS = ("prompt_len", "output_len", "cached_len")
PERCENTILES = (50, 90, 99)
NS_PER_S = 1e9
# In the order of a step's life; the device's three run beside the host's.
STEP_TIMES = (
    "ingress_ms", "cpu_sched_ms", "cpu_prep_ms", "cpu_launch_ms", "gap_ms", "fwd_ms", "sample_ms",
    "cpu_proc_ms",
)  # fmt: skip


def origin(metadata: "Metadata") -> dict[str, Any]:
    """Return what is known of a table's origin; the scheduler's options where not default."""
    facts = {name: value for name, value in asdict(metadata).items()
             if value not in (None, (), {}) and name not in ("table", "config")}  # fmt: skip
    config = dict(metadata.config)
    scheduler = config.pop("scheduler", None)
    # Told by the label, by the summary's first line, by the model's name; of use to the laws only.
    for name in ("cost", "assumed", "shape", "left_free"):
        config.pop(name, None)
    if isinstance(scheduler, Mapping):
        facts["scheduler"] = unusual_options(scheduler)
    return facts | config


def unusual_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheduler options that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(SchedulerConfig)}
    return {name: v for name, v in options.items() if name not in defaults or v != defaults[name]}


def columns(table: "pa.Table", kind: str) -> list[dict[str, str]]:
    """Return name, type, unit and meaning of the columns that hold values."""
    from mdi_traces.schema import describe_columns

    return [
        {"name": name, "type": type_, "unit": unit, "meaning": meaning}
        for name, type_, unit, meaning in describe_columns(kind)
        if table[name].null_count < len(table)
    ]


def request_statistics(trace: "RequestTrace") -> dict[str, Any]:
    """Return the span of the arrivals, s, their rate, sessions, and lengths in tokens."""
    from mdi_traces.columns import codes, ints, valid_rows

    table = trace.table
    arrival = ints(table["arrival_ns"])
    span_s = float(arrival[-1] - arrival[0]) / NS_PER_S
    return {
        "first_arrival_s": float(arrival[0]) / NS_PER_S,
        "span_s": span_s,
        "requests_per_s": len(trace) / span_s if span_s > 0 else None,
        "sessions": len(codes(table["session_id"])[1]),
        "turns_that_wait": int(valid_rows(table["think_ns"]).sum()),
        "tokens": {name: lengths(table, name) for name in LENGTHS},
    }


def lengths(table: "pa.Table", name: str) -> dict[str, float]:
    """Return total, mean, percentiles and extremes of a column of lengths, tokens."""
    import numpy as np

    from mdi_traces.columns import ints

    values = ints(table[name])
    middle = np.percentile(values, PERCENTILES).tolist()
    return {
        "total": int(values.sum()),
        "mean": float(values.mean()),
        "min": int(values.min()),
        **{f"p{p}": value for p, value in zip(PERCENTILES, middle, strict=True)},
        "max": int(values.max()),
    }


def head_rows(table: "pa.Table", count: int) -> list[dict[str, Any]]:
    """Return the first rows without what is null or not measured (NaN)."""
    rows = table.slice(0, count).to_pylist()
    return [
        {name: v for name, v in row.items() if v is not None and v == v}  # NaN is not itself
        for row in rows
    ]


def step_times(steps: "pa.Table") -> dict[str, dict[str, float]]:
    """Return the median of each time of a real run's steps, ms, by kind of step.

    Empty for a run without host times: a simulated one, or one of an older schema.
    """
    import numpy as np

    from mdi_traces.columns import codes, floats

    if steps["cpu_prep_ms"].null_count == len(steps):
        return {}
    kind_of, kinds = codes(steps["kind"])
    times = {name: floats(steps[name]) for name in STEP_TIMES}
    found = {}
    for code, kind in enumerate(kinds):
        mine = {
            name: values[(kind_of == code) & ~np.isnan(values)] for name, values in times.items()
        }
        found[kind] = {name: float(np.median(v)) for name, v in mine.items() if len(v)}
    return {kind: medians for kind, medians in found.items() if medians}


def slowest_steps(run: "Run", count: int) -> list[dict[str, Any]]:
    """Return the steps that held the devices longest, and why; what is not known is left out."""
    from mdi_analysis import slowest_steps as slowest
    from mdi_analysis import steps_frame
    from mdi_analysis.report import plain

    rows = plain(slowest(steps_frame(run, items=False), count).to_dict("records"))
    return [{name: value for name, value in row.items() if value is not None} for row in rows]
