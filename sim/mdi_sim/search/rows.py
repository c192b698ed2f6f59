"""The result table of a lab or a capacity search: one row per run, as columns with units.

A row says what was run (`IDENTITY`), how it came out (`MEASURES`), or why it did not (`error`; all
measures are null then). `description` holds the whole run as JSON: `RunDescription.from_json`
reads it. Rows of equal `key` are equal but for `wall_s`. Times are virtual; "all ranks" means that
a figure is summed over them. A measure that does not exist in a run is null.

The file is `FOLDER/lab.parquet`. Its metadata (key `mdi_lab`, JSON) names the policies, loads and
so on in the order they were given, the first of each being what the others are compared with.
`columns_markdown()` is the table in docs/lab.md, and a test keeps the two equal.

Read next: `store.py` (where rows are kept one by one), `statistics.py` (what is made of them),
`mdi_analysis/definitions.py` and `mdi_analysis/fairness.py` (the definitions).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mdi_shared.errors import ConfigError
from mdi_traces.saving import atomic_file

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]  # a value for each of COLUMNS, JSON-able
_Column = tuple[str, pa.DataType, str, str]  # name, type, unit, meaning

PLAN_KEY = b"mdi_lab"
FILE_NAME = "lab.parquet"
_TEXT, _I64, _F64 = pa.string(), pa.int64(), pa.float64()
LATENCY_NAMES = ("ttft", "tpot", "itl", "e2e", "queue")
STATISTICS = ("mean", "p50", "p90", "p99", "max")
SIZE_CLASSES = ("small", "medium", "large")

IDENTITY: tuple[_Column, ...] = (
    ("key", _TEXT, "", "SHA-256 of trace content, run description, bounds and code: equal key, "
     "equal result"),
    ("trace", _TEXT, "", "workload preset or trace, as named in the lab"),
    ("trace_hash", _TEXT, "", "SHA-256 of the trace's files; `preset NAME` for a workload"),
    ("load", _TEXT, "", "`as recorded`, `rate=6`, `speed=2`, `arrivals=poisson:6`"),
    ("setting", _TEXT, "", "name of the setting; `default` where nothing is changed"),
    ("placement", _TEXT, "", "which rank gets a request"),
    ("policy", _TEXT, "", "scheduling policy, a specification as in docs/policies.md"),
    ("seed", _I64, "", "replicate: equal seeds of one trace and load are equal workloads"),
    ("slo", _TEXT, "", "per-request bounds of `goodput_*`; null = completing is enough"),
    ("description", _TEXT, "", "the whole run, JSON; `RunDescription.from_json` reads it"),
    ("code", _TEXT, "", "SHA-256 of the simulator's source"),
    ("error", _TEXT, "", "why there is no result, one line; null = there is one"),
    ("wall_s", _F64, "s", "real time of the simulation"),
)  # fmt: skip


def _latencies() -> Iterable[_Column]:
    meanings = {
        "ttft": "arrival to first token", "tpot": "per output token after the first",
        "itl": "gap between visible moments of a request", "e2e": "arrival to finish",
        "queue": "arrival to first planned",
    }  # fmt: skip
    for name, meaning in meanings.items():
        for statistic in STATISTICS:
            yield (f"{name}_ms_{statistic}", _F64, "ms", f"{meaning}; completed requests")


def _slowdowns() -> Iterable[_Column]:
    yield (
        "slowdown_mean",
        _F64,
        "1",
        "e2e over the least that the request takes alone on the devices",
    )
    yield ("slowdown_p99", _F64, "1", "the same at P99")
    for name, which in zip(SIZE_CLASSES, ("at most P50", "P50 to P90", "above P90"), strict=True):
        yield (f"slowdown_{name}_mean", _F64, "1", f"of requests whose least time alone is {which}")


def _bounds() -> Iterable[_Column]:
    for name in ("ttft", "e2e"):
        yield (f"{name}_over_bound", _F64, "1", f"{name}_ms_mean over the least that any policy "
               "could reach for the requests that completed; at least 1")  # fmt: skip
    yield ("span_over_bound", _F64, "1", "span_s over the least makespan of these; at least 1")


MEASURES: tuple[_Column, ...] = (
    ("requests", _I64, "requests", "that arrived"),
    ("completed", _I64, "requests", "that were served to their end"),
    ("rejected", _I64, "requests", "that the engine refused"),
    ("unfinished", _I64, "requests", "open or aborted when the run ended"),
    ("offered_req_s", _F64, "1/s", "requests over the span of their arrivals, as served"),
    ("span_s", _F64, "s", "first arrival to last output"),
    *_latencies(),
    *_slowdowns(),
    *_bounds(),
    ("input_tok_s", _F64, "tokens/s", "prompt tokens processed, recomputed ones left out, all "
     "ranks"),
    ("output_tok_s", _F64, "tokens/s", "tokens put out, all ranks"),
    ("requests_s", _F64, "1/s", "completed requests over the span"),
    ("goodput_share", _F64, "1", "requests that completed within the per-request bounds of `slo`, "
     "of all"),
    ("goodput_s", _F64, "1/s", "the same over the span"),
    ("within_ttft_share", _F64, "1", "requests that completed within that bound of `slo` alone; "
     "null without one"),
    ("within_tpot_share", _F64, "1", "the same for TPOT"),
    ("within_e2e_share", _F64, "1", "the same for end-to-end latency"),
    ("clients", _I64, "", "clients that the trace names"),
    ("jain", _F64, "1", "Jain's index of the clients' service rates while they are backlogged; "
     "1 is even, null without two backlogged clients"),
    ("service_gap", _F64, "tokens", "largest difference of service that two clients got while "
     "both were backlogged (prompt tokens 1, output tokens 2); null without two"),
    ("longest_wait_s", _F64, "s", "longest wait for a first token; open requests wait until the "
     "run's end"),
    ("preemptions", _I64, "", "sequences that lost their blocks"),
    ("recomputed_tokens", _I64, "tokens", "computed again after a preemption"),
    ("recomputed_share", _F64, "1", "the same over all prompt tokens computed"),
    ("kv_occupancy_mean", _F64, "1", "share of KV blocks in use, time-weighted"),
    ("kv_occupancy_max", _F64, "1", "the same at most"),
    ("steps", _I64, "steps", "of all ranks"),
    ("prefill_share", _F64, "1", "device time of prefill steps over that of all"),
    ("rank_imbalance", _F64, "1", "busiest rank over the mean, device time"),
    ("vote_wait_share", _F64, "1", "share of the time to first token that only votes held up"),
    ("extrapolated_share", _F64, "1", "steps outside what a fitted step-time model has seen; null "
     "for another model"),
)  # fmt: skip
COLUMNS = (*IDENTITY, *MEASURES)
SCHEMA = pa.schema(
    pa.field(name, dtype, metadata={"unit": unit, "meaning": meaning})
    for name, dtype, unit, meaning in COLUMNS
)
MEASURE_NAMES = tuple(name for name, *_ in MEASURES)


def save_rows(path: Path, rows: Iterable[Row], plan: Mapping[str, Any]) -> None:
    """Write the table and the plan it follows, whole or not at all. Raises `SaveError`."""
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    table = table.replace_schema_metadata({PLAN_KEY: json.dumps(plan, sort_keys=True).encode()})
    with atomic_file(path) as file:
        pq.write_table(table, file)


def load_rows(path: Path) -> tuple["pd.DataFrame", dict[str, Any]]:
    """Return a saved table, and the plan it follows. Raises `ConfigError` for another file."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError("lab", str(path), f"cannot be read: {problem}") from error
    metadata = table.schema.metadata or {}
    if PLAN_KEY not in metadata or table.schema.names != SCHEMA.names:
        raise ConfigError("lab", str(path), "is no result of mdi lab of this version")
    return table.to_pandas(), json.loads(metadata[PLAN_KEY])


def rows_frame(rows: Iterable[Row]) -> "pd.DataFrame":
    """Return rows as a data frame with all columns; numbers that do not exist are NaN."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA).to_pandas()


def columns_markdown() -> str:
    """Return the columns as a Markdown table, as docs/lab.md shows them."""
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {dtype} | {unit} | {meaning} |"
              for name, dtype, unit, meaning in COLUMNS]  # fmt: skip
    return "\n".join(lines) + "\n"
