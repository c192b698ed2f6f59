"""The engine: drives the serving loop of `mdi_shared` with a wall clock and a real model.

`LLMEngine.step` runs the loop up to its next look at the world, that is one engine turn. It answers
effects and decides nothing; the simulator's driver (`mdi_sim/driver.py`) answers the same ones in
virtual time.

Read next: `llm.py` (the offline class), `runner.py` (the device), `mdi_shared/loop.py`.
"""

import time
from collections import deque

from mdi_exec.engine.recording import NO_ARRIVAL, LaunchTimes, RankPart, Recording
from mdi_exec.engine.request_state import (
    RequestBook,
    RequestOutput,
    RequestState,
    Sink,
    arrival,
    require_name,
)
from mdi_exec.engine.runner import ModelRunner
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.step_tokens import InFlight
from mdi_exec.errors import EngineStoppedError
from mdi_exec.ranks.parallel import HAS_COME, MAY_COME, NOTHING_COMES, RankGroup
from mdi_exec.weights.tokenizer import Tokenizer
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from mdi_shared.loop import (
    Answer,
    AwaitArrival,
    AwaitStep,
    Effect,
    Launch,
    News,
    Poll,
    Report,
    Vote,
    serve,
)
from mdi_shared.plan import Ending, StepOutcome, StepPlan, StepResult
from mdi_shared.rank_view import RankView, UnseenRank
from mdi_shared.scheduler import Scheduler
from mdi_traces.run import Run

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0005, 0.01  # of an idle group between two looks


class LLMEngine:
    """Serves requests as they come. Not thread-safe but for `add_request` and `abort_request`.

    `recording`, when given, receives every step; it costs a few numbers each.
    In a `group` of several ranks, turns are taken together: once any rank has work, each calls
    `step` until `is_idle` says that all are done. `more_to_come` keeps the group awake for
    requests that this rank's caller has yet to add.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        recording: Recording | None = None,
        seed: int = 0,
        group: RankGroup | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.group = group if group is not None else RankGroup()
        self.rank_views: list[RankView] = [UnseenRank()] * self.group.size  # no rank sees another
        self.more_to_come = False
        self.vocab_size = vocab_size
        self.recording = recording
        self.book = RequestBook(vocab_size, tokenizer, seed)
        self._inbox: list[RequestState] = []
        self._aborts: list[str] = []
        self._by_seq: dict[int, RequestState] = {}
        self._num_submitted = 0
        self._flights: deque[InFlight] = deque()
        self._leaving: list[str] = []  # ended by a stop string; the scheduler is yet to hear
        self._loop = serve(scheduler, num_ranks=self.group.size)
        self._effect: Effect | None = None  # what the loop is waiting for an answer to
        self._stopped: str | None = None  # why, once it has
        self._is_idle = True
        self._nap_s = _SHORTEST_NAP_S
        # One start for all ranks: their clocks are the same where they share a machine.
        self._start_ns = max(ns for (ns,) in self.group.gather((time.monotonic_ns(),)))
        self._poll_ns = 0
        self._waited_ns, self._ingress_ns = 0, NO_ARRIVAL  # at votes since that poll, and before it

    # ---- requests ------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Nanoseconds since the engine started, in a group since its last one did."""
        return time.monotonic_ns() - self._start_ns

    @property
    def start_ns(self) -> int:
        """That start, on the clock of `time.monotonic_ns`."""
        return self._start_ns

    def add_request(
        self, prompt_token_ids: list[int], params: SamplingParams, req_id: str | None = None,
        *, rank: int | None = None, arrival_ns: int | None = None, sink: Sink | None = None,
    ) -> str:  # fmt: skip
        """Queue a request and return its id (made up from a counter if not given).

        `rank`, where given, must be this engine's (see `takes`). `arrival_ns`, on the clock of
        `now_ns`, is when it reached the server, where that was before this call: its latencies
        count from there. Outputs are appended to `sink`, or returned by `step` without one.

        Raises `ConfigError` for an empty prompt, a token id outside the vocabulary, or an id that
        is in use, and `EngineStoppedError` once the engine is closed. A prompt too long for the
        model is answered with `prompt_length_exceeded`.
        """
        self.check_request(prompt_token_ids, params)
        assert rank is None or self.takes(rank), f"rank {rank}'s request, on {self.group.rank}"
        with self.book.lock:
            self._require_open()  # asked again: it may have stopped meanwhile
            arrival_ns = arrival(arrival_ns, self.now_ns())
            state = self.book.add(prompt_token_ids, params, req_id, arrival_ns, sink)
            self._inbox.append(state)
        return state.req_id

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise what `add_request` would raise for this prompt; queue nothing."""
        self._require_open()
        self.book.check(prompt_token_ids, params)

    def abort_request(self, req_id: str) -> None:
        """End a request at the next step; unknown and finished ids are ignored."""
        require_name(req_id)
        with self.book.lock:
            self._aborts.append(req_id)

    def takes(self, rank: int) -> bool:
        """Say whether requests placed on `rank` are added here."""
        return rank == self.group.rank

    def expect_requests(self) -> None:
        """In a group: some rank gets requests now, so take part in turns until all are idle."""
        self._is_idle = self.group.size == 1

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.scheduler.config

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now. Raises `ConfigError` while requests run."""
        if self.scheduler.has_unfinished() or self._flights:
            raise ConfigError("warm_up", "late", "requests run; warm up before them or after")
        config = self.scheduler.config
        self.runner.warm_up(min(config.token_budget, config.max_model_len))

    @property
    def is_stopped(self) -> bool:
        """Whether it was closed or an error has stopped it."""
        return self._stopped is not None

    @property
    def num_ranks(self) -> int:
        return self.group.size

    @property
    def is_quiet(self) -> bool:
        """Whether the loop sleeps, since no rank has work, and nothing was added here since."""
        return isinstance(self._effect, AwaitArrival) and not self.book.live

    @property
    def is_idle(self) -> bool:
        """Whether the group, at its last look, had no work and expected none."""
        return self._is_idle

    def abort_all(self) -> None:
        """End all requests at the next step."""
        with self.book.lock:
            self._aborts += list(self.book.live)

    def has_unfinished_requests(self) -> bool:
        """Say whether some request has not been answered in full yet, in a group on any rank."""
        return bool(self.book.live) or not self._is_idle

    # ---- turns ---------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one turn of the loop and return what became visible in it; see `turn`."""
        self.turn()
        return self.book.take()

    def take_outputs(self) -> list[RequestOutput]:
        """Return what no `step` has returned; after an error, last outputs of all who waited."""
        return self.book.take()

    def turn(self) -> None:
        """Run one turn of the loop; its outputs go where their requests asked.

        Returns at once when there is nothing to do. Raises `NumericsError` or `DeadlockError`:
        then all who wait get a last output with the finish reason `error`, the engine is closed,
        results of earlier steps stay valid, and every later call raises `EngineStoppedError`.
        """
        self._require_open()
        try:
            with self.group.ends_with():
                self._turn()
        except BaseException as error:
            self._stop(str(error) or type(error).__name__)
            raise

    def recorded_run(self) -> Run | None:
        """Return the run so far, as the ranks recorded it; None elsewhere than on rank 0.

        In a group all ranks call it together. Also None when nothing is recorded.
        """
        if self.recording is None:
            return None
        own = self.recording.part(self.scheduler)
        if self.group.size == 1:
            parts = [own]
        else:
            parts = [RankPart.from_plain(p) for p in self.group.gather_plain(own.to_plain())]
        if self.group.rank:
            return None
        return self.recording.describe(self.scheduler, self.group.size).build(parts)

    def drain(self) -> None:
        """Run until the engine is idle; what becomes visible is given out as in `turn`."""
        scheduler = self.scheduler
        queued = self.book.live if self.group.size == 1 else {}  # nobody may have looked at it yet
        while scheduler.has_unfinished() or scheduler.num_in_flight or queued or not self._is_idle:
            self.turn()

    def close(self, *, leaves_group: bool = True) -> None:
        """Stop the device worker, free the cache and leave the group; harmless when done twice.

        Requests that still run get a last output with the finish reason `error`. Another engine
        may serve on in a group that was not left; no step may be in flight then.
        """
        self._stop("it was closed", leaves_group=leaves_group)

    def _stop(self, reason: str, *, leaves_group: bool = True) -> None:
        self._stopped = self._stopped or reason
        if leaves_group:
            self.group.close()  # first: the worker may be waiting for another rank
        self.book.end_all()
        self.runner.close()

    def _require_open(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)

    def _turn(self) -> None:
        if self._effect is None:
            self._effect = next(self._loop)
        if isinstance(self._effect, AwaitArrival):
            if not self._is_woken():
                return
            self._effect = self._loop.send(True)
        assert isinstance(self._effect, Poll), "a turn begins with a look at the world"
        answer: Answer = self._poll()
        while True:
            effect = self._loop.send(answer)
            if isinstance(effect, Poll | AwaitArrival):
                self._effect = effect
                return
            answer = self._answer(effect)

    def _answer(self, effect: Effect) -> Answer:
        if isinstance(effect, Launch):
            return self._launch(effect.plan)
        if isinstance(effect, AwaitStep):
            return self._await_step()
        if isinstance(effect, Report):
            self._report(effect)
            return None
        assert isinstance(effect, Vote), effect
        before_ns = time.monotonic_ns()
        verdict = self.group.vote(effect)
        self._waited_ns += time.monotonic_ns() - before_ns
        return verdict

    def _is_woken(self) -> bool:
        """Say whether any rank has news; an idle group that expects some naps a little first."""
        with self.book.lock:
            has_news = bool(self._inbox or self._aborts or self._leaving)
        if self.group.size == 1:
            return has_news
        known = HAS_COME if has_news else MAY_COME if self.more_to_come else NOTHING_COMES
        heard = self.group.arrivals(known)
        self._is_idle = heard == NOTHING_COMES
        if heard == MAY_COME:
            time.sleep(self._nap_s)
            self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S)
        else:
            self._nap_s = _SHORTEST_NAP_S
        return heard == HAS_COME

    def _poll(self) -> News:
        with self.book.lock:
            # A name is free again once the scheduler has let go of it: after this look.
            held = {state.req_id for state in self._inbox if state.req_id in self._leaving}
            arrived = [state for state in self._inbox if state.req_id not in held]
            aborts = self._leaving + [name for name in self._aborts if name not in held]
            self._inbox = [state for state in self._inbox if state.req_id in held]
            self._aborts = [name for name in self._aborts if name in held]
            looked_ns = self._poll_ns
            self._poll_ns = self.now_ns()  # under the lock: who arrived before it is in `arrived`
        self._waited_ns = 0
        for state in arrived:  # due before the last look, but sent after it: it came in between
            state.arrival_ns = max(state.arrival_ns, looked_ns + 1)
        if arrived:
            self._ingress_ns = self._poll_ns - max(state.arrival_ns for state in arrived)
        for state in arrived:
            self._by_seq[self._num_submitted] = state
            self._num_submitted += 1
            if self.recording is not None:
                self.recording.submitted(state)
        config = self.scheduler.config
        return News(tuple(s.request(config) for s in arrived), tuple(aborts), self._poll_ns)

    # ---- effects -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> int:
        planned_ns = self.now_ns()
        requests = [self._by_seq[seq_id] for seq_id in plan.seq_ids]
        pending, handed_ns = self.runner.launch(plan, requests)
        self._flights.append(InFlight(plan, requests, pending))
        if self.recording is not None:
            times = LaunchTimes(self._poll_ns, planned_ns, handed_ns - self._start_ns,
                                self.now_ns(), self._ingress_ns, self._waited_ns)  # fmt: skip
            self.recording.launched(plan, times)
            self._ingress_ns = NO_ARRIVAL
        return 1

    def _await_step(self) -> StepResult:
        flight = next(flight for flight in self._flights if flight.tokens is None)
        if self.recording is not None:
            self.recording.catch_up()  # the device is busy meanwhile
        flight.tokens = flight.pending.result()
        flight.awaited_ns = self.now_ns()
        drawn = flight.tokens.by_sequence()
        return StepResult((*drawn, ()) if flight.plan.is_partial else tuple(drawn))

    def _report(self, report: Report) -> None:
        flight = None
        if report.outcome is not None:
            flight = self._flights.popleft()
            self._keep(flight, report.outcome)
        for ending in report.ended:
            self._finish(ending, ())
        if self.recording is None:
            return
        now_ns = self.now_ns()  # one time for all of it: a token is never seen before it is there
        if flight is not None:
            assert flight.tokens is not None, "a reported step has been awaited"
            self.recording.landed(flight.tokens, self._start_ns, flight.awaited_ns, now_ns)
        self.recording.reported(report, now_ns)

    def _keep(self, flight: InFlight, outcome: StepOutcome) -> None:
        """Store a step's visible tokens and show them."""
        assert flight.tokens is not None, "a reported step has been awaited"
        ended = {ending.seq_id: ending for ending in outcome.ended}
        logprobs = flight.tokens.logprobs
        # A prompt that is not done yet is the last of its step, and has no tokens.
        columns = zip(outcome.seq_ids, flight.requests, outcome.tokens, flight.tokens.firsts,
                      strict=False)  # fmt: skip
        for seq_id, state, new, first in columns:
            if not new:
                continue
            state.tokens.extend(new)
            state.logprobs.extend(logprobs[first : first + len(new)])
            shown = state.stop_string_within(len(new)) if state.params.stop else None
            if shown is not None:
                # The scheduler knows no text and will be told to end it; what comes behind, of
                # these tokens and of steps in flight, nobody sees.
                state.finish_reason = "stop"
                self._leaving.append(state.req_id)
                self.book.show(state, new[:shown], hidden=len(new) - shown)
            elif state.finish_reason is None and seq_id not in ended:
                self.book.show(state, new)
            if seq_id in ended:
                self._finish(ended[seq_id], new)

    def _finish(self, ending: Ending, new: tuple[int, ...]) -> None:
        """Show a request's last output and forget it; steps in flight keep their own list."""
        state = self._by_seq.pop(ending.seq_id)
        if state.finish_reason is None:
            state.finish_reason = ending.reason
            self.book.show(state, new)
        else:
            self._leaving.remove(state.req_id)
