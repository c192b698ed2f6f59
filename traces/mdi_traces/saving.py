"""Puts files in place as wholes: at every instant a name stands for the old content or the new.

A single file is written beside its name, synced, and renamed. The files of a run change together:
they are written into a folder beside it, and renaming that folder to `.NAME.switch` is the instant
at which the new run replaces the old one; its files then move to their own names, and
`run_files` finds each where it is meanwhile. A killed program leaves a file or folder that ends in
`.partial`; the next save in that folder removes it. Only POSIX tells whether a program lives and
lets a folder be synced.

Read next: `run.py` (who saves and loads runs), `io.py` (who writes files).
"""

import errno
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from mdi_shared.errors import SaveError
from mdi_traces.schema import ITEMS, REQUESTS, STEPS

# Requests last: its presence means that the run is complete.
RUN_ENDINGS = {ITEMS: ".items.parquet", STEPS: ".steps.parquet", REQUESTS: ".requests.parquet"}
_OTHERS_SAVES = 5  # of the same run at the same time, before one gives up
_LEFTOVER = re.compile(r"\..*~(?P<host>[^~]*)~(?P<pid>\d+)~\d+\.partial")
_HOST = re.sub(r"[^\w.-]", "", platform.node())[:60]
_serial = count()


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends without an error.

    Otherwise `path` stays as it was and nothing is left behind. Raises `SaveError` when the
    system refuses to write there.
    """
    target = Path(path)
    with _saving(target), _beside(target) as temp:
        with temp.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temp.replace(target)
        _sync_folder(target.parent)


@contextmanager
def replacing_run(prefix: str | os.PathLike[str]) -> Iterator[Callable[[str], Path]]:
    """Write a run's tables, each where the function that this gives says for its kind.

    When the block ends without an error they are the run `prefix`, all at the same instant; a
    table that was not written is not in it. Otherwise an earlier run stays as it was. Makes the
    folder. Raises `SaveError` when the system refuses, and for a prefix that can be none.
    """
    base = require_prefix(prefix)
    with _saving(base):
        base.parent.mkdir(parents=True, exist_ok=True)
        _finish_switch(base)  # of a program that was killed
        with _beside(base) as folder:
            folder.mkdir()
            places = {kind: folder / (base.name + ending) for kind, ending in RUN_ENDINGS.items()}
            try:
                yield places.__getitem__
            except SaveError as error:  # of a hidden file
                raise SaveError(str(base), error.problem) from error
            for path in places.values():
                path.touch()  # an empty file: the run has no such table
            _sync_folder(folder)
            _begin_switch(base, folder)
        _finish_switch(base)


def require_prefix(prefix: str | os.PathLike[str]) -> Path:
    """Return `prefix` without an ending. Raises `SaveError` unless a run can have that name."""
    base = Path(run_prefix(prefix))
    with _saving(base):
        if base.name in ("", ".", ".."):
            raise SaveError(str(prefix), "names no run: give a folder and a name, as in runs/one")
        if base.exists() and not (base.is_file() or base.is_dir()):
            raise SaveError(str(prefix), "is a device or a pipe, so no run can be saved there")
        for ending in RUN_ENDINGS.values():
            final = _named(base, ending)
            final.exists()  # raises when the name is too long
            if final.is_dir():
                raise SaveError(str(final), "is a folder, so no run can be saved there")
    return base


def run_prefix(path: str | os.PathLike[str]) -> str:
    """Return the run's prefix: `path` without the ending of a run's file, or `.parquet`."""
    text = os.fspath(path)
    for ending in (*RUN_ENDINGS.values(), ".parquet"):
        if text.endswith(ending):
            return text.removesuffix(ending)
    return text


def run_files(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Return where the tables of a run lie, by their kind; those that are not there are left out.

    Raises `OSError` when the folder may not be looked into.
    """
    base = Path(run_prefix(path))
    found = {}
    for kind, ending in RUN_ENDINGS.items():
        moving, final = _switch(base) / (base.name + ending), _named(base, ending)
        try:
            if moving.stat().st_size:
                found[kind] = moving
        except (FileNotFoundError, NotADirectoryError):
            if final.is_file():
                found[kind] = final
    return found


def _named(base: Path, ending: str) -> Path:
    return base.parent / (base.name + ending)


def _switch(base: Path) -> Path:
    return base.parent / f".{base.name}.switch"


def _begin_switch(base: Path, folder: Path) -> None:
    """Let `folder` be the run from now on."""
    for _ in range(_OTHERS_SAVES):
        try:
            folder.rename(_switch(base))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _finish_switch(base)  # another program saves the same run
        else:
            _sync_folder(base.parent)
            return
    raise SaveError(str(base), "is being saved by other programs, too")


def _finish_switch(base: Path) -> None:
    """Move the files of a run that replaces another to their own names.

    Others may do the same at the same time, and a killed program may have done a part of it.
    """
    folder = _switch(base)
    if not folder.is_dir():
        return
    for ending in RUN_ENDINGS.values():
        moving, final = folder / (base.name + ending), _named(base, ending)
        with suppress(FileNotFoundError):
            if moving.stat().st_size:
                moving.replace(final)
            else:
                final.unlink(missing_ok=True)
                moving.unlink()
    _sync_folder(base.parent)
    with suppress(OSError):  # the next save of another program may be in it already
        folder.rmdir()


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    """Turn what the system refuses while `path` is written into a one-line `SaveError`."""
    if "\0" in str(path):
        raise SaveError(repr(str(path))[1:-1], "is no name for a file")
    try:
        yield
    except OSError as error:
        raise SaveError(str(path), f"cannot be written: {error.strerror or error}") from error


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Give a hidden name beside `target` for what is not complete; nothing of it is left behind."""
    _remove_leftovers(target.parent)
    name = f".{target.name[:20]}~{_HOST}~{os.getpid()}~{next(_serial)}.partial"
    temp = target.parent / name
    _remove(temp)
    try:
        yield temp
    finally:
        _remove(temp)


def _remove_leftovers(folder: Path) -> None:
    """Remove what programs of this machine that ended in the middle left in `folder`."""
    if os.name != "posix":
        return
    for path in folder.glob(".*.partial"):
        found = _LEFTOVER.fullmatch(path.name)
        if found and found["host"] == _HOST and not _is_alive(int(found["pid"])):
            _remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make new names themselves durable."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
