"""Fits the host's share of a step: planning, launch, processing, as the simulator charges them.

The simulator's host does one thing after the other (engine-semantics §4.7): poll and plan, launch,
wait for a step, process it, and again. A recording has more marks; between two of them the host
was busy with one of these. So planning begins when the host was done with the turn before, launch
ends when all work is queued, and processing begins when the device is done or the host begins to
wait, whichever is later. A decode step's launch is charged; a prefill's runs beside the device.

Read next: `mdi_sim/driver.py` (what charges these times), docs/calibration.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mdi_shared.cost import HostCost
from mdi_sim.features import DECODE, PREFILL, Floats, kind_rows
from mdi_sim.robust import fit_nonnegative
from mdi_traces.columns import Bools, Ints, floats, ints, valid_rows

MS = 1e6  # ns


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Host times of steps with rows, ns; NaN where a step says nothing about one.

    `idle` are whole turns of steps without rows, of which the other arrays hold nothing: from one
    such turn's look for arrivals to the next one's. The last of a row of them overlaps with a step
    that has rows, and says nothing. `ingress` is how long an arrival that found the engine idle
    waited to be seen, `gap` how long the device was idle before the step, `arrived` says that
    requests came before the step.
    """

    n_seqs: Floats
    is_decode: Bools
    arrived: Bools
    schedule: Floats
    launch: Floats
    process: Floats
    idle: Floats
    ingress: Floats
    gap: Floats


def host_times(table: pa.Table) -> HostTimes:
    """Read the host's times off the step table of a one-rank run."""
    t_sched, t_launch, t_done = (ints(table[n]) for n in ("t_sched", "t_launch", "t_done"))
    planned = t_sched + (floats(table["cpu_sched_ms"]) + floats(table["wait_ms"])) * MS
    queued = t_launch + np.nan_to_num(floats(table["cpu_launch_ms"])) * MS
    idle = _found_idle(table, t_sched, t_done)
    before = _last_mark(np.sort(np.concatenate([queued, t_done])), t_sched, or_equal=True)
    schedule = np.where(idle, np.nan, planned - floats(table["wait_ms"]) * MS - before)
    began = np.fmax(_last_mark(np.sort(queued), t_done, or_equal=True),
                    _last_mark(np.sort(t_done), t_done, or_equal=False))  # fmt: skip
    began = np.fmax(began, ints(table["t_dev_end"]))
    ingress = floats(table["ingress_ms"]) * MS
    gap = floats(table["gap_ms"]) * MS
    decode = kind_rows(table, DECODE)
    busy = decode | kind_rows(table, PREFILL)
    turns = np.diff(t_sched)[~busy[:-1] & ~busy[1:]]
    # Device marks lie some microseconds off on the host's clock: no time is below zero.
    return HostTimes(
        n_seqs=ints(table["n_seqs"])[busy].astype(np.float64),
        is_decode=decode[busy],
        arrived=valid_rows(table["ingress_ms"])[busy],
        schedule=np.maximum(schedule, 0.0)[busy],
        launch=np.maximum(queued - planned, 0.0)[busy],
        process=np.maximum(t_done - began, 0.0)[busy],
        idle=turns.astype(np.float64),
        ingress=np.where(idle, ingress, np.nan)[busy],
        gap=np.where(idle, np.nan, gap)[busy],
    )


def _last_mark(marks: Floats | Ints, times: Ints, *, or_equal: bool) -> Floats:
    """Return the latest mark before each time; NaN where there is none."""
    at = np.searchsorted(marks, times, side="right" if or_equal else "left") - 1
    found: Floats = np.where(at >= 0, marks[np.maximum(at, 0)], np.nan)
    return found


def _found_idle(table: pa.Table, t_sched: Ints, t_done: Ints) -> Bools:
    """True where planning began with nothing left to do: the host slept until an arrival."""
    left = ints(table["n_running"]) + ints(table["n_waiting"])
    idle = np.ones(len(table), dtype=bool)
    idle[1:] = (t_done[:-1] <= t_sched[1:]) & (left[:-1] == 0)
    return idle


def fit_host(tables: Sequence[pa.Table]) -> tuple[HostCost, dict[str, Any]]:
    """Fit the host's costs to step tables and return them with their diagnostics, times in ns."""
    parts = [host_times(table) for table in tables]
    n_seqs = np.concatenate([part.n_seqs for part in parts])
    is_decode = np.concatenate([part.is_decode for part in parts])
    arrived = np.concatenate([part.arrived for part in parts])
    times = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("schedule", "launch", "process", "idle", "ingress", "gap")
    }
    quiet = {"schedule": ~arrived, "launch": is_decode, "process": np.ones(len(n_seqs), dtype=bool)}
    lines: dict[str, tuple[int, int]] = {}
    report: dict[str, Any] = {}
    for name, which in quiet.items():
        lines[name], report[name] = _line(n_seqs, times[name], which, has_slope=name != "launch")
    prefill = ~is_decode
    report["turns without rows"] = _spread(times["idle"])
    report["launch of prefill, beside the device"] = _spread(times["launch"][prefill])
    report["schedule with arrivals"] = _spread(times["schedule"][arrived])
    report["ingress of an idle engine"] = _spread(times["ingress"])
    report["device idle before a decode step"] = _spread(times["gap"][is_decode])
    report["device idle before a prefill step"] = _spread(times["gap"][prefill])
    (schedule, schedule_n), (launch, _), (process, process_n) = lines.values()
    cost = HostCost(
        schedule_ns=schedule, schedule_ns_per_seq=schedule_n, launch_ns=launch,
        process_ns=process, process_ns_per_seq=process_n,
        # A turn that was never seen empty takes at most what planning takes.
        idle_ns=round(report["turns without rows"].get("p50_ns", schedule)),
    )  # fmt: skip
    return cost, report


def _line(
    n_seqs: Floats, times: Floats, which: Bools, *, has_slope: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Fit a constant and a time per sequence, ns; all steps serve where `which` leaves none."""
    known = ~np.isnan(times)
    use = known & which if bool((known & which).any()) else known
    if not use.any():
        return (0, 0), {"n": 0}
    columns = [np.ones(int(use.sum()))]
    if has_slope and np.ptp(n_seqs[use]) > 0:
        columns.append(n_seqs[use])
    x, y = np.column_stack(columns), times[use]
    rates = fit_nonnegative(x, y, np.ones(len(y)))
    const, slope = (round(float(rate)) for rate in (*rates, 0.0)[:2])
    missed = const + slope * n_seqs[use] - y
    return (const, slope), {
        **_spread(y),
        "mean_absolute_error_ns": float(np.abs(missed).mean()),
        "bias_ns": float(missed.mean()),
    }


def _spread(times: Floats) -> dict[str, Any]:
    """Return n, mean, median, P90 and greatest of times, ns."""
    known = times[~np.isnan(times)]
    if not len(known):
        return {"n": 0}
    return {
        "n": len(known),
        "mean_ns": float(known.mean()),
        "p50_ns": float(np.percentile(known, 50)),
        "p90_ns": float(np.percentile(known, 90)),
        "max_ns": float(known.max()),
    }
