"""When the requests of a trace are due: other times for them, and how long there is to wait.

A request is due at its `arrival_ns`; a turn with a think time is due that long after the turn
before it has ended, and its recorded time only places it in the trace.

Read next: `requests.py` (the trace), `distributions.py` (arrival processes).
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from mdi_shared.errors import ConfigError
from mdi_shared.policies import NO_POLICY, Policy
from mdi_traces.columns import Bools, Ints, codes, ints, numbers, valid_rows
from mdi_traces.distributions import ArrivalProcess
from mdi_traces.requests import LATEST_NS, RequestTrace, clear_outputs, put_column

LONGEST_WAIT_S = 86_400.0  # a day in which nothing is sent is a mistaken unit, not a trace
_NS_PER_S = 1e9


def retime(
    trace: RequestTrace,
    *,
    process: ArrivalProcess | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> RequestTrace:
    """Return the trace with other arrival times, and a note that says so.

    Either `process` draws them, from `seed`, or the recorded ones are stretched or compressed so
    that `rate` requests come a second on average, turns that wait for their session not counted.
    Think times stay; turns that wait keep their recorded distance to the one they wait for.
    Output columns of a recorded run are cleared. Raises `ConfigError`.
    """
    if (process is None) == (rate is None):
        raise ConfigError("retime", (process, rate), "give an arrival process or a rate")
    table = clear_outputs(trace.table)
    recorded, waits = ints(table["arrival_ns"]), valid_rows(table["think_ns"])
    if process is not None:
        made = process.draw_ns(int((~waits).sum()), np.random.default_rng(seed))
        note = f"recorded arrival times replaced by {process}, seed {seed}"
    else:
        made = _at_rate(recorded[~waits], rate or 0.0)
        note = f"recorded arrival times scaled to {rate:g} requests per second"
    arrival = _with_turns(recorded, waits, made, codes(table["session_id"])[0])
    order = np.argsort(arrival, kind="stable")
    table = put_column(table, "arrival_ns", numbers(arrival, pa.int64()))
    metadata = replace(trace.metadata, notes=(*trace.metadata.notes, note))
    return RequestTrace(table.take(numbers(order, pa.int64())), metadata)


def require_bearable_waits(trace: RequestTrace, longest_s: float = LONGEST_WAIT_S) -> None:
    """Raise `ConfigError` when nothing would be sent for longer than `longest_s` seconds."""
    table = trace.table
    think, waits = ints(table["think_ns"]), valid_rows(table["think_ns"])
    due = np.sort(ints(table["arrival_ns"])[~waits])
    gaps = np.diff(due, prepend=0)
    longest_ns = max(int(gaps.max(initial=0)), int(think.max(initial=0)))
    if longest_ns > longest_s * _NS_PER_S:
        raise ConfigError("trace", _duration(longest_ns), "is the longest time in which nothing is "
                          f"due, at most {_duration(longest_s * _NS_PER_S)} can be waited for: "
                          "check the unit of its times, or speed it up")  # fmt: skip


def due_note(trace: RequestTrace) -> str:
    """Say when the first and the last request are due, as recorded."""
    arrival = ints(trace.table["arrival_ns"])
    return f"first request due after {_duration(arrival.min())}, last {_duration(arrival.max())}"


def unused_note(
    trace: RequestTrace, policy: str | Policy = NO_POLICY, *, reuses_prefixes: bool = False
) -> str | None:
    """Name the columns of the trace that a run under `policy` does not use."""
    table = trace.table
    names = ["priority", "client", "deadline_ns"] if policy == NO_POLICY else []
    if not reuses_prefixes:
        names.append("hash_ids")
    unused = [n for n in names if table[n].null_count < len(table)]
    if not unused:
        return None
    return f"{' and '.join(unused)} of the trace: kept, but nothing in this run uses them"


def _at_rate(recorded: Ints, rate: float) -> Ints:
    if not 0 < rate < float("inf"):
        raise ConfigError("rate", rate, "must be a finite number above 0")
    span_s = float(recorded.max() - recorded.min()) / _NS_PER_S
    if span_s == 0:
        raise ConfigError("rate", rate, "the recorded times are all the same and cannot be scaled: "
                          "give an arrival process")  # fmt: skip
    factor = (len(recorded) - 1) / span_s / rate
    scaled = np.rint((recorded - recorded.min()) * factor)
    if scaled.max() > LATEST_NS:
        raise ConfigError("rate", rate, f"puts a request beyond {LATEST_NS} ns, the latest allowed")
    times: Ints = scaled.astype(np.int64)
    return times


def _with_turns(recorded: Ints, waits: Bools, made: Ints, sessions: Ints) -> Ints:
    """Return the made times, and for turns that wait those of their session moved along."""
    arrival = recorded.copy()
    arrival[~waits] = made
    moved: dict[int, int] = {}
    for row, session in enumerate(sessions.tolist()):
        if session < 0:
            continue
        if waits[row]:
            arrival[row] = recorded[row] + moved.get(session, 0)
        else:
            moved[session] = int(arrival[row] - recorded[row])
    return arrival


def _duration(ns: float) -> str:
    seconds = float(ns) / _NS_PER_S
    for unit, length in (("years", 365.25 * 86_400), ("days", 86_400), ("hours", 3_600)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.3g} s"
