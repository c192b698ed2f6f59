"""Runs many simulations at once, on the cores of this machine.

A simulation depends on its trace and its description alone, so what comes out does not depend on
how many run at a time. Processes hand over what a job returns: numbers, or the name of a run that
it saved, but no run, whose tables are large.

Read next: `search/tune.py` and `minideepinfer/simulated.py` (users).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mdi_shared.errors import MiniDeepInferError, require_int

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_many(
    job: Callable[[Task], Result], tasks: Sequence[tuple[str, Task]], *, jobs: int = 1
) -> Iterator[Result]:
    """Yield `job(task)` of each named task, in their order, `jobs` in processes at a time.

    Jobs, tasks and results are pickled if `jobs` > 1, functions of scripts and notebooks included.
    An error of ours comes with the name of its task in front; then, and on a `KeyboardInterrupt`,
    the processes are ended, whatever they are at. Raises `ConfigError` unless `jobs` is at least 1.
    """
    require_int("jobs", jobs, 1)
    if jobs == 1 or len(tasks) < 2:
        yield from (_named(job, name, task) for name, task in tasks)
        return
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=min(jobs, len(tasks)), batch_size=1, return_as="generator")
    yield from pool(delayed(_named)(job, name, task) for name, task in tasks)


def _named(job: Callable[[Task], Result], name: str, task: Task) -> Result:
    try:
        return job(task)
    except MiniDeepInferError as error:
        raise MiniDeepInferError(f"{name}: {error}") from error
