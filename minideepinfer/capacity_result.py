"""`capacity` for users: a trace, policies and bounds in; the highest rate that holds out.

Read next: `mdi_sim/search/capacity.py` (the search), `lab_result.py` (many runs of one
plan), docs/lab.md.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mdi_analysis.report import change, make_table, number, plain
from mdi_shared.describe_run import RunOptions
from mdi_shared.policies import Policy
from mdi_shared.run_description import RunDescription
from mdi_shared.served import Served
from mdi_sim.executors import open_workers
from mdi_sim.search.capacity import BY_RATE, Capacity, Search, find_capacity
from mdi_sim.search.lab import DEFAULT, Lab
from mdi_sim.search.rows import Row, save_rows
from mdi_sim.search.settings import DEFAULT_SEEDS, DEFAULT_TOLERANCE
from mdi_sim.search.slo import parse_service_level
from mdi_sim.search.statistics import Interval
from mdi_sim.search.store import Store
from minideepinfer.lab_result import FOLDER, named_policies, named_traces, replicates

if TYPE_CHECKING:
    from rich.table import Table

FILE_NAME = "capacity.parquet"
DEFAULT_RATE = 1.0  # where all requests of a trace come at once


@dataclass(frozen=True)
class CapacityResult:
    """The capacity of each variant, the baseline first, and the rows of all runs."""

    found: tuple[Capacity, ...]
    rows: tuple[Row, ...]
    plan: Mapping[str, Any]
    unit: str
    tolerance: float

    def sentences(self) -> list[str]:
        """Say of each variant what its capacity is, how sure that is, and what breaks first."""
        return [_sentence(self, each) for each in self.found]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; an infinite rate is None."""
        found: dict[str, Any] = plain({
            "plan": dict(self.plan), "unit": self.unit, "tolerance": self.tolerance,
            "capacities": list(self.found), "runs": len(self.rows),
            "sentences": self.sentences(),
        })  # fmt: skip
        return found


def capacity(
    trace: str | Served,
    policies: Sequence[str] | Mapping[str, str | Policy] = ("fcfs",),
    *,
    slo: str,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    placements: Sequence[str] = ("round_robin",),
    seeds: int | Sequence[int] = DEFAULT_SEEDS,
    requests: int | None = None,
    start: float | None = None,
    load: str = BY_RATE,
    tolerance: float = DEFAULT_TOLERANCE,
    out: str | os.PathLike[str] = FOLDER,
    jobs: int = 1,
    cluster: str | None = None,
    on_run: Callable[[int], None] | None = None,
    description: RunDescription | None = None,
    **options: Unpack[RunOptions],
) -> CapacityResult:
    """Search the highest rate at which `slo` holds, for each policy, setting and placement.

    `start` (left out: the trace's own rate), `load` and `tolerance` are those of
    `mdi_sim.search.capacity.find_capacity`, the other options those of `lab`. Raises as these do.
    """
    named = named_traces([trace], Served(), requests) if isinstance(trace, str) else {"": trace}
    wanted = Lab(
        traces=named, policies=named_policies(policies), settings=settings or {DEFAULT: {}},
        placements=tuple(placements), seeds=replicates(seeds), slo=parse_service_level(slo),
        base=description, options=options,
    )  # fmt: skip
    return search(
        wanted, Path(out), start=own_rate(wanted) if start is None else start, load=load,
        tolerance=tolerance, jobs=jobs, cluster=cluster, on_run=on_run,
    )  # fmt: skip


def search(
    wanted: Lab,
    folder: Path,
    *,
    start: float,
    load: str = BY_RATE,
    tolerance: float = DEFAULT_TOLERANCE,
    jobs: int = 1,
    cluster: str | None = None,
    on_run: Callable[[int], None] | None = None,
) -> CapacityResult:
    """Search the capacities of a lab that is described already; keep the rows in `folder`."""
    from minideepinfer.measures import run_planned

    with open_workers(jobs, cluster) as workers:
        found, rows = find_capacity(
            wanted, run_planned, Store(folder), workers, start=start, load=load,
            tolerance=tolerance, on_run=on_run,
        )  # fmt: skip
    plan = {**wanted.to_json(), "loads": list(dict.fromkeys(row["load"] for row in rows))}
    folder.mkdir(parents=True, exist_ok=True)
    save_rows(folder / FILE_NAME, rows, plan)
    return CapacityResult(tuple(found), tuple(rows), plan, _unit(wanted), tolerance)


def own_rate(wanted: Lab) -> float:
    """Return the rate of the trace as it is, per second, two digits; loads it. Raises as that."""
    from mdi_traces.columns import ints, valid_rows
    from minideepinfer.commands.describing import load_served

    work = load_served(next(iter(wanted.traces.values())), wanted.seeds[0])
    arrival = ints(work.table["arrival_ns"])[~valid_rows(work.table["think_ns"])]
    span_s = float(arrival.max() - arrival.min()) / 1e9
    return float(f"{(len(arrival) - 1) / span_s:.2g}") if span_s > 0 else DEFAULT_RATE


def tables(result: CapacityResult) -> list["Table | str"]:
    """Return what people see: each replicate's bracket, and the sentences."""
    rows = [
        (", ".join(each.variant), str(one.seed), number(one.holds),
         number(None if one.breaks == inf else one.breaks), one.bound or one.reason)
        for each in result.found for one in each.searches
    ]  # fmt: skip
    headers = ("setting, placement, policy", "seed", f"holds at {result.unit}", "breaks at",
               "first to break")  # fmt: skip
    title = f"{len(result.rows)} runs; {result.plan['slo']}"
    return [make_table(title, headers, rows, n_text=2), *result.sentences()]


def _sentence(result: CapacityResult, found: Capacity) -> str:
    policy, level = found.variant[-1], result.plan["slo"]
    name = policy if len(result.plan["settings"]) == 1 else f"{policy}, {found.variant[0]}"
    reasons = [one.reason for one in found.searches if one.reason]
    if found.rate is None:
        return f"{name}: {_without_a_rate(found.searches, reasons, level, result.unit)}"
    middle = f"capacity {number(found.rate.mean)} {result.unit}{_uncertainty(result, found.rate)}"
    many = len(found.searches)
    bound = f"bound by {found.bound}" + (f" (in {found.bound_in} of {many} seeds)"
                                         if found.bound_in < many else "")  # fmt: skip
    return f"{name}: {middle} at {level}; {bound}{_against(result, found.change)}"


def _uncertainty(result: CapacityResult, rate: Interval) -> str:
    if rate.low is None or rate.high is None:
        return f" (one replicate; the search is within {result.tolerance:.1%})"
    half, ends = number((rate.high - rate.low) / 2), f"{number(rate.low)} to {number(rate.high)}"
    within = f"{rate.n} seeds, each within {result.tolerance:.1%}"
    return f" +- {half} (95 % interval {ends}, {within})"


def _against(result: CapacityResult, found: Interval | None) -> str:
    if found is None:
        return ""
    baseline = result.found[0].variant[-1]
    mean = change(found.mean)
    if found.low is None or found.high is None:
        return f"; {mean} against {baseline}"
    return f"; {mean} against {baseline} ({change(found.low)} to {change(found.high)})"


def _without_a_rate(
    searches: Sequence[Search], reasons: Sequence[str], level: str, unit: str
) -> str:
    """Say in plain words why there is no highest rate."""
    never, always = reasons.count("never"), reasons.count("always")
    if never == len(searches):
        bounds = ", ".join(dict.fromkeys(one.bound for one in searches))
        return (f"{level} never holds: at {number(min(one.breaks for one in searches))} {unit}, "
                f"where requests hardly ever meet, {bounds} is broken")  # fmt: skip
    if always == len(searches):
        return (f"{level} always holds, even when all requests come at once "
                f"({number(max(one.holds for one in searches))} {unit}): serve more requests to "
                "find a limit")  # fmt: skip
    return (f"no capacity to state: {level} never holds in {never} and always in {always} of "
            f"{len(searches)} seeds")  # fmt: skip


def _unit(wanted: Lab) -> str:
    """Return what a rate counts: sessions where a workload is one of sessions."""
    from mdi_traces.generate import WORKLOADS, ChatSessions

    served = next(iter(wanted.traces.values()))
    is_sessions = isinstance(WORKLOADS.get(served.workload or ""), ChatSessions)
    return "sessions/s" if is_sessions else "req/s"
