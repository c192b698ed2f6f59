"""Fits the host's share of a step: planning, launch, processing, as the simulator charges them.

The simulator's host does one thing after the other (docs/rules.md, R26): take in arrivals, plan,
launch, wait for a step, process it, and again. A recording has more marks; between two of them the
host was busy with one of these. So planning begins when the host was done with the turn before, a
decode step's launch ends when all work is queued, and processing begins when the device is done or
the host begins to wait, whichever is later. Most of a prefill's launch runs beside the device: what
counts is until the device begins, seen where it had nothing else to do, and until all is queued,
seen where the device ended just then. Prompts cost by the token.

Read next: `mdi_sim/driver.py` (what charges these times), docs/calibration.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from mdi_shared.cost.step_cost import HostCost
from mdi_sim.fit.features import (
    DECODE,
    PREFILL,
    Floats,
    ends_with_its_launch,
    kind_rows,
    queued_ns,
)
from mdi_sim.fit.robust import fit_nonnegative
from mdi_traces.columns import Bools, Ints, floats, ints

MS = 1e6  # ns
BACK_TO_BACK_NS = 20_000  # between two steps of a device that had both in its queue; mostly 1,500


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Host times of steps with rows, ns; NaN where a step says nothing about one.

    `rows` are a prefill step's tokens (0 for decode), `arrived` the prompt tokens of requests taken
    in before the step. `queue` is how long the host queued a prefill step's work, where the device
    ended with it. `ingress` is how long an arrival waited until an idle engine saw it, `gap` how
    long the device was idle before the step.

    `idle` has other entries: turns without rows, each from its look for arrivals to the look of the
    next turn, which has no rows either. (A turn with rows would overlap with the one before it.)
    """

    n_seqs: Floats
    rows: Floats
    arrived: Floats
    is_decode: Bools
    schedule: Floats
    launch: Floats
    queue: Floats
    process: Floats
    ingress: Floats
    gap: Floats
    idle: Floats


def host_times(table: pa.Table, requests: pa.Table) -> HostTimes:
    """Read the host's times off the step and request tables of a one-rank run."""
    t_sched, t_done, starts, ends = (
        ints(table[name]) for name in ("t_sched", "t_done", "t_dev_start", "t_dev_end")
    )
    wait, ingress, gap = (floats(table[name]) * MS for name in ("wait_ms", "ingress_ms", "gap_ms"))
    planned = t_sched + floats(table["cpu_sched_ms"]) * MS + wait
    queued = queued_ns(table)
    woken = _found_idle(table, t_sched, t_done)
    before = _last_mark(np.sort(np.concatenate([queued, t_done])), t_sched, or_equal=True)
    waited = np.fmax(_last_mark(np.sort(queued), t_done, or_equal=True),
                     _last_mark(np.sort(t_done), t_done, or_equal=False))  # fmt: skip
    decode = kind_rows(table, DECODE)
    busy = decode | kind_rows(table, PREFILL)
    was_idle = starts > np.concatenate([[-np.inf], ends[:-1] + BACK_TO_BACK_NS])
    launch = np.where(decode, queued - planned, np.where(was_idle, starts - planned, np.nan))
    # Device marks lie some microseconds off on the host's clock: no time is below zero.
    times = {
        "n_seqs": ints(table["n_seqs"]),
        "rows": np.where(decode, 0, ints(table["n_tokens"])),
        "arrived": _arrived_tokens(requests, t_sched),
        "schedule": np.where(woken, np.nan, np.maximum(planned - wait - before, 0.0)),
        "launch": np.maximum(launch, 0.0),
        "queue": np.where(decode | ~ends_with_its_launch(table), np.nan, queued - planned),
        "process": np.maximum(t_done - np.fmax(waited, ends), 0.0),
        "ingress": np.where(woken, ingress, np.nan),
        "gap": np.where(woken, np.nan, gap),
    }
    return HostTimes(
        is_decode=decode[busy],
        idle=np.diff(t_sched)[~busy[:-1] & ~busy[1:]].astype(np.float64),
        **{name: values[busy].astype(np.float64) for name, values in times.items()},
    )


def _last_mark(marks: Floats | Ints, times: Ints, *, or_equal: bool) -> Floats:
    """Return the latest mark before each time; NaN where there is none."""
    at = np.searchsorted(marks, times, side="right" if or_equal else "left") - 1
    latest: Floats = np.where(at >= 0, marks[np.maximum(at, 0)], np.nan)
    return latest


def _found_idle(table: pa.Table, t_sched: Ints, t_done: Ints) -> Bools:
    """True where planning began with nothing left to do: the host slept until an arrival."""
    left = ints(table["n_running"]) + ints(table["n_waiting"])
    idle = np.ones(len(table), dtype=bool)
    idle[1:] = (t_done[:-1] <= t_sched[1:]) & (left[:-1] == 0)
    return idle


def _arrived_tokens(requests: pa.Table, t_sched: Ints) -> Floats:
    """Return the prompt tokens that arrived between each step's look for arrivals and the last."""
    arrival, prompt = ints(requests["arrival_ns"]), ints(requests["prompt_len"])
    order = np.argsort(arrival, kind="stable")
    upto = np.concatenate([[0], np.cumsum(prompt[order])])
    seen = upto[np.searchsorted(arrival[order], t_sched, side="right")]
    return np.diff(seen, prepend=0).astype(np.float64)


def fit_host(runs: Sequence[tuple[pa.Table, pa.Table]]) -> tuple[HostCost, dict[str, Any]]:
    """Fit the host's costs to runs' step and request tables; diagnostics are times in ns."""
    parts = [host_times(steps, requests) for steps, requests in runs]
    every = HostTimes(**{f.name: np.concatenate([getattr(part, f.name) for part in parts])
                         for f in fields(HostTimes)})  # fmt: skip
    n_seqs, rows, decode = every.n_seqs, every.rows, every.is_decode
    schedule, plan_report = _fit(every.schedule, {"seq": n_seqs, "arrived": every.arrived})
    launch, launch_report = _fit(np.where(decode, every.launch, np.nan), {"seq": n_seqs})
    begin, begin_report = _fit(np.where(decode, np.nan, every.launch), {"row": rows})
    queue, queue_report = _fit(every.queue - begin["const"] - begin["row"] * rows, {})
    process, process_report = _fit(every.process, {"seq": n_seqs, "row": rows})
    report = {
        "schedule": plan_report,
        "launch": launch_report,
        "launch of prefill, until it begins": begin_report,
        "launch of prefill, until all is queued": queue_report,
        "process": process_report,
        "turns without rows": _spread(every.idle),
        "ingress of an idle engine": _spread(every.ingress),
        "device idle before a decode step": _spread(every.gap[decode]),
        "device idle before a prefill step": _spread(every.gap[~decode]),
    }
    cost = HostCost(
        schedule_ns=schedule["const"], schedule_ns_per_seq=schedule["seq"],
        ingress_ns_per_token=schedule["arrived"], launch_ns=launch["const"],
        launch_ns_per_seq=launch["seq"],
        prefill_launch_ns=begin["const"] if begin_report["n"] else None,
        prefill_launch_ns_per_token=begin["row"],
        prefill_queue_ns=max(queue["const"], 0),
        process_ns=process["const"], process_ns_per_seq=process["seq"],
        process_ns_per_prompt_token=process["row"],
        # A turn that was never seen empty takes at most what planning takes.
        idle_ns=round(report["turns without rows"].get("p50_ns", schedule["const"])),
    )  # fmt: skip
    return cost, report


def _fit(times: Floats, per: Mapping[str, Floats]) -> tuple[dict[str, int], dict[str, Any]]:
    """Fit a constant and a time per unit of each column, ns; NaN times say nothing."""
    known = ~np.isnan(times)
    rates = dict.fromkeys(("const", *per), 0)
    if not known.any():
        return rates, {"n": 0}
    varying = [name for name, column in per.items() if np.ptp(column[known]) > 0]
    x = np.column_stack([np.ones(int(known.sum())), *(per[name][known] for name in varying)])
    y = times[known]
    solved = fit_nonnegative(x, y, np.ones(len(y)))
    rates |= {name: round(float(rate)) for name, rate in
              zip(("const", *varying), solved, strict=True)}  # fmt: skip
    missed = x @ solved - y
    return rates, {
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
