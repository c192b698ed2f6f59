"""Records a real run in the tables of `mdi_traces`, the ones a simulated run has.

It collects integers while the engine runs and makes tables when the engine closes; the files are
written then, atomically. Read next: `mdi_traces/recorder.py`, docs/trace-format.md.
"""

from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mdi_exec.request_state import RequestState
from mdi_exec.runner import StepTokens
from mdi_shared.loop import Report
from mdi_shared.plan import StepPlan
from mdi_shared.scheduler import Scheduler
from mdi_shared.shape import ModelShape
from mdi_shared.work import step_work
from mdi_traces.columns import numbers, texts
from mdi_traces.recorder import RankRecorder
from mdi_traces.requests import build_requests
from mdi_traces.run import Run
from mdi_traces.schema import Metadata
from mdi_traces.tables import build_run

NO_PREDICTION = -1
NO_ARRIVAL = -1


class LaunchTimes(NamedTuple):
    """When a launch's parts were done, ns since the engine started.

    The loop looked for arrivals, a plan was made, the step was handed over, all of its work was
    with the device. `ingress_ns` is how long the newest arrival had waited by then for that look,
    NO_ARRIVAL when none had come since the step before.
    """

    poll_ns: int
    planned_ns: int
    launched_ns: int
    enqueued_ns: int
    ingress_ns: int


class Recording:
    """One engine's run. `hardware` and `options` are kept as provenance."""

    def __init__(
        self, shape: ModelShape, *, hardware: str, options: dict[str, Any], seed: int | None = None
    ) -> None:
        self.shape = shape
        self.hardware = hardware
        self.options = options
        self.seed = seed
        self._recorder = RankRecorder(0)
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
            own = (times.poll_ns, times.planned_ns, times.launched_ns, 0, NO_PREDICTION)
            self._recorder.launched(plan, step_work(self.shape, plan), own)
            self._recorder.hosted(times.ingress_ns, times.enqueued_ns)
        self._launched.clear()

    def landed(self, tokens: StepTokens, run_start_ns: int, awaited_ns: int, done_ns: int) -> None:
        """Note what a step took, when the host saw its end, and when it was done with it.

        `run_start_ns` is the engine's start on the clock of `tokens`.
        """
        self.catch_up()
        start_ns, end_ns = tokens.start_ns - run_start_ns, tokens.end_ns - run_start_ns
        self._recorder.landed(start_ns, end_ns, done_ns, done_ns - awaited_ns)
        self._recorder.measure(tokens.sample_ns, tokens.graph_size, tokens.moe_imbalance)

    def reported(self, report: Report, now_ns: int) -> None:
        """Note what the loop reports."""
        self._recorder.reported(report, now_ns, [])

    def run(self, scheduler: Scheduler) -> Run:
        """Return the tables of the run so far; requests still running are marked unfinished."""
        self.catch_up()
        queues = scheduler.queues
        pool = (queues.blocks.num_free, queues.slots.num_free)
        self._recorder.closed(scheduler.unfinished(), pool)
        states = self._requests
        metadata = Metadata(
            table="requests",
            source="runtime",
            clock="monotonic",
            model=self.shape.name,
            hardware=self.hardware,
            config={
                "scheduler": asdict(scheduler.config),
                "shape": asdict(self.shape),
                "ranks": 1,
                **self.options,
            },
            seed=self.seed,
        )
        int32 = pa.int32()
        trace = build_requests(
            {
                "req_id": texts([state.req_id for state in states]),
                "arrival_ns": numbers(_ints([s.arrival_ns for s in states]), pa.int64()),
                "prompt_len": numbers(_ints([s.prompt_len for s in states]), int32),
                "max_tokens": numbers(_ints([s.params.max_tokens for s in states]), int32),
                "output_len": numbers(_ints([len(s.tokens) - s.prompt_len for s in states]), int32),
                "temperature": numbers(
                    _floats([s.params.temperature for s in states]), pa.float32()
                ),
                "top_p": numbers(_floats([s.params.top_p for s in states]), pa.float32()),
                "top_k": numbers(_ints([s.params.top_k for s in states]), int32),
                "seed": numbers(np.array([s.params.seed for s in states], np.uint64), pa.uint64()),
            },
            metadata,
        )
        return build_run(
            [self._recorder],
            trace,
            metadata,
            scheduler.config,
            run_id="recorded",
            arrived_ns={},
            unfinished_reason="the engine was closed",
        )


def _ints(values: list[int]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array(values, dtype=np.int64)


def _floats(values: list[float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.array(values, dtype=np.float64)
