"""Paths on the command line: what is there, and whether something can be written there.

A path that is not there is a wrong question (exit code 2), a file that is broken is an answer (1);
so presence is tested here, before a reader sees the file. Output paths are tested before any
work, so that a long simulation is not lost to a misspelt folder.

Read next: `minideepinfer/saving.py` (the files of a run).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi_shared.errors import ConfigError
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
    """Raise `ConfigError` unless `path` is there: a file, a pipe, or a folder."""
    try:
        there = path.exists()
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise ConfigError("path", str(path), f"cannot be read: {error.strerror}") from error
    if not there:
        raise ConfigError("path", str(path), "no such file")
    if path.is_dir() and not any(path.iterdir()):
        raise ConfigError("path", str(path), "is a folder without files")


def require_runs(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` unless each path names a run or one of its files."""
    for path in paths:
        if not is_run(path):
            require_input(path)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, whole or not at all, and say so."""
    from mdi_traces.io import atomic_file

    verb = "replaced" if path.exists() else "wrote"
    make_folder(path)
    with atomic_file(path) as file:
        file.write((json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    tell(f"{verb} {path}")


def require_output(name: str, path: Path, endings: tuple[str, ...] = ()) -> None:
    """Raise `ConfigError` unless a file `path` can be made, its folder included, with an ending."""
    if endings and not path.name.endswith(endings):
        raise ConfigError(name, str(path), f"must end in {', '.join(endings)}")
    if path.is_dir():
        raise ConfigError(name, str(path), "is a folder")
    require_folder(name, path.parent)


def require_folder(name: str, path: Path) -> None:
    """Raise `ConfigError` unless `path` is a folder, or one can be made there."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if there == path and not path.is_dir():
        raise ConfigError(name, str(path), "is a file, must be a folder")
    if not there.is_dir():
        raise ConfigError(name, str(path), f"{there} is a file, so no folder can be made in it")


def make_folder(path: Path) -> None:
    """Make the folder that a file will be written to. Raises `ConfigError` where it may not be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("path", str(path.parent), f"cannot be made: {error.strerror}") from error


def is_run(path: Path) -> bool:
    """Say whether `path` is a run: its prefix, or one of its files with its steps beside it."""
    from mdi_traces.run import run_prefix
    from minideepinfer.saving import RUN_ENDINGS, run_files

    try:
        if path.name.endswith(RUN_ENDINGS):
            return Path(run_prefix(path) + ".steps.parquet").exists()
        return not path.is_file() and bool(run_files(path))
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
        from mdi_traces.run import run_prefix

        path = Path(run_prefix(path) + ".requests.parquet")
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
