"""What happened to single requests, as spans of time: waiting, prompt chunks, decode, preempted.

A span is one state of one request without a break. They come from step items, and where these were
not recorded from the request's own times.

Read next: `charts.py`, which draws them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from mdi_analysis.frames import NS_PER_S, Floats, RunLike, floats, has_items, series
from mdi_shared.plan import MIXED

WAITING, PREFILL, DECODE, PREEMPTED = "waiting", "prefill", "decode", "preempted"
STATES = (WAITING, PREFILL, DECODE, PREEMPTED)
_COLUMNS = ["step", "rank", "req_id", "q", "k", "emitted", "dropped"]


class Span(NamedTuple):
    """A state of the request in row `row` of those asked about, in s since the run's first ns."""

    row: int
    state: str
    start_s: float
    end_s: float
    note: str


def spans_of(run: RunLike, chosen: Iterable[int]) -> list[Span]:
    """Return the spans of the requests in these rows of the table, in order of row and time."""
    requests = run.requests.iloc[list(chosen)].reset_index(drop=True)
    found: list[Span] = []
    if not has_items(run):
        for row in range(len(requests)):
            found += _by_times(row, requests.iloc[row])
        return found
    ids = series(requests, "requests", "req_id")
    prompts = requests.get("prompt_len", pd.Series(0, requests.index))
    steps = _steps_of(run, dict(zip(ids, prompts, strict=True)))
    for row, (name, arrival) in enumerate(
        zip(ids, floats(requests, "requests", "arrival_ns"), strict=True)
    ):
        found += _merged(row, arrival, steps.get(name, []))
    return found


class _Part(NamedTuple):
    """A request's share of one step."""

    is_prompt: bool
    start_ns: float
    end_ns: float
    rows: int
    context: int
    emitted: int


def _steps_of(run: RunLike, wanted: Mapping[str, int]) -> dict[str, list[_Part]]:
    """Return what requests had in each step, in order of time; `wanted` are prompts by their id.

    Rows that count only. Of a mixed step, those are of a prompt that are several, or end in it.
    """
    steps = run.steps.set_index(["rank", "step"])[["kind", "t_dev_start", "t_done"]]
    found: dict[str, list[_Part]] = {}
    for piece in _item_frames(run):
        mine = piece[piece["req_id"].isin(list(wanted)) & ~piece["dropped"]]
        both = mine[_COLUMNS].join(steps, on=["rank", "step"])
        columns = [both[name].tolist() for name in
                   ("req_id", "kind", "t_dev_start", "t_done", "q", "k", "emitted")]  # fmt: skip
        for name, kind, start, end, rows, context, emitted in zip(*columns, strict=True):
            in_mixed = kind == MIXED and (rows > 1 or context <= wanted[name])
            part = _Part(kind == "prefill" or in_mixed, start, end, rows, context, emitted)
            found.setdefault(str(name), []).append(part)
    for parts in found.values():
        parts.sort(key=lambda part: part.start_ns)
    return found


def _item_frames(run: RunLike) -> Iterator[pd.DataFrame]:
    """Yield the items piece by piece where a run can, so that not all are in memory."""
    pieces = getattr(run, "item_pieces", None)
    if pieces is None:
        assert run.items is not None, "whoever asks has seen that there are items"
        yield run.items
        return
    for piece in pieces():
        yield piece.to_pandas()


def _merged(row: int, arrival: float, parts: list[_Part]) -> Iterator[Span]:
    """Yield spans: chunks one by one, decode steps together, and what lies between."""
    at, state, tokens, begun = arrival, WAITING, 0, 0.0
    for part in parts:
        if part.is_prompt:
            if state == DECODE:
                yield _span(row, DECODE, begun, at, f"{tokens:,} tokens")
                state = PREEMPTED
            gap = PREEMPTED if state == PREEMPTED else WAITING
            if part.start_ns > at:
                yield _span(row, gap, at, part.start_ns, "")
            text = f"chunk of {part.rows:,}, context {part.context:,}"
            yield _span(row, PREFILL, part.start_ns, part.end_ns, text)
            tokens, begun = part.emitted, part.end_ns
            state = DECODE if part.emitted else state
        else:
            tokens += part.emitted
            state = DECODE
        at = part.end_ns
    if state == DECODE and at > begun:
        yield _span(row, DECODE, begun, at, f"{tokens:,} tokens")


def _by_times(row: int, request: pd.Series) -> Iterator[Span]:
    """Yield the spans that a request's own times tell."""
    names = ("arrival_ns", "t_first_sched", "t_first_token", "t_finish")
    times: Floats = np.array([np.nan if pd.isna(request[n]) else request[n] for n in names], float)
    for state, start, end in zip((WAITING, PREFILL, DECODE), times, times[1:], strict=False):
        if end > start:
            yield _span(row, state, start, end, "")


def _span(row: int, state: str, start_ns: float, end_ns: float, note: str) -> Span:
    return Span(row, state, start_ns / NS_PER_S, end_ns / NS_PER_S, note)
