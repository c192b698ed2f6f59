"""Spreads what `recorder.py` collected into the tables of a run.

A batch that was repeated becomes one row per step again: contexts grow by one, everything that a
repetition cannot change is copied. Steps that were launched and never processed (a run cut off by
its time limit) are left out.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.work import StepWork
from mdi_shared.plan import DECODE, IDLE_DECODE, STEP_KINDS
from mdi_shared.request import NOT_ARRIVED
from mdi_shared.vote import rule_at
from mdi_traces import recorder as rec
from mdi_traces.columns import Bools, Ints, flags, ints, numbers, texts
from mdi_traces.recorder import NOT_YET, RankRecorder, RequestLog
from mdi_traces.requests import RequestTrace, put_column
from mdi_traces.run import Run
from mdi_traces.schema import ITEM_SCHEMA, STEP_SCHEMA, STEPS, Metadata

_MS = 1e6  # ns in a millisecond
_PIECE_ITEMS = 1 << 16  # rows of an item table made at a time
_NAN = float("nan")


def build_run(
    recorders: Sequence[RankRecorder],
    trace: RequestTrace,
    metadata: Metadata,
    config: SchedulerConfig,
    *,
    run_id: str,
    arrived_ns: dict[int, int],
    unfinished_reason: str,
    not_arrived: Sequence[int] = (),
) -> Run:
    """Return the run that `recorders` (one per rank, in order) saw while serving `trace`.

    `arrived_ns` gives the arrival of closed-loop turns by trace row; `unfinished_reason` is
    written for every request without an end, but for the rows of `not_arrived`: they say so.
    """
    ranks = [_Rank(recorder) for recorder in recorders]
    steps = pa.concat_tables([_steps(rank, metadata, config, run_id) for rank in ranks])
    reasons = dict.fromkeys(range(len(trace)), unfinished_reason)
    reasons.update(dict.fromkeys(not_arrived, NOT_ARRIVED))
    requests = _requests(ranks, trace, arrived_ns, reasons)
    pools = [recorder.final_pool for recorder in recorders]
    known = [] if None in pools else pools
    left = {name: [pool[i] for pool in known if pool] for i, name in enumerate(rec.POOL_FIELDS)}
    metadata = replace(metadata, table=STEPS, config={**metadata.config, "left_free": left})

    def pieces() -> Iterator[pa.Table]:
        """Item tables are large and often not wanted: they are made when asked for."""
        names = texts(trace.table["req_id"].to_pylist())
        for rank in ranks:
            for first, stop in rank.portions():
                yield _item_table(rank, names, run_id, first, stop)

    return Run(
        steps=steps,
        requests=requests,
        metadata=metadata,
        items=lambda: pa.concat_tables(list(pieces()) or [ITEM_SCHEMA.empty_table()]),
        pieces=pieces,
    )


class _Rank:
    """One rank's arrays with names, and the map from step rows to the batches they repeat."""

    def __init__(self, recorder: RankRecorder) -> None:
        self.rank = recorder.rank
        self.requests = recorder.requests
        self.rows = recorder.num_processed
        self.batch = _fields(recorder.batches, rec.BATCH_FIELDS)
        self.step: dict[str, Ints] = {}  # what each step has of its own
        for array_name, names in rec.STEP_FIELDS.items():
            self.step |= _fields(getattr(recorder, array_name), names, self.rows)
        self.is_real = len(recorder.hosts) > 0
        measured = np.array(recorder.measured).reshape(-1, len(rec.MEASURED_FIELDS))[: self.rows]
        self.measured = measured if len(measured) else np.tile((0.0, 0.0, _NAN), (self.rows, 1))
        self.items = np.array(recorder.items, dtype=np.int32)  # large; all values are lengths, ids
        self.dropped = np.array(recorder.dropped, dtype=np.int64).reshape(-1, 2)
        self.accepted = np.array(recorder.accepted, dtype=np.int64).reshape(-1, 3)
        rows = np.arange(self.rows)
        self.batch_of = np.searchsorted(self.batch["row"], rows, side="right") - 1
        self.shift = rows - self.batch["row"][self.batch_of]

    def portions(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of step rows that have about `_PIECE_ITEMS` items each, one at least."""
        ends = np.cumsum(self.batch["n_items"][self.batch_of])
        first = 0
        while first < self.rows:
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + _PIECE_ITEMS, side="right"))
            yield first, max(stop, first + 1)
            first = max(stop, first + 1)

    def per_step(self, name: str, *, first_only: bool = False) -> Ints:
        """A batch field for each step; with `first_only`, 0 where the batch is a repetition."""
        values = self.batch[name][self.batch_of]
        return np.where(self.shift == 0, values, 0) if first_only else values


def _fields(flat: "array[int]", names: Sequence[str], rows: int | None = None) -> dict[str, Ints]:
    table = np.array(flat, dtype=np.int64).reshape(-1, len(names))[:rows]
    return {name: table[:, i] for i, name in enumerate(names)}


def _steps(rank: _Rank, metadata: Metadata, config: SchedulerConfig, run_id: str) -> pa.Table:
    step, graph_size = rank.step, rank.measured[:, 1]
    is_prefill, idle = step["is_prefill"] == 1, rank.per_step("n_items") == 0
    kind = rank.per_step("kind")
    decoding = np.isin(kind, [STEP_KINDS.index(DECODE), STEP_KINDS.index(IDLE_DECODE)])
    decode_step = rank.per_step("decode_step") + np.where(decoding, rank.shift, 0)
    gpu_ms = (step["t_dev_end"] - step["t_dev_start"]) / _MS
    sample_ms = rank.measured[:, 0] / _MS
    own = {name: np.where(idle, 0, step[name]) for name in StepWork._fields}
    rows, target = own["rows"], rank.per_step("target_ns", first_only=True)
    padded = np.where(is_prefill, rank.per_step("n_tokens_padded"), np.maximum(rows, graph_size))
    values: dict[str, Any] = {
        **step, **own,  # most are stored under the names of their columns
        **{name: rank.per_step(name, first_only=True) for name in (
            "n_chunked", "n_finished", "n_ignored", "n_preempted")},
        "run_id": run_id, "source": metadata.source,
        "step": rank.per_step("step") + rank.shift,
        "rank": rank.rank, "dp": rank.rank, "ep": rank.rank, "cp": 0,
        "kind": _labels(kind, STEP_KINDS),
        "gpu_ms": gpu_ms, "fwd_ms": gpu_ms - sample_ms, "sample_ms": sample_ms,
        "cpu_sched_ms": (step["t_planned"] - step["t_sched"] - step["wait_ns"]) / _MS,
        "cpu_proc_ms": step["process_ns"] / _MS, "wait_ms": step["wait_ns"] / _MS,
        "n_tokens": rows, "n_tokens_padded": padded, "n_consumer_rows": own["consumer_rows"],
        "n_cached": np.where(is_prefill, own["sum_k"] - rows, 0),
        "n_draft_rows": np.where(is_prefill, 0, rows - own["n_seqs"]),
        "graph_size": graph_size, "decode_step": decode_step,
        "vote": _labels(_votes(decode_step, config), rec.VOTES),
        "want": flags(rank.per_step("want", first_only=True) == 1),
        "pred_ms": np.where(step["pred_ns"] >= 0, step["pred_ns"] / _MS, _NAN),
        "target_ms": np.where(target > 0, target / _MS, _NAN),
        "moe_imbalance": rank.measured[:, 2],
        **_host_times(rank),
    }  # fmt: skip
    return _table(values, STEP_SCHEMA, rank.rows)


def _host_times(rank: _Rank) -> dict[str, pa.Array]:
    """What only a real run knows of its host's time and of the device's between steps, in ms."""
    if not rank.is_real:
        names = ("ingress_ms", "cpu_prep_ms", "cpu_launch_ms", "gap_ms")
        return dict.fromkeys(names, pa.nulls(rank.rows, pa.float32()))
    step, every = rank.step, np.ones(rank.rows, dtype=bool)
    ended = np.concatenate((step["t_dev_start"][:1], step["t_dev_end"][:-1]))
    columns: dict[str, tuple[Ints, Bools]] = {
        "ingress_ms": (step["ingress_ns"], step["ingress_ns"] != NOT_YET),
        "cpu_prep_ms": (step["t_launch"] - step["t_planned"], every),
        "cpu_launch_ms": (step["t_enqueued"] - step["t_launch"], every),
        "gap_ms": (step["t_dev_start"] - ended, np.arange(rank.rows) > 0),
    }
    return {name: numbers(ns / _MS, pa.float32(), valid) for name, (ns, valid) in columns.items()}


def _votes(decode_step: Ints, config: SchedulerConfig) -> Ints:
    """The voting rule of each step; the few distinct counters are looked up once."""
    distinct, where = np.unique(decode_step, return_inverse=True)
    intervals = config.prefill_attempt_interval, config.prefill_any_attempt_interval
    found = [rec.VOTES.index(rule_at(step, *intervals)) for step in distinct.tolist()]
    return np.array(found, dtype=np.int64)[where]


def _item_table(rank: _Rank, req_ids: pa.Array, run_id: str, first: int, stop: int) -> pa.Table:
    items = _items(rank, [log.row for log in rank.requests], first, stop)
    count = len(items["q"])
    values: dict[str, Any] = {
        **items,
        "run_id": run_id,
        "step": (rank.per_step("step") + rank.shift)[items["step_row"]],
        "rank": rank.rank,
        "req_id": pa.DictionaryArray.from_arrays(numbers(items["req_row"], pa.int32()), req_ids),
        "cached": items["k"] - items["q"],
        "is_last_chunk": flags(items["is_last_chunk"]),
        "dropped": flags(items["dropped"]),
    }
    return _table(values, ITEM_SCHEMA, count)


def _items(
    rank: _Rank, row_of_seq: list[int], first: int = 0, stop: int | None = None
) -> dict[str, NDArray[Any]]:
    """Spread the batches of steps `first` up to `stop` into one entry per sequence and step.

    `step_row` indexes the step table.
    """
    sizes = rank.batch["n_items"].astype(np.int32)
    batch_of = rank.batch_of[first:stop]
    per_row = sizes[batch_of]
    local_row = np.repeat(np.arange(len(per_row), dtype=np.int32), per_row)
    first_item = np.cumsum(per_row) - per_row
    index = np.arange(int(per_row.sum()), dtype=np.int32) - first_item.astype(np.int32)[local_row]
    batch_start = ((np.cumsum(sizes) - sizes) * len(rec.ITEM_FIELDS)).astype(np.int32)
    at = batch_start[batch_of][local_row] + index
    size = per_row[local_row]
    step_row = local_row + np.int32(first)
    seq, q, k = (rank.items[at + i * size] for i in range(len(rec.ITEM_FIELDS)))
    dropped = np.zeros(len(seq), dtype=bool)
    accepted = np.zeros(len(seq), dtype=np.int32)
    late, drafts = (
        marks[(marks[:, 0] >= first) & (marks[:, 0] < first + len(per_row))]
        for marks in (rank.dropped, rank.accepted)
    )
    dropped[first_item[late[:, 0] - first] + late[:, 1]] = True
    accepted[first_item[drafts[:, 0] - first] + drafts[:, 1]] = drafts[:, 2]
    goes_on = (rank.per_step("n_chunked") == 1)[step_row] & (index == size - 1)
    return {
        "step_row": step_row,
        "req_row": np.array(row_of_seq, dtype=np.int32)[seq],
        "q": q,
        "k": k + rank.shift.astype(np.int32)[step_row],
        "is_last_chunk": ~goes_on,
        "dropped": dropped,
        "accepted": accepted,
        "emitted": np.where(goes_on | dropped, 0, 1 + accepted),
    }


def _requests(
    ranks: Sequence[_Rank],
    trace: RequestTrace,
    arrived_ns: dict[int, int],
    open_reasons: dict[int, str],
) -> pa.Table:
    table, count = trace.table, len(trace)
    logged = {log.row: log for rank in ranks for log in rank.requests}
    logs = [logged.get(row) or RequestLog(row, NOT_YET) for row in range(count)]
    out = {name: np.array([getattr(log, name) for log in logs], dtype=np.int64)
           for name in rec.REQUEST_FIELDS}  # fmt: skip
    reasons = [log.finish_reason for log in logs]
    unfinished = [open_reasons[row] if r is None else None for row, r in enumerate(reasons)]
    arrival = ints(table["arrival_ns"]).copy()
    for row, time_ns in arrived_ns.items():
        arrival[row] = time_ns
    served, times = out["rank"] != NOT_YET, ("t_first_sched", "t_first_token", "t_finish")
    sched, first, finish = (out[name] for name in times)
    complete = np.array([r in ("stop", "length") for r in reasons], dtype=bool)
    last, lengths = np.where(complete, finish, NOT_YET), out["output_len"]
    if bool((~complete & (lengths > 0)).any()):
        for rank in ranks:
            _note_last_tokens(rank, complete, last)
    t_submit = _submit_times(ranks, arrival, out["rank"])
    per_token = (last - first) / _MS / np.maximum(lengths - 1, 1)
    columns: dict[str, tuple[Any, Bools | None]] = {
        "arrival_ns": (arrival, None), "output_len": (lengths, None),
        **{name: (out[name], served) for name in (
            "rank", "n_chunks", "n_preempt", "n_recomputed_tokens")},
        **{name: (out[name], out[name] != NOT_YET) for name in times},
        "t_submit": (t_submit, t_submit != NOT_YET), "t_last_token": (last, last != NOT_YET),
        "ttft_ms": ((first - arrival) / _MS, first != NOT_YET),
        "tpot_ms": (per_token, complete & (lengths > 1)),
        "e2e_ms": ((finish - arrival) / _MS, complete),
        "queue_ms": ((sched - arrival) / _MS, sched != NOT_YET),
    }  # fmt: skip
    for name, (values, valid) in columns.items():
        table = put_column(table, name, numbers(values, table.schema.field(name).type, valid))
    for name, labels in (("finish_reason", reasons), ("unfinished_reason", unfinished)):
        table = put_column(table, name, texts(labels, table.schema.field(name).type))
    return table


def _note_last_tokens(rank: _Rank, complete: Bools, last: Ints) -> None:
    """Find when requests that did not complete got their last token; writes into `last`."""
    table = _items(rank, [log.row for log in rank.requests])
    gave = table["emitted"] > 0
    rows, times = table["req_row"][gave], rank.step["t_done"][table["step_row"][gave]]
    open_rows = ~complete[rows]
    np.maximum.at(last, rows[open_rows], times[open_rows])


def _submit_times(ranks: Sequence[_Rank], arrival: Ints, rank_of: Ints) -> Ints:
    """When the scheduler got each request: a step's planning begins with a look for arrivals."""
    out = np.full(len(arrival), NOT_YET, dtype=np.int64)
    for rank in ranks:
        polls, mine = rank.step["t_sched"], rank_of == rank.rank
        out[mine] = np.append(polls, NOT_YET)[np.searchsorted(polls, arrival[mine])]
    return out


def _labels(codes: NDArray[np.int64], names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(numbers(codes, pa.int32()), texts(names))


def _table(values: dict[str, Any], schema: pa.Schema, rows: int) -> pa.Table:
    """Put columns in the schema's order; a number or a text fills its column."""
    arrays = []
    for field in schema:
        column = values[field.name]
        if isinstance(column, str):
            column = _labels(np.zeros(rows, dtype=np.int64), [column])
        elif not isinstance(column, pa.Array):
            column = numbers(np.broadcast_to(np.asarray(column), rows), field.type)
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=schema)
