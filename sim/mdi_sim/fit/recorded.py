"""Runs to calibrate from: read, identified by hash, and refused when they do not belong together.

Nothing is fitted here. Every refusal is one line that names the file or the feature.

Read next: `calibrate.py`.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mdi_shared.errors import ConfigError, TraceError
from mdi_sim.fit.features import FEATURES, PREFILL, Steps
from mdi_traces.columns import ints
from mdi_traces.io import read_table
from mdi_traces.run import run_prefix
from mdi_traces.schema import METADATA_KEY, REQUESTS, SCHEMA_VERSION, STEPS, Metadata

FEWEST_STEPS = 30  # of a kind, those left out not counted
KEPT_OPTIONS = ("scheduler", "engine", "ranks", "provenance")
# What must vary to be told apart from a constant. Pairs follow from these; the fit drops the rest.
DECISIVE = {PREFILL: ("rows", "cached_rows", "n_seqs"), "decode": ("rows", "sum_k")}


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

    Raises `TraceError` when they cannot be read, have another schema version than today's (older
    ones lack host times), come from several ranks, or for `of_group` do not.
    """
    base = run_prefix(path)
    file = f"{base}.steps.parquet"
    table, metadata = read_table(file, STEPS)
    found = _stored_version(file)
    if found != SCHEMA_VERSION:
        raise TraceError(file, f"has schema version {found}, calibration needs {SCHEMA_VERSION}: "
                         "record or simulate the run again")  # fmt: skip
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
    requests, _ = read_table(f"{base}.requests.parquet", REQUESTS)
    return Recorded(Path(base).name, digest, table, requests, metadata)


def _stored_version(file: str) -> int:
    """Return the schema version in the file; readers bring tables up to today's."""
    version: int = json.loads(pq.read_schema(file).metadata[METADATA_KEY])["schema_version"]
    return version


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
