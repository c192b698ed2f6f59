"""Ranks as child processes of the process that uses them, and the engine it sees instead.

    front: LLM ─ GroupEngine ══ pipe per rank ══ Rank ─ LLMEngine :worker
                                                     ║ votes, exchange
                                                 Rank ─ LLMEngine :worker

A worker is the rank that torchrun would start, but fed by a pipe. The front has no model and
decides where requests go, nothing else.

Read next: `rank_worker.py` (the other end), `parallel.py`, docs/parallel.md.
"""

import multiprocessing
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from mdi_exec.engine.options import EngineOptions
from mdi_exec.engine.rank_worker import (
    Abort,
    Add,
    Answer,
    Ask,
    Close,
    Estimate,
    Failed,
    OutputNews,
    Ping,
    Pong,
    Ready,
    Serve,
    Setup,
    run_rank,
)
from mdi_exec.engine.request_state import RequestBook, RequestOutput, Sink, arrival, require_name
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError, GroupError
from mdi_exec.ranks.meeting import LOOPBACK, RankAddress, lead_store
from mdi_exec.ranks.parallel import require_even_experts
from mdi_exec.weights.source import open_model
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from mdi_shared.placement import new_placement
from mdi_shared.rank_view import NOTHING_YET, RankView, ReportedState, UnseenRank
from mdi_traces.run import Run

_LOOK_S = 0.002  # longest wait for news in one `step`
_BEGIN_S = 120.0  # for a worker's process to begin: its imports take seconds
_LAST_WORDS_S = 3.0  # after a rank's failure: for the one to be heard that failed first
_LEAVE_S = 10.0  # for a worker to end by itself


class GroupEngine:
    """The engines of a group, seen as one; has what `LLM` uses of `Rank` and of `LLMEngine`.

    `given` are the options of `LLM` as given, `options` the engine's part of them. `on_estimate` is
    called with each rank's line on the memory it will take, before it loads. Raises what a worker
    raises while it loads.
    """

    def __init__(
        self, model: str | Path, given: dict[str, object], options: EngineOptions, *,
        on_estimate: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.options = options
        self.num_ranks = options.data_parallel_size
        options.require_group(self.num_ranks)
        self.source = open_model(model, "cpu", options.revision)
        require_even_experts(self.source.config.n_routed_experts, self.num_ranks)
        self.vocab_size = self.source.config.vocab_size
        self.more_to_come = False
        self._on_estimate = on_estimate
        self.book = RequestBook(self.vocab_size, self.source.tokenizer, options.seed)
        self._rank_of: dict[str, int] = {}
        is_watched = new_placement(options.placement).watches
        self.rank_views = [RankView(NOTHING_YET) if is_watched else UnseenRank()
                           for _ in range(self.num_ranks)]  # fmt: skip
        self._answers: dict[int, object] = {}  # by rank, to the question now asked
        self._is_serving = False
        self._stopped: str | None = None
        self._store = lead_store(LOOPBACK, options.group_port)
        self._pipes: list[Connection] = []
        self._asked_s: dict[int, float] = {}  # by rank: when it was pinged; it has not answered yet
        self._heard_s: dict[int, float] = {}  # by rank: when it last said something
        self._began_s = time.monotonic()
        self._workers: list[BaseProcess] = []
        try:
            self._start(model, given)
            ready = self._await_answers()
        except BaseException:
            self._end()
            raise
        first = ready[0]
        assert isinstance(first, Ready), first
        self._start_ns = first.start_ns
        self._description = first.description
        self.scheduler_config: SchedulerConfig = first.scheduler_config

    def _start(self, model: str | Path, given: dict[str, object]) -> None:
        # "spawn": a fork would copy threads' locks and, on a GPU, a context that cannot be copied.
        context, token = multiprocessing.get_context("spawn"), secrets.token_hex()
        for rank in range(self.num_ranks):
            mine, theirs = context.Pipe()
            _limit_sending(mine, self.options.group_timeout_s)
            address = RankAddress(
                rank, self.num_ranks, LOOPBACK, self._store.port, local_rank=rank, token=token
            )
            setup = Setup(address, str(model), given, torch.get_num_threads())
            worker = context.Process(
                target=run_rank, args=(theirs, setup), name=f"rank {rank}", daemon=True
            )
            worker.start()
            theirs.close()
            self._pipes.append(mine)
            self._workers.append(worker)

    # ---- requests ------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Nanoseconds since the ranks' engines started."""
        return time.monotonic_ns() - self._start_ns

    def takes(self, rank: int) -> bool:
        """Say whether requests placed on `rank` are added here: all are."""
        return 0 <= rank < self.num_ranks

    def expect_requests(self) -> None:
        """Let the ranks take turns; only their warm-up comes before that."""
        if not self._is_serving:
            self._is_serving = True
            self._tell_all(Serve())

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """As `LLMEngine.check_request`."""
        self._require_open()
        self.book.check(prompt_token_ids, params)

    def add_request(
        self, prompt_token_ids: list[int], params: SamplingParams, req_id: str | None = None,
        *, rank: int | None = None, arrival_ns: int | None = None, sink: Sink | None = None,
    ) -> str:  # fmt: skip
        """As `LLMEngine.add_request`, on `rank` (rank 0 if not given)."""
        self.check_request(prompt_token_ids, params)
        self.expect_requests()
        rank, arrival_ns = rank or 0, arrival(arrival_ns, self.now_ns())
        with self.book.lock:
            state = self.book.add(prompt_token_ids, params, req_id, arrival_ns, sink)
            self._rank_of[state.req_id] = rank
            self.rank_views[rank].sent(len(prompt_token_ids))
            self._tell(rank, Add(state.req_id, prompt_token_ids, state.params, arrival_ns))
        return state.req_id

    def abort_request(self, req_id: str) -> None:
        """As `LLMEngine.abort_request`."""
        require_name(req_id)
        with self.book.lock:
            if req_id in self._rank_of and self._stopped is None:
                self._tell(self._rank_of[req_id], Abort(req_id))

    def has_unfinished_requests(self) -> bool:
        """Say whether some request has not been answered in full yet."""
        return bool(self.book.live)

    # ---- what the ranks say --------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Return what became visible on any rank since the last call; see `turn`."""
        self.turn()
        return self.book.take()

    def take_outputs(self) -> list[RequestOutput]:
        """As `LLMEngine.take_outputs`."""
        return self.book.take()

    def turn(self) -> None:
        """Take in what became visible on any rank since the last call; waits 2 ms at most.

        Raises the error of the rank that failed first: the group is closed then, and all who wait
        get a last output with the finish reason `error`.
        """
        self._require_open()
        self._listen(_LOOK_S)

    def drain(self) -> None:
        """Wait until all ranks are idle."""
        if self._is_serving:
            self._ask("quiet")

    def warm_up(self) -> None:
        """Have all ranks do what the first steps of each size would do; before any request."""
        if self._is_serving:
            raise ConfigError("warm_up", "late", "a group warms up before its first request")
        self._ask("warm_up")

    def recorded_run(self) -> Run | None:
        """Return the run so far, as the ranks recorded it; None when nothing is recorded."""
        if self._description is None:
            return None
        return self._description.build([part for _, part in sorted(self._ask("part").items())])

    def save_recording(self) -> None:
        """Write the run so far, of all ranks, to the files `record` names; nothing without it."""
        if self.options.record is not None:
            run = self.recorded_run()
            if run is not None:
                run.save(self.options.record)

    @property
    def is_stopped(self) -> bool:
        """Whether it was closed or a rank's error has stopped it."""
        return self._stopped is not None

    def close(self) -> None:
        """Save the recording, end what runs, let the workers leave, and end those that do not."""
        try:
            if self._stopped is None:
                self.save_recording()
        finally:
            if self._stopped is None:
                self._stopped = "it was closed"
                self._tell_all(Close())
            self.book.end_all()
            self._end()

    def _require_open(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)

    def _ask(self, what: str) -> dict[int, Any]:
        self._require_open()
        self._tell_all(Ask(what))
        return self._await_answers()

    def _await_answers(self) -> dict[int, Any]:
        self._answers = {}
        while len(self._answers) < self.num_ranks:
            self._listen(_LOOK_S)
        return self._answers

    def _listen(self, longest_s: float) -> None:
        """Take in all that has come, waiting for something if need be."""
        while ready := wait(self._pipes, longest_s):
            for pipe in ready:
                self._hear(pipe)
            longest_s = 0.0
        self._look_for_silence()

    def _look_for_silence(self) -> None:
        """Ask ranks that have been silent whether they are there; end the group without one."""
        now_s, limit_s = time.monotonic(), self.options.group_timeout_s
        for rank in range(self.num_ranks):
            has_begun = rank in self._heard_s
            if now_s - self._asked_s.get(rank, now_s) > limit_s + (0 if has_begun else _BEGIN_S):
                raise self._fail(rank, Failed(GroupError(self._silence(rank))))
            silent_s = now_s - self._heard_s.get(rank, self._began_s)
            if silent_s > limit_s / 4 and rank not in self._asked_s:
                self._asked_s[rank] = now_s
                self._tell(rank, Ping())

    def _silence(self, rank: int) -> str:
        return f"rank {rank} was not heard of for {self.options.group_timeout_s:g} s"

    def _hear(self, pipe: object) -> None:
        rank, said = self._rank_at(pipe), _receive(pipe)
        if said is None or isinstance(said, Failed):
            raise self._fail(rank, said)
        self._heard_s[rank] = time.monotonic()
        self._asked_s.pop(rank, None)
        if isinstance(said, Answer):
            self._answers[rank] = said.value
        elif isinstance(said, Estimate):
            self._on_estimate(said.line)
        elif isinstance(said, ReportedState):
            self.rank_views[rank].state = said
        elif not isinstance(said, Pong):
            for news in said:
                self._note(news)

    def _note(self, news: OutputNews) -> None:
        with self.book.lock:
            state = self.book.live[news.req_id]
            if news.finish_reason is not None:
                del self._rank_of[news.req_id]
            state.tokens.extend(news.token_ids)
            state.logprobs += news.logprobs
            state.finish_reason = news.finish_reason
            self.book.show(state, news.token_ids)

    def _tell(self, rank: int, message: object) -> None:
        try:
            self._pipes[rank].send(message)
        except OSError:
            if self._stopped is None:
                raise self._fail(rank, None) from None

    def _tell_all(self, message: object) -> None:
        for rank in range(self.num_ranks):
            self._tell(rank, message)

    # ---- ends ----------------------------------------------------------------------------------

    def _fail(self, rank: int, said: Failed | None) -> Exception:
        """End the group; return the error of the rank that failed first, as far as can be told."""
        ends: dict[int, Exception | None] = {rank: said.error if said is not None else None}
        self._hear_last_words(ends)
        dead = [r for r, error in ends.items() if error is None]
        if causes := _causes(ends):
            found = causes[0]
        elif dead:
            found = GroupError(f"rank {dead[0]} {self._how_it_ended(dead[0])}")
        elif silent := [r for r in range(self.num_ranks) if r not in ends]:
            found = GroupError(self._silence(silent[0]))
        else:
            found = next(error for error in ends.values() if error is not None)
        self._stopped = str(found)
        self.book.end_all()
        self._end(wait_s=_LAST_WORDS_S)
        return found

    def _hear_last_words(self, ends: dict[int, Exception | None]) -> None:
        """Add the other ranks' errors, None for one that died, until one names the cause."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while len(ends) < self.num_ranks and not _causes(ends):
            quiet = [pipe for rank, pipe in enumerate(self._pipes) if rank not in ends]
            ready = wait(quiet, max(deadline - time.monotonic(), 0.0))
            if not ready:
                return
            for pipe in ready:
                said = _receive(pipe)
                if said is None or isinstance(said, Failed):
                    ends[self._rank_at(pipe)] = said.error if said is not None else None

    def _rank_at(self, pipe: object) -> int:
        return next(rank for rank, own in enumerate(self._pipes) if own is pipe)

    def _how_it_ended(self, rank: int) -> str:
        worker = self._workers[rank]
        worker.join(_LAST_WORDS_S)
        code = worker.exitcode
        if code is None:
            return f"took nothing in for {self.options.group_timeout_s:g} s"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        hint = "" if self._is_serving else (
            " while it started (a script that makes such an LLM must do so under "
            'if __name__ == "__main__":)'
        )  # fmt: skip
        return f"ended with exit code {code}{hint}"

    def _end(self, wait_s: float = _LEAVE_S) -> None:
        deadline = time.monotonic() + wait_s
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0.0))
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in self._pipes:
            pipe.close()


def _limit_sending(pipe: Connection, timeout_s: float) -> None:
    """Let `pipe.send` fail when its reader takes nothing in for so long."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _receive(pipe: object) -> Any:  # noqa: ANN401 (any message of `rank_worker.py`)
    """Return what a worker says, None when it has ended."""
    assert isinstance(pipe, Connection), pipe
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _causes(ends: Mapping[int, Exception | None]) -> list[Exception]:
    """Return the errors that do not just quote another rank's."""
    return [e for e in ends.values() if e is not None and not isinstance(e, GroupError)]
