"""Export of a run for the Perfetto viewer, in Chrome's trace event format.

One process per rank with a CPU track (schedule, launch, process), a device track (steps named by
kind), counters, and the requests served there as asynchronous spans (queue, prefill, decode).
Events are written one by one, so a long run needs no memory of its own size. Opening the file is
the viewer's business: ui.perfetto.dev, or chrome://tracing.

Format: "Trace Event Format" (Chromium project), phases M, X, C, b and e.
"""

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
    KINDS,
    NS_PER_MS,
    RunLike,
    floats,
    ints,
    kind_codes,
    series,
    span_ns,
)
from mdi_shared.errors import ConfigError
from mdi_traces.saving import atomic_file

Event = dict[str, Any]
NS_PER_US = 1e3
CPU_TRACK, DEVICE_TRACK = 1, 2
PHASES = (
    ("queue", "arrival_ns", "t_first_sched"),
    ("prefill", "t_first_sched", "t_first_token"),
    ("decode", "t_first_token", "t_last_token"),
)


def export_perfetto(run: RunLike, path: str | Path, *, max_steps: int | None = None) -> Path:
    """Write a run as .json or .json.gz and return the path; an old file stays until it is done.

    `max_steps` keeps the first so many engine steps (of every rank) and the part of the requests
    that falls into them. Same run, same bytes. Raises `ConfigError` on another suffix or
    `max_steps` below 1, `SaveError` when the system refuses to write there.
    """
    if max_steps is not None and max_steps < 1:
        raise ConfigError("max_steps", max_steps, "must be at least 1, or None for all")
    steps, end_ns = run.steps, (span_ns(run) or (0.0, 0.0))[1]
    if max_steps is not None:
        step = ints(steps, "steps", "step")
        kept = np.unique(step)[:max_steps]
        if kept.size and kept[-1] < step.max():
            steps = steps[step <= kept[-1]]
            end_ns = float(floats(steps, "steps", "t_done").max())
    return write_events(trace_events(steps, run.requests, end_ns), path)


def write_events(events: Iterable[Event], path: str | Path) -> Path:
    """Write trace events as .json or .json.gz and return the path; raises as `export_perfetto`."""
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError("path", str(path), "must end in .json or .json.gz")
    with atomic_file(path) as raw, _text(raw, is_packed=path.name.endswith(".gz")) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in events:
            file.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")
    return path


def trace_events(steps: pd.DataFrame, requests: pd.DataFrame, end_ns: float) -> Iterator[Event]:
    """Yield the trace events of the given rows; request spans end at `end_ns` at the latest."""
    rank, kinds = ints(steps, "steps", "rank"), kind_codes(steps)
    order = np.lexsort((floats(steps, "steps", "t_sched"), rank))
    ranks, starts = np.unique(rank[order], return_index=True)
    for this, chosen in zip(ranks.tolist(), np.split(order, starts[1:]), strict=False):
        rows = steps.iloc[chosen]
        yield from _track_names(this)
        yield from _cpu_slices(rows, this)
        yield from _device_slices(rows, [KINDS[code] for code in kinds[chosen]], this)
        yield from _counters(rows, this)
    yield from _request_spans(requests, end_ns, int(max(ranks, default=-1)) + 1)


def _track_names(rank: int) -> Iterator[Event]:
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield _named("thread_name", rank, CPU_TRACK, "CPU")
    yield _named("thread_name", rank, DEVICE_TRACK, "device")


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _cpu_slices(steps: pd.DataFrame, rank: int) -> Iterator[Event]:
    """Yield schedule, launch and process slices, ordered and free of overlap.

    Scheduling starts at t_sched and takes cpu_sched_ms, launching takes the rest until t_launch,
    processing ends at t_done and takes cpu_proc_ms; a phase of unknown length is left out.
    """
    sched, launch, done, sched_ms, proc_ms = (
        floats(steps, "steps", name)
        for name in ("t_sched", "t_launch", "t_done", "cpu_sched_ms", "cpu_proc_ms")
    )
    sched_end = np.fmin(sched + np.nan_to_num(sched_ms) * NS_PER_MS, launch)
    names = np.repeat(["schedule", "launch", "process"], len(steps))
    start = np.concatenate([sched, sched_end, done - proc_ms * NS_PER_MS])
    end = np.concatenate([sched_end, launch, done])
    number = np.tile(ints(steps, "steps", "step"), 3)
    known = ~np.isnan(start) & ~np.isnan(end)
    order = np.flatnonzero(known)[np.lexsort((end[known], start[known]))]
    start, end = start[order], np.maximum.accumulate(end[order])
    # One thread does all three. float32 durations may overlap by rounding, which viewers reject.
    start[1:] = np.maximum(start[1:], end[:-1])
    slices = zip(names[order].tolist(), start, end, number[order].tolist(), strict=True)
    for name, begin, finish, step in slices:
        if finish > begin:
            yield _slice(name, (rank, CPU_TRACK), (begin, finish), {"step": step})


def _device_slices(steps: pd.DataFrame, kinds: list[str], rank: int) -> Iterator[Event]:
    start, end = floats(steps, "steps", "t_dev_start"), floats(steps, "steps", "t_dev_end")
    columns = [
        ints(steps, "steps", name).tolist() for name in ("step", "n_seqs", "n_tokens", "sum_k")
    ]
    for kind, begin, finish, *args in zip(kinds, start, end, *columns, strict=True):
        if finish > begin:
            named = dict(zip(("step", "n_seqs", "n_tokens", "sum_k"), args, strict=True))
            yield _slice(kind, (rank, DEVICE_TRACK), (begin, finish), named)


def _slice(name: str, track: tuple[int, int], span: tuple[float, float], args: Event) -> Event:
    pid, tid = track
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(span[0]),
            "dur": _us(span[1] - span[0]), "args": args}  # fmt: skip


def _counters(steps: pd.DataFrame, rank: int) -> Iterator[Event]:
    counters = (
        ("running", "t_done", "n_running"),
        ("waiting", "t_done", "n_waiting"),
        ("free blocks", "t_sched", "free_blocks"),
    )
    for name, time, column in counters:
        values = floats(steps, "steps", column)
        at = floats(steps, "steps", time)
        # A counter holds until its next value: only changes need an event.
        changed = np.append(True, np.diff(values) != 0)[: values.size] & ~np.isnan(values + at)
        for ts, value in zip(at[changed], values[changed], strict=True):
            yield {"ph": "C", "name": name, "pid": rank, "ts": _us(ts), "args": {name: int(value)}}


def _request_spans(requests: pd.DataFrame, end_ns: float, free_pid: int) -> Iterator[Event]:
    times = {
        name: np.minimum(floats(requests, "requests", name), end_ns)  # NaN stays NaN
        for name in ("arrival_ns", "t_first_sched", "t_first_token", "t_last_token", "t_finish")
    }
    ended = np.where(np.isnan(times["t_finish"]), end_ns, times["t_finish"])
    ranks = floats(requests, "requests", "rank")
    # Requests without a rank get a process of their own, past every rank's.
    unserved = max(free_pid, int(np.nanmax(ranks, initial=-1)) + 1)
    if np.isnan(ranks).any():
        yield _named("process_name", unserved, 0, "requests without a rank")
    for index, req_id in enumerate(series(requests, "requests", "req_id").tolist()):
        track = unserved if np.isnan(ranks[index]) else int(ranks[index]), index
        yield from _span(f"request {req_id}", track, (times["arrival_ns"][index], ended[index]))
        for name, first, last in PHASES:
            yield from _span(name, track, (times[first][index], times[last][index]))


def _span(name: str, track: tuple[int, int], span: tuple[float, float]) -> Iterator[Event]:
    pid, index = track
    start, end = span
    if end > start:
        common = {"cat": "request", "id": index, "name": name, "pid": pid, "tid": 0}
        yield {"ph": "b", **common, "ts": _us(start)}
        yield {"ph": "e", **common, "ts": _us(end)}


def _us(time_ns: float) -> float:
    return round(float(time_ns) / NS_PER_US, 3)


@contextmanager
def _text(raw: BinaryIO, *, is_packed: bool) -> Iterator[TextIO]:
    """Write text into an open file, which stays open."""
    # No name and no time in the header: same run, same bytes.
    packed: Any = gzip.GzipFile("", "wb", 6, raw, mtime=0) if is_packed else raw
    file = io.TextIOWrapper(packed, encoding="utf-8", newline="\n", write_through=True)
    try:
        yield file
    finally:  # nothing may be written later, when the file is closed
        try:
            file.detach()
        finally:
            if is_packed:
                packed.close()
