"""Fits a step-time model to recorded or simulated runs: `calibrate(paths) -> LinearCost`.

The result is what `mdi simulate --cost` reads. It knows what it was fitted on: ranges of features,
the runs with their hashes, and its errors, on recordings and shapes held out, too. Runs that do not
belong together or say too little are refused in one line that names the file or the feature.

Read next: `features.py` (what is fitted), `steps.py`, `host.py`, `diagnostics.py`,
docs/calibration.md.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mdi_shared.cost.linear import (
    DECODE_TERMS,
    PREFILL_TERMS,
    DecodeTerms,
    LinearCost,
    PrefillTerms,
)
from mdi_shared.errors import ConfigError, TraceError
from mdi_sim.fit.diagnostics import FOLDS, OnFit, diagnose
from mdi_sim.fit.features import DECODE, FEATURES, PREFILL, Steps, gather_steps
from mdi_sim.fit.host import fit_host
from mdi_sim.fit.steps import fit_steps
from mdi_traces.columns import ints
from mdi_traces.io import read_table
from mdi_traces.saving import RUN_ENDINGS, run_files, run_prefix
from mdi_traces.schema import (
    ADDED_COLUMNS,
    METADATA_KEY,
    REQUESTS,
    STEPS,
    Metadata,
    this_generator,
)

FEWEST_STEPS = 30  # of a kind, those left out not counted
KEPT_OPTIONS = ("scheduler", "engine", "ranks", "provenance")
# What must vary to be told apart from a constant. Pairs follow from these; the fit drops the rest.
DECISIVE = {PREFILL: ("rows", "cached_rows", "n_seqs"), DECODE: ("rows", "sum_k")}
_HOST_TIMES_SINCE = ADDED_COLUMNS[STEPS]["gap_ms"]
_UNIT_OF = {"const": "step", "rows": "row", "consumer_rows": "row", "sum_k": "token",
            "cached_rows": "token", "n_seqs": "sequence"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run's steps and requests.

    `name` is the run's, without its folder; `sha256` is the step file's.
    """

    name: str
    sha256: str
    steps: pa.Table
    requests: pa.Table
    metadata: Metadata

    def describe(self) -> dict[str, Any]:
        """Return where the run comes from, JSON-able."""
        about = self.metadata
        return {
            "name": self.name,
            "sha256": self.sha256,
            "source": about.source,
            "hardware": about.hardware,
            "model": about.model,
            "generator": about.generator,
            "steps": len(self.steps),
            "options": {key: about.config[key] for key in KEPT_OPTIONS if key in about.config},
        }


def read_recorded(path: str | os.PathLike[str], *, of_group: bool = False) -> Recorded:
    """Read the steps and requests of a run, given its prefix or one of its files.

    Raises `TraceError` when they cannot be read, have a schema version that lacks host times, come
    from several ranks, or for `of_group` do not.
    """
    base, files = run_prefix(path), run_files(path)
    file = str(files.get(STEPS, f"{base}{RUN_ENDINGS[STEPS]}"))
    table, metadata = read_table(file, STEPS)
    version = json.loads(pq.read_schema(file).metadata[METADATA_KEY])["schema_version"]
    if version < _HOST_TIMES_SINCE:  # `read_table` has added columns, without values
        raise TraceError(file, f"has schema version {version}, calibration needs "
                         f"{_HOST_TIMES_SINCE}: record or simulate the run again")  # fmt: skip
    if not len(table):
        raise TraceError(file, "holds no steps")
    has_several = int(ints(table["rank"]).max()) > 0
    if has_several and not of_group:
        raise TraceError(file, "has several ranks, whose steps wait for each other: calibrate "
                         "from runs of one rank, then fit the group with --base")  # fmt: skip
    if of_group and not has_several:
        raise TraceError(file, "is of one rank: what a group adds (--base) is fitted to runs of "
                         "several")  # fmt: skip
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    requests, _ = read_table(files.get(REQUESTS, f"{base}{RUN_ENDINGS[REQUESTS]}"), REQUESTS)
    return Recorded(Path(base).name, digest, table, requests, metadata)


def require_alike(runs: Sequence[Recorded]) -> None:
    """Raise `ConfigError` for no runs, a run given twice, or unlike hardware, model or source."""
    if not runs:
        raise ConfigError("traces", [], "give at least one run")
    first = runs[0]
    seen: dict[str, str] = {}
    for run in runs:
        if run.sha256 in seen:
            raise ConfigError("traces", run.name, f"is the same run as {seen[run.sha256]}")
        seen[run.sha256] = run.name
        for what in ("hardware", "model", "source"):
            ours, theirs = getattr(first.metadata, what), getattr(run.metadata, what)
            if ours != theirs:
                raise ConfigError(what, theirs, f"of {run.name} differs from {ours!r} of "
                                  f"{first.name}: one model holds for one {what}")  # fmt: skip
        shapes = [each.metadata.config.get("shape") for each in (first, run)]
        if shapes[0] != shapes[1]:
            raise ConfigError("model", run.metadata.model, f"of {run.name} has other dimensions "
                              f"or replay options than that of {first.name}")  # fmt: skip


def recordings(runs: Sequence[Recorded]) -> list[int]:
    """Return a number for each run, the same for runs of the same requests.

    What one of these has seen, the others have: whoever holds out one must hold out all.
    """
    served = [[run.requests[name] for name in ("prompt_len", "max_tokens")] for run in runs]
    return [next(i for i, other in enumerate(served)
                 if all(a.equals(b) for a, b in zip(own, other, strict=True)))
            for own in served]  # fmt: skip


def require_informative(steps: Steps, *, allow_constant: bool) -> None:
    """Raise `ConfigError` when steps of a kind are too few, or vary too little to be fitted."""
    if len(steps) < FEWEST_STEPS:
        left_out = ", ".join(f"{count} left out: {why}" for why, count in steps.left_out.items())
        raise ConfigError(f"{steps.kind} steps", len(steps), f"at least {FEWEST_STEPS} are needed"
                          + (f" ({left_out})" if left_out else ""))  # fmt: skip
    for i, name in enumerate(FEATURES[steps.kind]):
        if name in DECISIVE[steps.kind] and np.ptp(steps.x[:, i]) == 0 and not allow_constant:
            raise ConfigError(f"{steps.kind}.{name}", int(steps.x[0, i]), f"is the same in all "
                              f"{len(steps)} steps: what it costs cannot be told; add runs where "
                              "it differs, or allow constant features")  # fmt: skip


def calibrate(
    paths: Sequence[str | os.PathLike[str]], *, allow_constant: bool = False
) -> LinearCost:
    """Fit a model to runs, each given by its prefix or one of its files.

    `allow_constant` fits although rows, lengths or sequences never vary; their range then says
    so. Raises `TraceError` for a run that cannot be used and `ConfigError` for runs that do not
    belong together or say too little.
    """
    return fit_runs([read_recorded(path) for path in paths], allow_constant=allow_constant)


def number_of_fits(runs: Sequence[Recorded]) -> int:
    """Return how many fits `fit_runs` makes at most: of both kinds, one for each part held out."""
    return 2 * (len(set(recordings(runs))) + FOLDS + 1)


def fit_runs(
    runs: Sequence[Recorded],
    *,
    allow_constant: bool = False,
    judged: bool = True,
    on_fit: OnFit = None,
) -> LinearCost:
    """Fit a model to runs already read; see `calibrate`.

    Without `judged` the model states no errors, which takes a fifth of the time. `on_fit` is called
    with 1 behind each fit.
    """
    require_alike(runs)
    tables = [run.steps for run in runs]
    gathered = {kind: gather_steps(tables, kind) for kind in (PREFILL, DECODE)}
    for steps in gathered.values():
        require_informative(steps, allow_constant=allow_constant)
    fitted = {kind: fit_steps(steps) for kind, steps in gathered.items()}
    host, host_report = fit_host([(run.steps, run.requests) for run in runs])
    first, numbers = runs[0].metadata, np.array(recordings(runs))
    return LinearCost(
        prefill=cast("PrefillTerms", fitted[PREFILL].terms),
        decode=cast("DecodeTerms", fitted[DECODE].terms),
        prefill_ranges=gathered[PREFILL].ranges(),
        decode_ranges=gathered[DECODE].ranges(),
        host=host,
        fit={
            "generator": this_generator(),
            "hardware": first.hardware,
            "model": first.model,
            "source": first.source,
            "shape": first.config.get("shape"),
            "units": _units(),
            "traces": [run.describe() for run in runs],
            **({kind: diagnose(steps, fitted[kind], numbers[steps.run], on_fit)
                for kind, steps in gathered.items()} if judged else {}),
            "host": host_report,
        },
    )  # fmt: skip


def _units() -> dict[str, Any]:
    """Return the unit of each coefficient."""
    return {
        "prefill": {**{name: _unit(name) for name in PREFILL_TERMS}, "base": "ns by rows"},
        "decode": {**{name: _unit(name) for name in DECODE_TERMS}, "graphs": "ns by rows"},
        "host": "ns per step; _per_seq: and sequence; _per_token: and prompt token",
    }


def _unit(name: str) -> str:
    return f"ns per {_UNIT_OF.get(name, 'pair')}"
