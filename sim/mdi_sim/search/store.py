"""Results of runs by content, one file each: what was computed once is never computed again.

A run is a pure function of its trace, its description, the bounds it is held to and the code; the
SHA-256 of these names its file, `FOLDER/runs/ab/abcdef….json`. Files appear whole or not at all,
so a killed lab goes on where it was, and several processes or machines may share a folder: the
worst that happens is that two compute the same row.

Read next: `rows.py` (what a row holds), `lab.py` (who asks).
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mdi_shared.errors import ConfigError
from mdi_shared.json_input import parse_json
from mdi_shared.run_description import RunDescription
from mdi_sim.search.rows import SCHEMA, Row
from mdi_traces.saving import atomic_file, run_files
from mdi_traces.schema import REQUESTS

PACKAGES = ("mdi_shared", "mdi_sim", "mdi_traces", "mdi_analysis", "minideepinfer")


class Store:
    """Rows by key in a folder, which is made with the first row."""

    def __init__(self, folder: Path) -> None:
        self._runs = folder / "runs"

    def get(self, key: str) -> Row | None:
        """Return the row of a run; None when there is none, or none that can be read."""
        try:
            found = parse_json(self._path(key).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.keys() != set(SCHEMA.names):
            return None
        return found if found["key"] == key else None

    def put(self, row: Row) -> None:
        """Keep a row. Raises `SaveError`, or `ConfigError` where no folder can be made."""
        path = self._path(row["key"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be made: {error.strerror}"
            raise ConfigError("out", str(path.parent), problem) from error
        with atomic_file(path) as file:
            file.write(json.dumps(row, allow_nan=False).encode())

    def _path(self, key: str) -> Path:
        return self._runs / key[:2] / f"{key}.json"


def run_key(run: RunDescription, trace_hash: str, slo: str | None) -> str:
    """Return the name of a result: equal inputs, equal key, wherever the trace's file lies."""
    described = run.to_json()
    del described["assumed"]  # words
    described["served"] = {**described["served"], "trace": None}
    parts = {"run": described, "trace": trace_hash, "slo": slo, "code": code_hash()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Return the SHA-256 of all source that a result may depend on."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None, "this package has its neighbours"
        for folder in map(Path, spec.submodule_search_locations or ()):
            for path in sorted(folder.rglob("*.py")):
                name = path.relative_to(folder)
                digest.update(f"{package}/{name.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def trace_hash(path: str) -> str:
    """Return the SHA-256 of a trace: a file, all files of a folder, or the requests of a run.

    Raises `ConfigError` for what is not there, cannot be read, or can be read only once.
    """
    try:
        files = _files(Path(path))
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(
                "traces", path, "is no workload preset, no file, no folder of files and no run"
            )
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except (OSError, ValueError) as error:  # a folder that is closed, a name with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("traces", path, f"cannot be read: {reason}") from error
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    if path.exists():
        return [path]
    found = run_files(path)
    return [found[REQUESTS]] if REQUESTS in found else []


def described_json(run: RunDescription) -> str:
    """Return a description as one line of JSON with sorted keys."""
    document: Mapping[str, Any] = run.to_json()
    return json.dumps(document, sort_keys=True)
