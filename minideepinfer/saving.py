"""Puts a run on disk as a whole: an earlier run of the same name stays until the new one is ready.

`Run.save` writes each file safely but one after the other; here all are written aside first, and
then only moved. No file is read here.

Read next: `mdi_traces/run.py` (the files of a run).
"""

import os
import shutil
from pathlib import Path

from mdi_shared.errors import TraceError
from mdi_traces.run import Run, run_prefix

RUN_ENDINGS = (".items.parquet", ".steps.parquet", ".requests.parquet")


def run_files(prefix: str | os.PathLike[str]) -> list[Path]:
    """Return those files of the run `prefix` that are there."""
    base = run_prefix(prefix)
    return [path for ending in RUN_ENDINGS if (path := Path(base + ending)).exists()]


def save_run(run: Run, prefix: str | os.PathLike[str], *, items: bool = True) -> list[Path]:
    """Write a run's files and return their paths; a failure leaves an earlier run as it was.

    An earlier run's items go when the new one has none. Raises `TraceError`.
    """
    base = Path(run_prefix(prefix))
    aside = base.with_name(f".{base.name}.{os.getpid()}.saving")
    try:
        aside.mkdir(parents=True)
        staged = Run.save(run, aside / base.name, items=items)
        finals = [base.with_name(path.name) for path in staged]
        for final in finals:
            if final.is_dir():
                raise TraceError(str(final), "is a folder, so no run can be saved there")
        for old in run_files(base):
            if old not in finals:
                old.unlink()
        for path, final in zip(staged, finals, strict=True):
            path.replace(final)
    except OSError as error:
        raise TraceError(str(base), f"cannot be saved: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return finals
