"""Shared by the trace tests: small files, and a small sound run by hand."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from mdi_shared.errors import MiniDeepInferError
from mdi_traces.requests import RequestTrace, build_requests
from mdi_traces.run import Run
from mdi_traces.schema import ITEM_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA, Metadata


@pytest.fixture
def write(tmp_path):
    """Write a small text file and return its path."""

    def write(text: str, name: str = "trace.txt") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refusal(action: Callable[[], object]) -> str | None:
    """Return the message of the error that ours is; None when there is none."""
    try:
        action()
    except MiniDeepInferError as error:
        return str(error)
    return None


def table_of(rows: list[dict], schema: pa.Schema) -> pa.Table:
    """Rows of the given values; a column nobody gives is 0, False, a label, or null."""
    blank = {"run_id": "r", "source": "simulator", "vote": "none"}
    full = []
    for row in rows:
        values = {}
        for field in schema:
            default = None if field.nullable else blank.get(field.name, 0)
            value = row.get(field.name, default)
            values[field.name] = bool(value) if pa.types.is_boolean(field.type) else value
        full.append(values)
    return pa.Table.from_pylist(full, schema=schema)


def trace_of(**columns) -> RequestTrace:
    """A trace of columns given as lists."""
    arrays = {
        name: pa.array(values, type=REQUEST_SCHEMA.field(name).type)
        for name, values in columns.items()
    }
    return build_requests(arrays, Metadata(table="requests", source="import"))


def request_table(rows: list[dict]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return trace_of(**{name: [row.get(name) for row in rows] for name in names}).table


# Two requests on one rank: "a" has 6 prompt tokens in chunks of 4 and 2, "b" has 3, of which 1 is
# cached. "a" gives 3 tokens, "b" 1. One decode row of "b" ran in vain, and a flush ends the run.
STEPS = [
    {"kind": "prefill", "n_seqs": 1, "n_tokens": 4, "free_blocks": 7, "free_slots": 3},
    {"kind": "prefill", "n_seqs": 2, "n_tokens": 4, "free_blocks": 6, "free_slots": 2},
    {"kind": "decode", "n_seqs": 2, "n_tokens": 2, "free_blocks": 6, "free_slots": 2},
    {"kind": "decode", "n_seqs": 1, "n_tokens": 1, "free_blocks": 7, "free_slots": 3},
    {"kind": "flush", "n_seqs": 0, "n_tokens": 0, "free_blocks": 9, "free_slots": 4},
]
ITEMS = [
    {"step": 0, "req_id": "a", "q": 4, "k": 4},
    {"step": 1, "req_id": "a", "q": 2, "k": 6, "is_last_chunk": True, "emitted": 1},
    {"step": 1, "req_id": "b", "q": 2, "k": 3, "is_last_chunk": True, "emitted": 1},
    {"step": 2, "req_id": "a", "q": 1, "k": 7, "is_last_chunk": True, "emitted": 1},
    {"step": 2, "req_id": "b", "q": 1, "k": 4, "is_last_chunk": True, "dropped": True},
    {"step": 3, "req_id": "a", "q": 1, "k": 8, "is_last_chunk": True, "emitted": 1},
]
REQUESTS = [
    {"req_id": "a", "arrival_ns": 0, "prompt_len": 6, "output_len": 3, "max_tokens": 3,
     "cached_len": 0, "t_submit": 1, "t_first_sched": 100, "t_first_token": 290,
     "t_last_token": 490, "t_finish": 490, "n_recomputed_tokens": 0, "finish_reason": "length"},
    {"req_id": "b", "arrival_ns": 5, "prompt_len": 3, "output_len": 1, "max_tokens": 4,
     "cached_len": 1, "t_submit": 6, "t_first_sched": 200, "t_first_token": 290,
     "t_last_token": 290, "t_finish": 290, "n_recomputed_tokens": 0, "finish_reason": "stop"},
    {"req_id": "c", "arrival_ns": 7, "prompt_len": 900, "output_len": 0, "max_tokens": 4,
     "cached_len": 0, "t_submit": 8, "t_finish": 200, "n_recomputed_tokens": 0,
     "finish_reason": "prompt_length_exceeded"},
]  # fmt: skip
CONFIG = {"scheduler": {"num_blocks": 10, "max_num_seqs": 4, "state_slot_ratio": 1.0}}


def make_run(*, steps=None, items=None, requests=None, config=CONFIG, ranks=1, left=(9, 4)) -> Run:
    """Return the sound run above, with changes: {row: {column: value}} per table."""

    def changed(rows, changes):
        return [{**row, **(changes or {}).get(index, {})} for index, row in enumerate(rows)]

    step_rows = []
    for rank in range(ranks):
        for number, row in enumerate(STEPS):
            t = 100 * (number + 1)
            step_rows.append({
                "rank": rank, "step": number, "n_tokens_padded": row["n_tokens"], "t_sched": t,
                "t_launch": t + 10, "t_dev_start": t + 20, "t_dev_end": t + 80, "t_done": t + 90,
                **(row if rank == 0 else
                   {"kind": f"idle_{row['kind']}" if row["n_seqs"] else "flush",
                    "free_blocks": 9, "free_slots": 4}),
            })  # fmt: skip
    config = {**config, "left_free": {"free_blocks": [left[0]] * ranks,
                                      "free_slots": [left[1]] * ranks}}  # fmt: skip
    item_rows = [{**row, "cached": row["k"] - row["q"]} for row in ITEMS]
    return Run(
        table_of(changed(step_rows, steps), STEP_SCHEMA),
        request_table(changed(REQUESTS, requests)),
        Metadata(table="requests", source="simulator", clock="virtual", config=config, seed=1),
        table_of(changed(item_rows, items), ITEM_SCHEMA),
    )
