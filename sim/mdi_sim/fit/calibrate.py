"""Fits a step-time model to recorded or simulated runs: `calibrate(paths) -> LinearCost`.

The result is what `mdi simulate --cost` reads. It knows what it was fitted on: ranges of features,
the runs with their hashes, and its errors, on shapes held out, too.

Read next: `recorded.py`, `steps.py`, `host.py`, `diagnostics.py`,
docs/calibration.md.
"""

import os
from collections.abc import Sequence
from typing import Any

from mdi_shared.cost.linear import (
    DECODE_TERMS,
    PREFILL_TERMS,
    DecodeTerms,
    LinearCost,
    PrefillTerms,
)
from mdi_sim.fit.diagnostics import diagnose
from mdi_sim.fit.features import DECODE, PREFILL, gather_steps
from mdi_sim.fit.host import fit_host
from mdi_sim.fit.recorded import (
    Recorded,
    read_recorded,
    require_alike,
    require_informative,
)
from mdi_sim.fit.steps import fit_decode, fit_prefill
from mdi_traces.schema import this_generator

_UNIT_OF = {"const": "step", "rows": "row", "consumer_rows": "row", "sum_k": "token",
            "cached_rows": "token", "n_seqs": "sequence"}  # fmt: skip


def calibrate(
    paths: Sequence[str | os.PathLike[str]], *, allow_constant: bool = False
) -> LinearCost:
    """Fit a model to runs, each given by its prefix or one of its files.

    `allow_constant` fits although rows, lengths or sequences never vary; their range then says
    so. Raises `TraceError` for a run that cannot be used and `ConfigError` for runs that do not
    belong together or say too little.
    """
    return fit_runs([read_recorded(path) for path in paths], allow_constant=allow_constant)


def fit_runs(runs: Sequence[Recorded], *, allow_constant: bool = False) -> LinearCost:
    """Fit a model to runs already read; see `calibrate`."""
    require_alike(runs)
    tables = [run.steps for run in runs]
    prefill, decode = gather_steps(tables, PREFILL), gather_steps(tables, DECODE)
    for steps in (prefill, decode):
        require_informative(steps, allow_constant=allow_constant)
    fitted = fit_prefill(prefill), fit_decode(decode)
    host, host_report = fit_host([(run.steps, run.requests) for run in runs])
    first = runs[0].metadata
    prefill_terms, decode_terms = fitted[0].terms, fitted[1].terms
    assert isinstance(prefill_terms, PrefillTerms), "as fitted"
    assert isinstance(decode_terms, DecodeTerms), "as fitted"
    return LinearCost(
        prefill=prefill_terms,
        decode=decode_terms,
        prefill_ranges=prefill.ranges(),
        decode_ranges=decode.ranges(),
        host=host,
        fit={
            "generator": this_generator(),
            "hardware": first.hardware,
            "model": first.model,
            "source": first.source,
            "shape": first.config.get("shape"),
            "units": _units(),
            "traces": [run.describe() for run in runs],
            "prefill": diagnose(prefill, fitted[0]),
            "decode": diagnose(decode, fitted[1]),
            "host": host_report,
        },
    )


def _units() -> dict[str, Any]:
    """Return the unit of each coefficient."""
    return {
        "prefill": {**{name: _unit(name) for name in PREFILL_TERMS}, "base": "ns by rows"},
        "decode": {**{name: _unit(name) for name in DECODE_TERMS}, "graphs": "ns by rows"},
        "host": "ns per step; _per_seq: and sequence; _per_token: and prompt token",
    }


def _unit(name: str) -> str:
    return f"ns per {_UNIT_OF.get(name, 'pair')}"
