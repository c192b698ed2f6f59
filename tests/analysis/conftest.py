"""Hand-made runs: small enough that every expected number can be worked out on paper."""

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pytest

MS = 1_000_000

STEP_COLUMNS = (
    "step", "kind", "t_sched", "t_launch", "t_dev_start", "t_dev_end", "t_done",
    "n_seqs", "n_tokens", "n_chunked", "n_dropped", "free_blocks", "n_waiting", "n_running",
)  # fmt: skip
STEPS = (
    (0, "prefill", 0, 1, 2, 10, 11, 1, 128, 1, 0, 98, 1, 0),
    (1, "prefill", 11, 12, 12, 20, 21, 2, 128, 0, 0, 97, 0, 2),
    (2, "decode", 21, 22, 22, 24, 25, 2, 2, 0, 0, 97, 0, 2),
    (3, "decode", 25, 26, 26, 28, 29, 2, 2, 0, 0, 97, 0, 1),
    (4, "decode", 29, 30, 30, 32, 33, 2, 2, 0, 1, 99, 0, 0),
)
ITEM_COLUMNS = ("step", "req_id", "q", "k", "is_last_chunk", "emitted", "accepted", "dropped")
ITEMS = (
    (0, "r0", 128, 128, False, 0, 0, False),
    (1, "r0", 72, 200, True, 1, 0, False),
    (1, "r1", 56, 56, True, 1, 0, False),
    (2, "r0", 1, 201, True, 1, 0, False),
    (2, "r1", 1, 57, True, 1, 0, False),
    (3, "r0", 1, 202, True, 1, 0, False),
    (3, "r1", 1, 58, True, 1, 0, False),
    (4, "r0", 1, 203, True, 0, 0, True),
    (4, "r1", 1, 59, True, 1, 0, False),
)
REQUEST_COLUMNS = (
    "req_id", "arrival_ns", "t_submit", "t_first_sched", "t_first_token", "t_last_token",
    "t_finish", "output_len", "finish_reason", "unfinished_reason",
)  # fmt: skip
REQUESTS = (
    ("r0", 0, 0, 0, 21, 29, 29, 3, "stop", None),
    ("r1", 5, 6, 11, 21, 33, 33, 4, "length", None),
    ("r2", 8, 9, None, None, None, 9, 0, "prompt_length_exceeded", None),
    ("r3", 30, 31, None, None, None, None, 7, None, "stopped early"),
)


@dataclass(frozen=True)
class FakeMetadata:
    model: str | None = "tiny"
    hardware: str | None = "H200"
    source: str | None = "simulator"
    clock: str | None = "virtual"
    seed: int | None = 7
    config: dict = field(default_factory=lambda: {"num_blocks": 101})


@dataclass(frozen=True)
class FakeRun:
    steps: pd.DataFrame
    items: pd.DataFrame | None
    requests: pd.DataFrame
    metadata: FakeMetadata = field(default_factory=FakeMetadata)

    def but(self, **changes) -> "FakeRun":
        return replace(self, **changes)


def steps_frame(rows=STEPS, rank=0) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=STEP_COLUMNS)
    times = [name for name in STEP_COLUMNS if name.startswith("t_")]
    frame[times] = frame[times].astype("int64") * MS
    frame["kind"] = frame["kind"].astype("category")
    frame["rank"] = np.int16(rank)
    for name in ("cp", "n_preempted", "n_accepted"):
        frame[name] = 0
    frame["sum_k"] = frame["max_k"] = 100
    frame["n_consumer_rows"] = frame["n_tokens"]
    frame["cpu_sched_ms"] = np.float32(0.5)
    frame["cpu_proc_ms"] = np.float32(0.25)
    frame["wait_ms"] = np.float32("nan")
    return frame


def items_frame(rows=ITEMS, rank=0) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=ITEM_COLUMNS)
    frame["req_id"] = frame["req_id"].astype("category")
    frame["rank"] = np.int16(rank)
    return frame


def requests_frame(rows=REQUESTS) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=REQUEST_COLUMNS)
    times = [name for name in REQUEST_COLUMNS if name.startswith("t_")]
    frame[["arrival_ns", *times]] = frame[["arrival_ns", *times]].astype("float64") * MS
    frame["arrival_ns"] = frame["arrival_ns"].astype("int64")
    frame["finish_reason"] = frame["finish_reason"].astype("category")
    frame["rank"] = [0.0 if t == t else np.nan for t in frame["t_first_sched"]]
    frame["n_recomputed_tokens"] = 0
    frame["prompt_len"] = 200
    return frame


def small_run() -> FakeRun:
    return FakeRun(steps_frame(), items_frame(), requests_frame())


def empty_run() -> FakeRun:
    """A run in which nothing happened: all tables have columns and no rows."""
    full = small_run()
    return FakeRun(full.steps.iloc[:0], full.items.iloc[:0], full.requests.iloc[:0])


@pytest.fixture
def run() -> FakeRun:
    return small_run()


@pytest.fixture
def nothing() -> FakeRun:
    return empty_run()


@pytest.fixture
def two_ranks(run) -> FakeRun:
    """The small run on rank 0, and a rank 1 that only keeps it company for half the time."""
    idle = steps_frame()
    idle["rank"] = np.int16(1)
    idle["kind"] = [f"idle_{kind}" for kind in idle["kind"]]
    idle[["n_seqs", "n_tokens", "n_chunked", "n_dropped", "n_waiting", "n_running"]] = 0
    idle["wait_ms"] = np.float32(1.0)
    steps = pd.concat([run.steps.astype({"kind": object}), idle], ignore_index=True)
    return run.but(steps=steps)
