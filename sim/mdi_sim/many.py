"""Runs many simulations at once, on the cores of this machine or on a cluster.

A simulation depends on its trace and its description alone, so what comes out does not depend on
where, or how many, run at a time. Processes hand over what a job returns: numbers, or the name of
a run that it saved, but no run, whose tables are large.

Read next: `executors.py` (where jobs run), `search/tune.py` and `search/lab.py` (users).
"""

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

from mdi_shared.errors import MiniDeepInferError, first_line, require_int
from mdi_sim.executors import Workers, processes

Task = TypeVar("Task")
Result = TypeVar("Result")

SLICE_S = 1.0  # of a wait
MOST_WAIT_S = 3_600.0  # for the next of all the jobs at work to end


def run_many(
    job: Callable[[Task], Result], tasks: Sequence[tuple[str, Task]], *, jobs: int = 1
) -> Iterator[Result]:
    """Yield `job(task)` of each named task, in their order, `jobs` in processes at a time.

    Jobs, tasks and results are pickled if `jobs` > 1, functions of scripts and notebooks included.
    An error of ours comes with the name of its task in front; then, and on a `KeyboardInterrupt`,
    the processes are ended, whatever they are at. Raises `ConfigError` unless `jobs` is at least 1.
    """
    require_int("jobs", jobs, 1)
    with processes(min(jobs, max(len(tasks), 1))) as workers:
        early: dict[int, Result] = {}
        wanted = 0
        for index, result in as_they_end(workers, _Named(job), enumerate(tasks)):
            early[index] = result
            while wanted in early:
                yield early.pop(wanted)
                wanted += 1


def as_they_end(
    workers: Workers,
    job: Callable[[Task], Result],
    tasks: Iterator[tuple[int, Task]],
    *,
    longest_s: float = MOST_WAIT_S,
) -> Iterator[tuple[int, Result]]:
    """Yield (number, `job(task)`) of each numbered task as it ends.

    Tasks are asked for when there is a worker for them. Raises what a job raises, and
    `MiniDeepInferError` when a worker dies, or no job ends for `longest_s` seconds.
    """
    at_work: dict[Future[_Ended[Result]], int] = {}
    is_more = True
    while is_more or at_work:
        while is_more and len(at_work) < workers.at_a_time:
            following = next(tasks, None)
            is_more = following is not None
            if following is not None:
                number, task = following
                at_work[workers.executor.submit(_guarded, job, task)] = number
        for future in _first_done(at_work, longest_s):
            yield at_work.pop(future), _result(future)


def _first_done(at_work: Collection[Future[Any]], longest_s: float) -> set[Future[Any]]:
    """Wait until a future is done; raise `MiniDeepInferError` after `longest_s` seconds.

    In slices: an interrupt that comes just before a wait is noticed at its end only.
    """
    end = time.monotonic() + longest_s
    done: set[Future[Any]] = set()
    while at_work and not done:
        left = end - time.monotonic()
        if left <= 0:
            raise MiniDeepInferError(f"no run has ended for {longest_s:,.0f} s, the longest wait; "
                                     "what had ended is kept")  # fmt: skip
        done, _ = wait(at_work, timeout=min(SLICE_S, left), return_when=FIRST_COMPLETED)
    return done


class _Ended(NamedTuple, Generic[Result]):
    """What a job came to: a result, or what it raised."""

    result: Result | None
    error: Exception | None = None


def _guarded(job: Callable[[Task], Result], task: Task) -> _Ended[Result]:
    """Run a job where it was sent to: what it raises comes back as a value.

    So whatever a future itself raises is about the worker, not about the job.
    """
    try:
        return _Ended(job(task))
    except MiniDeepInferError as error:
        return _Ended(None, error)
    except Exception as error:  # noqa: BLE001 - raised again by who waits for it
        error.add_note(f"where it ran:\n{traceback.format_exc()}")
        return _Ended(None, error)


def _result(future: Future[_Ended[Result]]) -> Result:
    try:
        ended = future.result()
    except Exception as error:  # every executor has its own
        said = first_line(error) or "cancelled"
        raise MiniDeepInferError(f"a worker has died ({type(error).__name__}: {said:.200}); what "
                                 "had ended is kept") from error  # fmt: skip
    if ended.error is not None:
        raise ended.error
    return cast("Result", ended.result)


@dataclass(frozen=True, slots=True)
class _Named(Generic[Task, Result]):
    """Runs a named task; an error of ours comes with its name in front."""

    job: Callable[[Task], Result]

    def __call__(self, named: tuple[str, Task]) -> Result:
        name, task = named
        try:
            return self.job(task)
        except MiniDeepInferError as error:
            raise MiniDeepInferError(f"{name}: {error}") from error
