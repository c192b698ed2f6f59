"""Traces: what users asked for, what an engine did, and the files both are kept in.

Names are imported when first used, so that `import mdi_traces` costs next to nothing; pandas is
imported only by what returns a data frame. Running requests is the business of `mdi_sim` and
`mdi_exec`, metrics that of `mdi_analysis`.

Read next: `schema.py` (the tables), `requests.py`, `run.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi_traces.check import Finding, check_requests, check_run
    from mdi_traces.distributions import (
        ArrivalProcess,
        Burst,
        Constant,
        Fixed,
        Gamma,
        LengthDistribution,
        LogNormal,
        Mixture,
        OnOff,
        Poisson,
        Quantiles,
        Uniform,
        parse_arrivals,
        parse_lengths,
    )
    from mdi_traces.formats import FORMAT_NAMES, detect_format, load_requests
    from mdi_traces.generate import WORKLOADS, ChatSessions, Workload, generate_workload
    from mdi_traces.io import read_table, write_csv, write_jsonl, write_parquet
    from mdi_traces.pacing import due_note, require_bearable_waits, retime, unused_note
    from mdi_traces.requests import RequestTrace, validate_requests
    from mdi_traces.run import Run, load_run
    from mdi_traces.schema import (
        ITEM_SCHEMA,
        REQUEST_SCHEMA,
        SCHEMA_VERSION,
        STEP_SCHEMA,
        Metadata,
        describe_columns,
    )

__all__ = [
    "FORMAT_NAMES",
    "ITEM_SCHEMA",
    "REQUEST_SCHEMA",
    "SCHEMA_VERSION",
    "STEP_SCHEMA",
    "WORKLOADS",
    "ArrivalProcess",
    "Burst",
    "ChatSessions",
    "Constant",
    "Finding",
    "Fixed",
    "Gamma",
    "LengthDistribution",
    "LogNormal",
    "Metadata",
    "Mixture",
    "OnOff",
    "Poisson",
    "Quantiles",
    "RequestTrace",
    "Run",
    "Uniform",
    "Workload",
    "check_requests",
    "check_run",
    "describe_columns",
    "detect_format",
    "due_note",
    "generate_workload",
    "load_requests",
    "load_run",
    "parse_arrivals",
    "parse_lengths",
    "read_table",
    "require_bearable_waits",
    "retime",
    "unused_note",
    "validate_requests",
    "write_csv",
    "write_jsonl",
    "write_parquet",
]

_MODULES = {
    "check": "Finding check_requests check_run",
    "distributions": "ArrivalProcess Burst Constant Fixed Gamma LengthDistribution LogNormal "
    "Mixture OnOff Poisson Quantiles Uniform parse_arrivals parse_lengths",
    "formats": "FORMAT_NAMES detect_format load_requests",
    "generate": "WORKLOADS ChatSessions Workload generate_workload",
    "io": "read_table write_csv write_jsonl write_parquet",
    "pacing": "due_note require_bearable_waits retime unused_note",
    "requests": "RequestTrace validate_requests",
    "run": "Run load_run",
    "schema": "ITEM_SCHEMA REQUEST_SCHEMA SCHEMA_VERSION STEP_SCHEMA Metadata describe_columns",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
