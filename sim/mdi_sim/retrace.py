"""Replays a recorded run in the simulator with the times it really had: do the plans agree?

The drivers are the simulator's, one per rank, but polls, launches and results happen when the
record says they did. Whatever differs then is a decision, not a duration.

Read next: `driver.py` (the driver with modelled times), `mdi_traces/check.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import simpy
from numpy.typing import NDArray

from mdi_shared.chunking import ChunkPolicy, TokenBudget, make_policy
from mdi_shared.cost.described import cost_from_description
from mdi_shared.cost.shape import ModelShape, shape_by_name
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.cost.work import step_work
from mdi_shared.errors import ConfigError
from mdi_shared.loop import Launch, News
from mdi_shared.placement import RoundRobin
from mdi_shared.plan import StepResult
from mdi_shared.policies import NO_POLICY, Policy
from mdi_shared.request import Request
from mdi_shared.run_description import RunDescription
from mdi_shared.scheduler import Scheduler
from mdi_sim.driver import InFlight, RankDriver, Waits
from mdi_sim.group import Group
from mdi_sim.outcomes import Outcomes
from mdi_sim.workload import Workload
from mdi_traces.columns import codes, ints, numbers
from mdi_traces.recorder import NOT_YET, Launches, RankRecorder
from mdi_traces.requests import RequestTrace, clear_outputs, put_column
from mdi_traces.run import Run
from mdi_traces.tables import build_run

_NEVER = 1 << 62


def replay_recorded(
    recorded: Run, shape: ModelShape | None = None, policy: Policy | None = None
) -> Run:
    """Run the requests of a record through the scheduler again, rank by rank, at recorded times.

    The scheduler's options are those in the record's metadata, and so are the model's shape unless
    `shape` is given, and the scheduling policy unless it was the caller's own: `policy`. The
    result has its own plans and the record's times; drafts are accepted as they were. Raises
    `ConfigError` when the metadata lacks the options, a rank has left no steps, or the record has
    drafts but no step items.
    """
    run = recorded_description(recorded, policy)
    run = run if shape is None else replace(run, shape=shape)
    config, shape = run.scheduler, run.shape
    ranks = _number_of_ranks(recorded)
    trace = recorded_requests(recorded)
    # Each request has the rank it was served on.
    workload = Workload(trace, ranks, RoundRobin(), has_prefixes=config.enable_prefix_cache)
    schedulers = [
        Scheduler(config, _recorded_chunks(recorded, run), run.new_policy(),
                  hit_margin=shape.replay_keep_tokens)
        for _ in range(ranks)
    ]  # fmt: skip
    sources, _ = workload.sources(schedulers)
    env = simpy.Environment()
    group = Group(env, ranks)
    drivers = [
        _RecordedDriver(
            rank,
            group=group,
            scheduler=schedulers[rank],
            source=sources[rank],
            outcomes=Outcomes(config=config, seed=0, accept_rate=0.0),
            recorder=RankRecorder(rank, drafting=config.num_draft_tokens > 0),
            request_of=_stopping_as_recorded(workload, recorded),
            shape=shape,
            cost=ConstantCost(prefill_ns=1, decode_ns=1),
        )
        for rank in range(ranks)
    ]
    for driver in drivers:
        driver.follow(recorded)
        env.process(driver.run())
    env.run()
    for driver in drivers:
        queues = driver.scheduler.queues
        left = (queues.blocks.num_free, queues.slots.num_free)
        driver.recorder.closed(driver.scheduler.unfinished(), left)
    return build_run(
        [driver.recorder for driver in drivers], trace, recorded.metadata, config, shape,
        run_id="replayed", arrived_ns={}, unfinished_reason="the record ends here",
    )  # fmt: skip


def _recorded_chunks(recorded: Run, run: RunDescription) -> ChunkPolicy:
    """Return the chunk policy of the record, asking the step times that it asked."""
    if run.scheduler.chunk_policy == "token_budget":
        return TokenBudget()
    options = recorded.metadata.config
    described = options.get("chunk_cost") or options.get("cost")
    if not isinstance(described, dict):
        raise ConfigError("chunk_cost", described, "the record's metadata must hold the step times "
                          "that its chunks were chosen by")  # fmt: skip
    return make_policy(run.scheduler, run.shape, cost_from_description(described, run.shape))


def _number_of_ranks(recorded: Run) -> int:
    """Count the ranks that left steps; they must be all there were."""
    ranks = np.unique(ints(recorded.steps_table["rank"]))
    stated = recorded.metadata.config.get("ranks", len(ranks))
    if ranks.tolist() != list(range(int(stated))):
        raise ConfigError("rank", ranks.tolist(), f"the record is of {stated} ranks, and only runs "
                          "with the steps of every rank can be replayed")  # fmt: skip
    return len(ranks)


def recorded_description(recorded: Run, policy: Policy | None = None) -> RunDescription:
    """Return the run as its metadata states it, without step times: a built-in model by its name.

    Without a placement, too: each request has the rank that served it. `policy` stands for a
    scheduling policy that the metadata can only name. Raises `ConfigError` when it lacks the
    scheduler's options.
    """
    stated = dict(recorded.metadata.config)
    for name in ("cost", "placement"):
        stated.pop(name, None)
    if not isinstance(stated.get("scheduler"), dict):
        raise ConfigError("scheduler", stated.get("scheduler"),
                          "the record's metadata does not hold its options")  # fmt: skip
    if not isinstance(stated.get("shape"), dict):
        stated["shape"] = asdict(shape_by_name(str(recorded.metadata.model)))
    if policy is None:
        return RunDescription.from_metadata(stated, recorded.metadata.seed)
    named = RunDescription.from_metadata({**stated, "policy": NO_POLICY}, recorded.metadata.seed)
    return replace(named, policy=policy)


def recorded_requests(recorded: Run) -> RequestTrace:
    """Return the record's requests; without a stop they would have run to max_tokens."""
    table = recorded.requests_table
    lengths = np.where(_stopped(recorded), ints(table["output_len"]), ints(table["max_tokens"]))
    table = put_column(clear_outputs(table), "output_len", numbers(lengths, pa.int32()))
    return RequestTrace(table, recorded.metadata)


def _stopped(recorded: Run) -> NDArray[np.bool_]:
    """Say of each request whether its model ended it."""
    reasons, labels = codes(recorded.requests_table["finish_reason"])
    return np.array([r >= 0 and labels[r] == "stop" for r in reasons.tolist()], dtype=bool)


def _stopping_as_recorded(
    workload: Workload, recorded: Run
) -> Callable[[int, int | None], tuple[Request, int | None]]:
    """Build requests as `workload` does, but tell a stop on the last token allowed from the cap."""
    stopped = _stopped(recorded).tolist()
    lengths = ints(recorded.requests_table["output_len"]).tolist()

    def request(row: int, arrived_ns: int | None) -> tuple[Request, int | None]:
        stop = lengths[row] if stopped[row] else None
        return workload.request(row, arrived_ns)[0], stop

    return request


def _is_of_rank(table: pa.Table, rank: int) -> pa.Array:
    return pa.array(ints(table["rank"], null=-1) == rank)


def _acceptances(recorded: Run, rank: int) -> dict[tuple[int, int], int]:
    """Return how many drafts one rank accepted, by step and row of the request; 0 is left out."""
    table = recorded.items_table
    if table is None:
        raise ConfigError("items", None, "a run with drafts can only be retraced with its step "
                          "items, which say what was accepted")  # fmt: skip
    items = table.filter(_is_of_rank(table, rank))
    rows = {name: row for row, name in enumerate(recorded.requests_table["req_id"].to_pylist())}
    columns = (ints(items["step"]).tolist(), items["req_id"].to_pylist(), ints(items["accepted"]))
    return {(step, rows[name]): int(n) for step, name, n in zip(*columns, strict=True) if n}


class _RecordedDriver(RankDriver):
    """The simulator's driver on recorded times; see `follow`."""

    def follow(self, recorded: Run) -> None:
        """Take this rank's times of `recorded`, whose steps are numbered from 1."""
        steps = recorded.steps_table.filter(_is_of_rank(recorded.steps_table, self.rank))
        requests = recorded.requests_table
        requests = requests.filter(_is_of_rank(requests, self.rank))
        names = ("t_sched", "t_launch", "t_dev_start", "t_dev_end", "t_done")
        self._times: dict[str, list[int]] = {name: ints(steps[name]).tolist() for name in names}
        reasons, labels = codes(requests["finish_reason"])
        ends = ints(requests["t_finish"], null=NOT_YET).tolist()
        names_of = requests["req_id"].to_pylist()
        self._aborts = sorted(
            (end, name)
            for end, name, reason in zip(ends, names_of, reasons.tolist(), strict=True)
            if reason >= 0 and labels[reason] == "abort"
        )
        self._landed_steps = 0
        if self.scheduler.config.num_draft_tokens:
            found, logs = _acceptances(recorded, self.rank), self.recorder.requests
            self.outcomes.accepted = lambda step, seq_id: found.get((step, logs[seq_id].row), 0)

    def _at(self, name: str, index: int) -> int:
        times = self._times[name]
        return times[index] if index < len(times) else _NEVER

    def _catch_up(self) -> Waits:
        self._wait_for_poll()
        return (yield from super()._catch_up())

    def _wait_for_poll(self) -> None:
        due = self._at("t_sched", self.scheduler.step)
        if due < _NEVER:
            self.now = max(self.now, due)

    def _poll(self) -> News:
        self._wait_for_poll()
        news = super()._poll()
        following = self._at("t_sched", self.scheduler.step + 1)
        due = [name for end, name in self._aborts if end < following]
        self._aborts = self._aborts[len(due) :]
        return news._replace(aborts=tuple(due))

    def _launch(self, effect: Launch) -> Waits:
        plan, index = effect.plan, effect.plan.step - 1
        self.outcomes.planned(plan)
        planned = self.now
        self.now = max(planned, min(self._at("t_launch", index), _NEVER - 1))
        start, end = self._at("t_dev_start", index), self._at("t_dev_end", index)
        self._in_flight.append(InFlight(plan, plan.shift, start, end, 0))
        times = Launches(self.poll_ns, planned, self.now, 0, end - start)
        self.recorder.launched(plan, step_work(self.shape, plan), times)
        return 1
        yield  # a process, as the simulator's

    def _await_step(self) -> StepResult:
        step = self._in_flight.popleft()
        self.now = max(self.now, self._at("t_done", self._landed_steps))
        self._landed_steps += 1
        self.recorder.landed_one(step.start_ns, step.end_ns, self.now, 0)
        return self.outcomes.result(step.plan, step.shift)
