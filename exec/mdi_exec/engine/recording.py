"""Records a real run in the tables of `mdi_traces`, the ones a simulated run has.

It collects integers while the engine runs and makes tables when the engine closes; the files are
written then, atomically. Read next: `mdi_traces/recorder.py`, docs/trace-format.md.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from mdi_exec.engine.request_state import RequestState
from mdi_exec.engine.step_tokens import StepTokens
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.work import step_work
from mdi_shared.loop import Report
from mdi_shared.plan import StepPlan
from mdi_shared.prefix.contents import TokenContents
from mdi_shared.scheduler import Scheduler
from mdi_traces.columns import numbers, texts
from mdi_traces.prefixes import GRAIN
from mdi_traces.recorder import REQUEST_FIELDS, Launches, RankRecorder, RequestLog
from mdi_traces.requests import build_requests
from mdi_traces.run import Run
from mdi_traces.schema import REQUEST_SCHEMA, Metadata
from mdi_traces.tables import build_run

NO_PREDICTION = -1
NO_ARRIVAL = -1
_LOG_FIELDS = ("row", "finish_reason", *REQUEST_FIELDS)


class LaunchTimes(NamedTuple):
    """When a launch's parts were done, ns since the engine started.

    The loop looked for arrivals, a plan was made, the step was handed over, all of its work was
    with the device. `ingress_ns` is how long the newest arrival had waited by then for that look,
    NO_ARRIVAL when none had come since the step before; `wait_ns` went into waiting for other
    ranks' votes.
    """

    poll_ns: int
    planned_ns: int
    launched_ns: int
    enqueued_ns: int
    ingress_ns: int
    wait_ns: int = 0


class Recording:
    """One rank's run. `hardware` and `options` are kept as provenance; `drafting` as recorders'."""

    def __init__(
        self, shape: ModelShape, *, hardware: str, options: dict[str, Any], seed: int | None = None,
        rank: int = 0, drafting: bool = False,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.hardware = hardware
        self.options = options
        self.seed = seed
        self._recorder = RankRecorder(rank, drafting=drafting)
        self._launched: list[tuple[StepPlan, LaunchTimes]] = []  # not booked yet
        self._requests: list[RequestState] = []

    def submitted(self, state: RequestState) -> None:
        """Note that a request goes to the scheduler now; its row is its place in the trace."""
        self._recorder.submitted(len(self._requests))
        self._requests.append(state)

    def launched(self, plan: StepPlan, times: LaunchTimes) -> None:
        """Note a step handed to the device; it is booked by `catch_up`."""
        self._launched.append((plan, times))

    def catch_up(self) -> None:
        """Book what was launched: count its work. For when the engine has nothing else to do."""
        for plan, times in self._launched:
            own = Launches(times.poll_ns, times.planned_ns, times.launched_ns, times.wait_ns,
                           NO_PREDICTION)  # fmt: skip
            has_work = plan.is_prefill or plan.rows_each > 1
            work = step_work(self.shape, plan) if has_work else None
            self._recorder.launched(plan, work, own)
            self._recorder.hosted(times.ingress_ns, times.enqueued_ns)
        self._launched.clear()

    def landed(self, tokens: StepTokens, run_start_ns: int, awaited_ns: int, done_ns: int) -> None:
        """Note what a step took, when the host saw its end, and when it was done with it.

        `run_start_ns` is the engine's start on the clock of `tokens`.
        """
        self.catch_up()
        start_ns, end_ns = tokens.start_ns - run_start_ns, tokens.end_ns - run_start_ns
        self._recorder.landed_one(start_ns, end_ns, done_ns, done_ns - awaited_ns)
        self._recorder.measure(tokens.sample_ns, tokens.graph_size, tokens.moe_imbalance)

    def reported(self, report: Report, now_ns: int) -> None:
        """Note what the loop reports."""
        self._recorder.reported(report, now_ns)

    def part(self, scheduler: Scheduler) -> "RankPart":
        """Return this rank's part of the run so far, to be made into tables here or elsewhere."""
        self.catch_up()
        queues = scheduler.queues
        pool = (queues.blocks.num_free, queues.slots.num_free)
        # Of requests that have ended, memory comes back a step later: until then this is no end.
        goes_on = scheduler.num_in_flight > 0 or scheduler.has_unfinished()
        self._recorder.closed(scheduler.unfinished(), None if goes_on else pool)
        config = scheduler.config
        shares = config.block_size if config.enable_prefix_cache else 0
        return RankPart(self._recorder, [_Row.of(state, shares) for state in self._requests])

    def run(self, scheduler: Scheduler) -> Run:
        """Return the tables of this rank's run so far; who still runs is marked unfinished."""
        return self.describe(scheduler).build([self.part(scheduler)])

    def describe(self, scheduler: Scheduler, num_ranks: int = 1) -> "RunHeader":
        """Return what all ranks' parts have in common."""
        shares = scheduler.config.enable_prefix_cache
        metadata = Metadata(
            table="requests",
            source="runtime",
            clock="monotonic",
            model=self.shape.name,
            hardware=self.hardware,
            config={
                "scheduler": asdict(scheduler.config),
                "shape": asdict(self.shape),
                "ranks": num_ranks,
                **self.options,
                **({GRAIN: scheduler.config.block_size} if shares else {}),
            },
            seed=self.seed,
            hash_block_size=scheduler.config.block_size if shares else None,
        )
        return RunHeader(metadata, scheduler.config, self.shape)


class _Row(NamedTuple):
    """A request as its row in the trace."""

    req_id: str
    arrival_ns: int
    prompt_len: int
    max_tokens: int
    output_len: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    session_id: str | None
    priority: int | None
    client: str | None
    deadline_ns: int | None
    predicted_len: int | None
    hash_ids: list[int] | None

    @classmethod
    def of(cls, state: RequestState, shares: int) -> "_Row":
        """Make the row; with prefix reuse it has the keys of its blocks of `shares` tokens."""
        count = len(state.tokens) // shares if shares else 0
        keys = list(TokenContents(state.tokens, shares).keys(count)) if shares else None
        params, hints = state.params, state.params.hints
        return cls(
            state.req_id, state.arrival_ns, state.prompt_len, params.max_tokens,
            len(state.tokens) - state.prompt_len, params.temperature, params.top_p, params.top_k,
            params.rng_seed, hints.program, hints.priority or None, hints.client,
            hints.deadline_ns, hints.predicted_len, keys,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank recorded: its steps, and its requests in the order it took them. Picklable."""

    recorder: RankRecorder
    requests: list[_Row]

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data, for ranks that are no children of one process."""
        return {
            "rank": self.recorder.rank,
            "num_processed": self.recorder.num_processed,
            "final_pool": self.recorder.final_pool,
            "arrays": {
                name: base64.b64encode(values.tobytes()).decode()
                for name, values in self.recorder.arrays().items()
            },
            "logs": [
                [getattr(log, name) for name in _LOG_FIELDS] for log in self.recorder.requests
            ],
            "requests": self.requests,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RankPart":
        """Return the part that `to_plain` took apart."""
        recorder = RankRecorder(plain["rank"])
        recorder.final_pool = tuple(plain["final_pool"])
        recorder.num_processed = plain["num_processed"]
        for name, values in recorder.arrays().items():
            values.frombytes(base64.b64decode(plain["arrays"][name]))
        for row, *values in plain["logs"]:
            log = RequestLog(row, recorder.rank)
            for name, value in zip(_LOG_FIELDS[1:], values, strict=True):
                setattr(log, name, value)
            recorder.requests.append(log)
        return cls(recorder, [_Row(*row) for row in plain["requests"]])


@dataclass(frozen=True, slots=True)
class RunHeader:
    """Provenance and options of a run, the same for all its ranks. Picklable."""

    metadata: Metadata
    config: SchedulerConfig
    shape: ModelShape

    def build(self, parts: Sequence[RankPart]) -> Run:
        """Make one run of its ranks' parts, requests in order of arrival; renumbers the parts'."""
        rows = _number_blocks(_number_requests(parts))
        columns = {name: [getattr(row, name) for row in rows] for name in _Row._fields}
        trace = build_requests(
            {name: _COLUMNS[name](values) for name, values in columns.items()}, self.metadata
        )
        return build_run(
            [part.recorder for part in parts],
            trace,
            self.metadata,
            self.config,
            self.shape,
            run_id="recorded",
            arrived_ns={},
            unfinished_reason="the engine was closed",
        )


def _number_requests(parts: Sequence[RankPart]) -> list[_Row]:
    """Order all ranks' requests by arrival and tell the recorders their places."""
    order = sorted(
        (row.arrival_ns, part_index, index)
        for part_index, part in enumerate(parts)
        for index, row in enumerate(part.requests)
    )
    for place, (_, part_index, index) in enumerate(order):
        parts[part_index].recorder.requests[index].row = place
    return [parts[part_index].requests[index] for _, part_index, index in order]


def _number_blocks(rows: list[_Row]) -> list[_Row]:
    """Replace keys, which are made of the tokens and too long for a table, by numbers."""
    known: dict[int, int] = {}
    return [
        row if row.hash_ids is None else
        row._replace(hash_ids=[known.setdefault(key, len(known)) for key in row.hash_ids])
        for row in rows
    ]  # fmt: skip


def _ints(kind: pa.DataType) -> Callable[[list[int]], pa.Array]:
    return lambda values: numbers(np.array(values, dtype=np.int64), kind)


def _floats(values: list[float]) -> pa.Array:
    return numbers(np.array(values, dtype=np.float64), pa.float32())


_COLUMNS: dict[str, Callable[[list[Any]], pa.Array]] = {
    "req_id": texts,
    "arrival_ns": _ints(pa.int64()),
    **{n: _ints(pa.int32()) for n in ("prompt_len", "max_tokens", "output_len", "top_k")},
    "temperature": _floats,
    "top_p": _floats,
    "seed": lambda values: numbers(np.array(values, dtype=np.uint64), pa.uint64()),
    **{
        n: partial(pa.array, type=REQUEST_SCHEMA.field(n).type)
        for n in ("session_id", "priority", "client", "deadline_ns", "predicted_len", "hash_ids")
    },
}


def hardware_name(device: str) -> str:
    """Return what a record calls a torch device: the GPU's name, or "cpu"."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
