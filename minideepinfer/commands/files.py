"""Paths on the command line: what is there, and whether something can be written there.

A path that is not there is a wrong question (exit code 2), a file that is broken is an answer (1);
so presence is tested here, before a reader sees the file. Output paths are tested before any
work, so that a long simulation is not lost to a misspelt folder.

Read next: `mdi_traces/saving.py` (how files take their place).
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi_shared.errors import ConfigError, SaveError
from minideepinfer.commands.screen import tell

if TYPE_CHECKING:
    from mdi_traces.requests import RequestTrace
    from mdi_traces.run import Run

TRACE_ENDINGS = (".parquet", ".jsonl", ".csv")


def require_input(path: Path) -> None:
    """Raise `ConfigError` unless `path` is a file."""
    require_present(path)
    if path.is_dir():
        raise ConfigError("path", str(path), "is a folder, not a file")


def require_present(path: Path) -> None:
    """Raise `ConfigError` unless `path` is there and may be read: a file, a pipe, or a folder."""
    with looking("path", path):
        if not path.exists():
            raise ConfigError("path", str(path), "no such file")
        if path.is_dir() and not any(path.iterdir()):
            raise ConfigError("path", str(path), "is a folder without files")
        if not os.access(path, os.R_OK):
            raise ConfigError("path", str(path), "may not be read: no permission")


@contextmanager
def looking(name: str, path: Path) -> Iterator[None]:
    """Turn what the system refuses while it is asked about `path` into a `ConfigError`."""
    try:
        yield
    except (OSError, ValueError) as error:  # a name too long or with a NUL, a closed folder
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(name, str(path), f"cannot be looked at: {reason}") from error


def require_runs(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` unless each path names a run or one of its files."""
    for path in paths:
        if not is_run(path):
            require_input(path)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, whole or not at all, and say so."""
    from mdi_traces.saving import atomic_file

    verb = "replaced" if path.exists() else "wrote"
    make_folder(path)
    with atomic_file(path) as file:
        file.write((json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    tell(f"{verb} {path}")


def require_output(name: str, path: Path, endings: tuple[str, ...] = ()) -> None:
    """Raise `ConfigError` unless a file `path` can be made, its folder included, with an ending."""
    if endings and not path.name.endswith(endings):
        raise ConfigError(name, str(path), f"must end in {', '.join(endings)}")
    with looking(name, path):
        if path.is_dir():
            raise ConfigError(name, str(path), "is a folder")
        if path.exists() and not path.is_file():
            raise ConfigError(name, str(path), "is a device or a pipe, not a file")
    require_folder(name, path.parent)


def require_run_output(name: str, prefix: Path) -> None:
    """Raise `ConfigError` unless a run can be saved as `prefix`, its folder included."""
    from mdi_traces.saving import require_prefix

    try:
        base = require_prefix(prefix)
    except SaveError as error:
        raise ConfigError(name, str(prefix), error.problem) from error
    require_folder(name, base.parent)


def require_folder(name: str, path: Path) -> None:
    """Raise `ConfigError` unless `path` is a folder, or one can be made there."""
    with looking(name, path):
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if there == path and not path.is_dir():
            raise ConfigError(name, str(path), "is a file, must be a folder")
        if not there.is_dir():
            raise ConfigError(name, str(path), f"{there} is a file, so no folder can be made in it")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(name, str(path), "no file can be made there: no permission, or "
                              "read-only")  # fmt: skip


def make_folder(path: Path) -> None:
    """Make the folder that a file will be written to. Raises `ConfigError` where it may not be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("path", str(path.parent), f"cannot be made: {error.strerror}") from error


def is_run(path: Path) -> bool:
    """Say whether `path` is a run: its prefix, or one of its files with its steps beside it."""
    from mdi_traces.saving import RUN_ENDINGS, run_files
    from mdi_traces.schema import STEPS

    try:
        found = run_files(path)
        if path.name.endswith(tuple(RUN_ENDINGS.values())):
            return STEPS in found
        return not path.is_file() and bool(found)
    except OSError:  # `require_present` says why it cannot be looked at
        return False


def read_run(path: Path) -> "Run":
    """Read a run by its prefix or one of its files. Raises `ConfigError` when there is none."""
    from mdi_traces.run import load_run

    if not is_run(path):
        require_input(path)
        raise ConfigError("path", str(path), "is not a run: give its prefix or one of its files, "
                          "PREFIX.steps.parquet and so on")  # fmt: skip
    return load_run(path)


def read_requests(
    path: Path,
    *,
    format: str | None = None,
    limit: int | None = None,
    sort: bool = False,
    arrivals: str | None = None,
    seed: int = 0,
    closed_loop: bool = False,
) -> "RequestTrace":
    """Read a request trace as `load_requests` does, or the requests of a run by its prefix.

    The path may be a file, a pipe, or a folder of files that are one trace. `arrivals` is a text
    such as `poisson:5`.
    """
    from mdi_traces.distributions import parse_arrivals
    from mdi_traces.formats import load_requests

    if is_run(path):
        from mdi_traces.saving import run_files
        from mdi_traces.schema import REQUESTS

        path = run_files(path).get(REQUESTS, path)
    require_present(path)
    process = None if arrivals is None else parse_arrivals(arrivals)
    try:
        return load_requests(
            path, format=format, limit=limit, sort=sort, arrivals=process, seed=seed,
            closed_loop=closed_loop,
        )  # fmt: skip
    except ConfigError as error:
        if error.field != "arrivals" or arrivals is not None:
            raise
        raise ConfigError("arrivals", None, f"{path} has no arrival times: give some, such as "
                          "--arrivals poisson:5") from error  # fmt: skip
