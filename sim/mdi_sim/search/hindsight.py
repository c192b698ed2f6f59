"""The best that could have been done with a small instance, knowing all: an integer programme.

Time goes by in rounds, as in arXiv 2502.07115: a request that starts at round k holds its prompt
and one more token in each of its rounds, and gives a token in each; nobody is preempted, nobody
starts before arriving, and all together fit the pool. HiGHS proves the optimum of some six such
requests in seconds, of eight in a minute; of more it gives a schedule and a bound.

Read next: `bounds.py` (bounds for any size), experiments/ (how near a policy comes).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from mdi_shared.errors import require

MOST_REQUESTS = 60  # beyond it the solver ends before its first bound


class Job(NamedTuple):
    """A request: the round it arrives in, its prompt and its output, tokens."""

    arrival: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The optimum, as far as it was found, in rounds summed over requests.

    `bound` is no more than the least total latency, `latency` that of the schedule in `starts`
    (None: none was found in time). `is_optimal` says that the two are one.
    """

    bound: float
    latency: int | None
    starts: tuple[int, ...]
    is_optimal: bool


def hindsight_optimum(
    jobs: Sequence[Job], pool: int, *, horizon: int, limit_s: float = 60.0
) -> Hindsight:
    """Minimise the sum of (end - arrival) with at most `pool` tokens held in any round.

    Starts are looked for up to `horizon`, such as the makespan of any schedule. A request may
    start later for no less than the latency of the horizon and without memory, so that `bound`
    holds whatever the horizon; a schedule that does so is no schedule. Stops after `limit_s`
    seconds with what it has. Raises `ConfigError` for requests that could never run.
    """
    require(1 <= len(jobs) <= MOST_REQUESTS, "jobs", len(jobs), f"must be 1 to {MOST_REQUESTS}")
    for job in jobs:
        require(job.prompt + job.output <= pool, "pool", pool, f"cannot hold {job}")
    columns = [(row, start) for row, job in enumerate(jobs)
               for start in range(job.arrival, max(horizon, job.arrival) + 1)]  # fmt: skip
    cost = np.array([start + jobs[row].output - jobs[row].arrival for row, start in columns])
    late = [start >= horizon for _, start in columns]
    shape = (len(jobs), len(columns))
    rows = np.array([row for row, _ in columns])
    once = coo_array((np.ones(len(columns)), (rows, np.arange(len(columns)))), shape=shape)
    found = milp(
        cost, integrality=np.ones(len(columns)), bounds=Bounds(0, 1),
        constraints=[LinearConstraint(once, 1, 1),
                     LinearConstraint(_memory(jobs, columns, late), -np.inf, pool)],
        options={"time_limit": limit_s},
    )  # fmt: skip
    least = sum(job.output for job in jobs)  # all that is known if time is up before a bound
    bound = max(getattr(found, "mip_dual_bound", None) or least, least)
    chosen = [] if found.x is None else np.flatnonzero(found.x > 0.5).tolist()
    if not chosen or any(late[column] for column in chosen):
        return Hindsight(float(bound), None, (), False)
    latency = int(cost[chosen].sum())
    starts = tuple(columns[column][1] for column in chosen)
    return Hindsight(float(bound), latency, starts, bool(bound > latency - 1 + 1e-6))


def _memory(
    jobs: Sequence[Job], columns: Sequence[tuple[int, int]], late: Sequence[bool]
) -> coo_array:
    """Return tokens held by round and column."""

    def entries() -> Iterator[NDArray[np.int64]]:
        for column, (row, start) in enumerate(columns):
            if not late[column]:
                ages = np.arange(1, jobs[row].output + 1)
                yield np.stack([start + ages - 1, np.full(len(ages), column),
                                jobs[row].prompt + ages])  # fmt: skip

    found = list(entries())
    rounds, places, held = np.concatenate(found, axis=1) if found else np.zeros((3, 0), int)
    return coo_array((held, (rounds, places)), shape=(max(rounds, default=0) + 1, len(columns)))
