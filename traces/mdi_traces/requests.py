"""A request trace: what users asked for and when, checked before anything runs it.

`RequestTrace` is immutable; its methods return changed copies. It is not a queue: who sends the
requests, and when a closed-loop turn follows, is the driver's business.

Read next: `formats/` (where traces come from), `generate.py` (synthetic ones), `check.py`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.columns import Bools, Ints, codes, floats, ints, numbers, texts, valid_rows
from mdi_traces.io import require_schema, write_csv, write_jsonl, write_parquet
from mdi_traces.run import to_frame
from mdi_traces.schema import OUTPUT_COLUMNS, REQUEST_SCHEMA, REQUESTS, Metadata

if TYPE_CHECKING:
    import pandas as pd

LATEST_NS = 2**62  # half of what int64 nanoseconds hold: 146 years
_WRITERS = {".parquet": write_parquet, ".jsonl": write_jsonl, ".csv": write_csv}


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in order of arrival (`table` follows REQUEST_SCHEMA) and where they come from."""

    table: pa.Table
    metadata: Metadata

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def frame(self) -> "pd.DataFrame":
        """Return the requests as a pandas frame."""
        return to_frame(self.table)

    def head(self, count: int) -> "RequestTrace":
        """Return the first `count` requests, or all when there are fewer."""
        if count < 1:
            raise ConfigError("count", count, "must be at least 1 request")
        return replace(self, table=self.table.slice(0, count))

    def scaled(self, speed: float) -> "RequestTrace":
        """Return the trace run `speed` times as fast: arrivals and think times divided by it.

        Output columns of a recorded run are cleared: they belong to the recorded times.
        """
        if not 0 < speed < float("inf"):
            raise ConfigError("speed", speed, "must be a finite number above 0")
        table = clear_outputs(self.table)
        for name in ("arrival_ns", "think_ns"):
            times = np.rint(ints(table[name]) / speed)
            if times.max(initial=0.0) > LATEST_NS:
                raise ConfigError("speed", speed, f"moves {name} of the trace beyond "
                                  f"{LATEST_NS} ns, the latest allowed")  # fmt: skip
            ns = times.astype(np.int64)
            table = put_column(table, name, numbers(ns, pa.int64(), valid_rows(table[name])))
        note = f"times divided by {speed:g}"
        return RequestTrace(table, replace(self.metadata, notes=(*self.metadata.notes, note)))

    def to_open_loop(self) -> "RequestTrace":
        """Return the trace with think times dropped: every turn arrives at its `arrival_ns`."""
        nulls = pa.nulls(len(self), pa.int64())
        return replace(self, table=put_column(self.table, "think_ns", nulls))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as .parquet, .jsonl or .csv, by the ending of `path`, atomically.

        CSV does not carry the metadata. Raises `ConfigError` for another ending, and `TraceError`
        when the file cannot be written.
        """
        writer = _WRITERS.get(Path(path).suffix)
        if writer is None:
            raise ConfigError("path", str(path), f"must end in {', '.join(_WRITERS)}")
        writer(path, self.table, self.metadata)


def build_requests(columns: Mapping[str, Any], metadata: Metadata) -> RequestTrace:
    """Return a trace of Arrow columns: `arrival_ns`, `prompt_len`, `output_len` and any others.

    Columns left out are null, `cached_len` is 0, `max_tokens` is `output_len`, and `req_id` is
    the row number from 0. Types must be the schema's.
    """
    count = len(columns["prompt_len"])
    made = dict(columns)
    if "req_id" not in made:
        made["req_id"] = texts([str(row) for row in range(count)])
    if "cached_len" not in made:
        made["cached_len"] = numbers(np.zeros(count), pa.int32())
    made.setdefault("max_tokens", made["output_len"])
    arrays = [
        made.pop(field.name) if field.name in made else pa.nulls(count, field.type)
        for field in REQUEST_SCHEMA
    ]
    assert not made, f"columns the schema does not have: {', '.join(made)}"
    return RequestTrace(pa.Table.from_arrays(arrays, schema=REQUEST_SCHEMA), metadata)


def put_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Return the table with column `name` replaced."""
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), values)


def cut_lengths(
    trace: RequestTrace, *, max_prompt: int | None = None, max_output: int | None = None
) -> RequestTrace:
    """Return the trace with prompts and outputs cut to at most so many tokens."""
    table, metadata = trace.table, trace.metadata
    cuts = {"prompt_len": max_prompt, "output_len": max_output, "max_tokens": max_output}
    for name, most in cuts.items():
        if most is not None:
            shorter = np.minimum(ints(table[name]), most)
            table = put_column(table, name, numbers(shorter, table.schema.field(name).type))
    cached = np.minimum(ints(table["cached_len"]), ints(table["prompt_len"]) - 1)
    table = put_column(table, "cached_len", numbers(cached, pa.int32()))
    note = f"lengths cut: prompts at {max_prompt}, outputs at {max_output}"
    if max_prompt is not None or max_output is not None:
        metadata = replace(metadata, notes=(*metadata.notes, note))
    return RequestTrace(table, metadata)


def clear_outputs(table: pa.Table) -> pa.Table:
    """Return the request table as an input: everything a run adds is null."""
    for name in OUTPUT_COLUMNS:
        if table[name].null_count < len(table):
            nulls = pa.nulls(len(table), table.schema.field(name).type)
            table = put_column(table, name, nulls)
    return table


class Problem(NamedTuple):
    """A rule that a request breaks: 0-based row, column, and what is wrong with which value."""

    row: int
    column: str
    text: str


def validate_requests(
    table: pa.Table, file: str, *, place: Callable[[int], tuple[str, int]] | None = None
) -> None:
    """Raise `TraceError` for the first broken rule, naming file, row, column and value.

    `place` gives file and line of a 0-based row; without it rows count from 1.
    """
    require_schema(table, REQUESTS, file)
    if len(table) == 0:
        raise TraceError(file, "holds no requests")
    for problem in request_problems(table):
        where, row = (file, problem.row + 1) if place is None else place(problem.row)
        raise TraceError(where, problem.text, row=row, column=problem.column)


def request_problems(table: pa.Table) -> Iterator[Problem]:
    """Yield the first offending row of each rule that some row breaks."""
    prompt, cached = ints(table["prompt_len"]), ints(table["cached_len"])
    arrival, output = ints(table["arrival_ns"]), ints(table["output_len"])
    ended = valid_rows(table["finish_reason"]) | valid_rows(table["unfinished_reason"])
    at_least_one = "{} must be at least 1 token"
    yield from _first(prompt < 1, "prompt_len", at_least_one, prompt)
    yield from _first((output < 1) & ~ended, "output_len", at_least_one, output)
    yield from _first(output < 0, "output_len", "{} must not be negative", output)
    limit = ints(table["max_tokens"])
    yield from _first(limit < 1, "max_tokens", at_least_one, limit)
    yield from _first(limit < output, "max_tokens", "{} is less than output_len", limit)
    yield from _first(cached < 0, "cached_len", "{} must not be negative", cached)
    yield from _first(cached >= prompt, "cached_len", "{} must be less than prompt_len: the last "
                      "prompt token is always computed", cached)  # fmt: skip
    yield from _first(arrival < 0, "arrival_ns", "{} must not be negative", arrival)
    yield from _first(arrival > LATEST_NS, "arrival_ns", f"{{}} must be at most {LATEST_NS}, which "
                      "leaves room for the run after it", arrival)  # fmt: skip
    yield from _first(_falls(arrival), "arrival_ns", "{} is earlier than the row before; order "
                      "rows by arrival (mdi convert --sort, or sort=True)", arrival)  # fmt: skip
    for name in ("deadline_ns", "predicted_len"):
        values = ints(table[name], null=1)
        words = f"{{}} must be from 1 to {LATEST_NS}; null = not known"
        yield from _first((values < 1) | (values > LATEST_NS), name, words, values)
    rank = ints(table["rank"])
    yield from _first(rank < 0, "rank", "{} must not be negative; null = any rank", rank)
    yield from _sampling(table)
    yield from _duplicates(table)
    yield from _sessions(table)


def _sampling(table: pa.Table) -> Iterator[Problem]:
    """Sampling options are held to the rules that the engine has for them; null is the default."""
    temperature, top_p = floats(table["temperature"]), floats(table["top_p"])
    top_k = ints(table["top_k"], null=-1)
    given = valid_rows(table["temperature"])
    yield from _first(given & ~((temperature >= 0) & np.isfinite(temperature)), "temperature",
                      "{} must be at least 0 and finite", temperature)  # fmt: skip
    given = valid_rows(table["top_p"])
    yield from _first(given & ~((top_p > 0) & (top_p <= 1)), "top_p",
                      "{} must be above 0 and at most 1", top_p)  # fmt: skip
    yield from _first((top_k < 1) & (top_k != -1), "top_k",
                      "{} must be at least 1, or -1 (off)", top_k)  # fmt: skip


def _first(bad: Bools, column: str, text: str, values: NDArray[Any]) -> Iterator[Problem]:
    if bad.any():
        row = int(bad.argmax())
        yield Problem(row, column, text.format(values[row]))


def _falls(values: Ints) -> Bools:
    falls = np.zeros(len(values), dtype=bool)
    falls[1:] = values[1:] < values[:-1]
    return falls


def _duplicates(table: pa.Table) -> Iterator[Problem]:
    index, names = codes(table["req_id"])
    if len(names) == len(index):
        return
    repeats = np.ones(len(index), dtype=bool)
    repeats[np.unique(index, return_index=True)[1]] = False
    row = int(repeats.argmax())
    first = int((index == index[row]).argmax())
    yield Problem(row, "req_id", f"{names[index[row]]!r} is also the id of row {first + 1}")


def _sessions(table: pa.Table) -> Iterator[Problem]:
    """Turns must ascend inside a session, and a think time needs a turn to come after."""
    think, closed = ints(table["think_ns"]), valid_rows(table["think_ns"])
    yield from _first(closed & (think < 0), "think_ns", "{} must not be negative", think)
    if think.astype(float).sum() > LATEST_NS:
        longest = think == think.max()
        yield from _first(longest, "think_ns", f"{{}} is too long: all think times together must "
                          f"be at most {LATEST_NS}", think)  # fmt: skip
    session, names = codes(table["session_id"])
    turn = ints(table["turn"], null=-1)
    placed = (session >= 0) & valid_rows(table["turn"])
    yield from _first(placed & (turn < 0), "turn", "{} must not be negative", turn)
    yield from _first(closed & ~placed, "think_ns", "{} needs session_id and turn", think)
    rows = np.flatnonzero(placed)
    rows = rows[np.argsort(session[rows], kind="stable")]
    same = np.zeros(len(rows), dtype=bool)  # the row before is of the same session
    same[1:] = session[rows][1:] == session[rows][:-1]
    wrong = same & np.concatenate([[False], turn[rows][1:] <= turn[rows][:-1]])
    if wrong.any():
        row = int(rows[wrong].min())
        yield Problem(row, "turn", f"{turn[row]} comes after a turn as late or later of session "
                      f"{names[session[row]]!r}")  # fmt: skip
    orphans = rows[~same & closed[rows]]
    if len(orphans):
        row = int(orphans.min())
        yield Problem(row, "think_ns", f"{think[row]} on the first turn of session "
                      f"{names[session[row]]!r}: there is nothing to come after")  # fmt: skip
