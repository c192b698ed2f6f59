"""Makes the tables of a run of what `recorder.py` collected.

The request table is made at once; steps and items are made when they are asked for.

Read next: `spread.py` (stretches and stays become steps and items), `schema.py` (the columns).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import ModelShape
from mdi_shared.plan import DECODE, IDLE_DECODE, STEP_KINDS
from mdi_shared.request import NOT_ARRIVED
from mdi_shared.vote import ALL, NONE, rule_at
from mdi_traces import recorder as rec
from mdi_traces.columns import Bools, Ints, flags, ints, numbers, texts
from mdi_traces.recorder import NOT_YET, RankRecorder, RequestLog
from mdi_traces.requests import RequestTrace, put_column
from mdi_traces.run import Run
from mdi_traces.schema import ITEM_SCHEMA, STEP_SCHEMA, STEPS, Metadata
from mdi_traces.spans import TokenSpans
from mdi_traces.spread import RankSteps
from mdi_traces.tokens import last_tokens, token_spans

_MS = 1e6  # ns in a millisecond
_NAN = float("nan")
_PIECE_STEPS = 1 << 17  # rows of a step table made at a time


def build_run(
    recorders: Sequence[RankRecorder],
    trace: RequestTrace,
    metadata: Metadata,
    config: SchedulerConfig,
    shape: ModelShape,
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
    ranks = [RankSteps(recorder, shape, keep=int(config.enable_zos)) for recorder in recorders]
    reasons = dict.fromkeys(range(len(trace)), unfinished_reason)
    reasons.update(dict.fromkeys(not_arrived, NOT_ARRIVED))
    requests = _requests(ranks, trace, arrived_ns, reasons)
    if not config.enable_prefix_cache:
        for name in ("hit_tokens", "known_tokens"):
            requests = put_column(requests, name, pa.nulls(len(trace), pa.int32()))
    pools = [recorder.final_pool for recorder in recorders]
    known = [] if None in pools else pools
    left = {name: [pool[i] for pool in known if pool] for i, name in enumerate(rec.POOL_FIELDS)}
    metadata = replace(metadata, table=STEPS, config={**metadata.config, "left_free": left})

    def steps() -> Iterator[pa.Table]:
        """Tables are large, and some not wanted: they are made when asked for, in pieces."""
        for rank in ranks:
            for first in range(0, rank.rows, _PIECE_STEPS):
                part = rank.part(first, min(first + _PIECE_STEPS, rank.rows))
                yield _steps(part, metadata, config, run_id)

    def items() -> Iterator[pa.Table]:
        names = texts(trace.table["req_id"].to_pylist())
        for rank in ranks:
            for first, stop in rank.portions():
                yield _item_table(rank, names, run_id, first, stop)

    def spans() -> Iterator[TokenSpans]:
        for rank in ranks:
            yield from token_spans(rank)

    return Run(steps, requests, metadata, items, spans=spans)


def _steps(rank: RankSteps, metadata: Metadata, config: SchedulerConfig, run_id: str) -> pa.Table:
    step, work, graph_size = rank.times(), rank.works(), rank.measured[:, 1]
    decoding, repetition = rank.is_kind(DECODE, IDLE_DECODE), rank.repetition
    decode_step = rank.per_step("decode_step") + np.where(decoding, repetition, 0)
    vote = _votes(rank, decode_step, config)
    wants = (vote != rec.VOTES.index(NONE)) & (repetition <= rank.per_step("n_wanting"))
    want = np.where(repetition == 0, rank.per_step("want") == 1, wants)
    gpu_ms = (step["t_dev_end"] - step["t_dev_start"]) / _MS
    sample_ms = rank.measured[:, 0] / _MS
    rows, target = work["rows"], rank.per_step("target_ns", first_only=True)
    padded = np.where(decoding, np.maximum(rows, graph_size), rank.per_step("n_tokens_padded"))
    prompt_rows = rank.counted("prompts", "q")
    values: dict[str, Any] = {
        **step, **work,  # most are stored under the names of their columns
        **{name: rank.pool(name) for name in rec.POOL_FIELDS},
        **{name: rank.queue(name) for name in ("n_waiting", "n_running")},
        "n_dropped": rank.counted("dropped"), "n_accepted": rank.counted("accepted", "drafts"),
        **{name: rank.per_step(name, first_only=True) for name in (
            "n_chunked", "n_finished", "n_ignored", "n_preempted")},
        "run_id": run_id, "source": metadata.source,
        "step": rank.numbers(),
        "rank": rank.rank, "dp": rank.rank, "ep": rank.rank, "cp": 0,
        "kind": _labels(rank.per_step("kind"), STEP_KINDS),
        "gpu_ms": gpu_ms, "fwd_ms": gpu_ms - sample_ms, "sample_ms": sample_ms,
        "cpu_sched_ms": (step["t_planned"] - step["t_sched"] - step["wait_ns"]) / _MS,
        "cpu_proc_ms": step["process_ns"] / _MS, "wait_ms": step["wait_ns"] / _MS,
        "n_tokens": rows, "n_tokens_padded": padded, "n_consumer_rows": work["consumer_rows"],
        "n_cached": rank.counted("prompts", "k") - prompt_rows, "n_prompt_rows": prompt_rows,
        "n_draft_rows": np.where(decoding, rows - work["n_seqs"], 0),
        "graph_size": graph_size, "decode_step": decode_step,
        "vote": _labels(vote, rec.VOTES),
        "want": flags(want),
        "pred_ms": np.where(step["pred_ns"] >= 0, step["pred_ns"] / _MS, _NAN),
        "target_ms": np.where(target > 0, target / _MS, _NAN),
        "moe_imbalance": rank.measured[:, 2],
        **_host_times(rank, step), **_copies(rank, config),
    }  # fmt: skip
    return _table(values, STEP_SCHEMA, rank.rows)


def _copies(rank: RankSteps, config: SchedulerConfig) -> dict[str, pa.Array]:
    names = ("n_restored", "n_saved")
    if not config.enable_prefix_cache:
        return dict.fromkeys(names, pa.nulls(rank.rows, pa.int32()))
    return {name: numbers(rank.per_step(name, first_only=True), pa.int32()) for name in names}


def _host_times(rank: RankSteps, step: dict[str, Ints]) -> dict[str, pa.Array]:
    """What only a real run knows of its host's time and of the device's between steps, in ms."""
    hosts = rank.of_part(rank.entries["hosts"])
    if not len(hosts["t_enqueued"]):
        names = ("ingress_ms", "cpu_prep_ms", "cpu_launch_ms", "gap_ms")
        return dict.fromkeys(names, pa.nulls(rank.rows, pa.float32()))
    every = np.ones(rank.rows, dtype=bool)
    columns: dict[str, tuple[Ints, Bools]] = {
        "ingress_ms": (hosts["ingress_ns"], hosts["ingress_ns"] != NOT_YET),
        "cpu_prep_ms": (step["t_launch"] - step["t_planned"], every),
        "cpu_launch_ms": (hosts["t_enqueued"] - step["t_launch"], every),
        "gap_ms": (
            step["t_dev_start"] - step["device_free"],
            rank.first + np.arange(rank.rows) > 0,
        ),
    }
    return {name: numbers(ns / _MS, pa.float32(), valid) for name, (ns, valid) in columns.items()}


def _votes(rank: RankSteps, decode_step: Ints, config: SchedulerConfig) -> Ints:
    """The voting rule of each step; the few distinct counters are looked up once.

    A policy that is asked at each turn has one rule, other than that of a vote at the very start.
    """
    first = rank.entries["stretches"]["vote"][:1]
    if len(first) and first[0] != rec.VOTES.index(ALL):
        return np.full(rank.rows, first[0])
    distinct, where = np.unique(decode_step, return_inverse=True)
    intervals = config.prefill_attempt_interval, config.prefill_any_attempt_interval
    found = [rec.VOTES.index(rule_at(step, *intervals)) for step in distinct.tolist()]
    return np.array(found, dtype=np.int64)[where]


def _item_table(rank: RankSteps, req_ids: pa.Array, run_id: str, first: int, stop: int) -> pa.Table:
    items = rank.items(first, stop)
    values: dict[str, Any] = {
        **items,
        "run_id": run_id,
        "step": rank.numbers()[items["step_row"]],
        "rank": rank.rank,
        "req_id": pa.DictionaryArray.from_arrays(
            numbers(rank.request_of[items["seq_id"]], pa.int32()), req_ids
        ),
        "cached": items["k"] - items["q"],
        "is_last_chunk": flags(items["is_last_chunk"]),
        "dropped": flags(items["dropped"]),
    }
    return _table(values, ITEM_SCHEMA, len(items["q"]))


def _requests(
    ranks: Sequence[RankSteps],
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
    is_open = ~complete & (lengths > 0)
    for rank in ranks if is_open.any() else ():
        seqs = [seq for seq, log in enumerate(rank.requests) if is_open[log.row]]
        for seq, time_ns in last_tokens(rank, seqs).items():
            last[rank.requests[seq].row] = time_ns
    t_submit = _submit_times(ranks, arrival, out["rank"])
    per_token = (last - first) / _MS / np.maximum(lengths - 1, 1)
    columns: dict[str, tuple[Any, Bools | None]] = {
        "arrival_ns": (arrival, None), "output_len": (lengths, None),
        **{name: (out[name], served) for name in (
            "rank", "n_chunks", "n_preempt", "n_recomputed_tokens", "hit_tokens",
            "known_tokens")},
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


def _submit_times(ranks: Sequence[RankSteps], arrival: Ints, rank_of: Ints) -> Ints:
    """When the scheduler got each request: a step's planning begins with a look for arrivals."""
    out = np.full(len(arrival), NOT_YET, dtype=np.int64)
    for rank in ranks:
        polls, mine = rank.times()["t_sched"], rank_of == rank.rank
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
