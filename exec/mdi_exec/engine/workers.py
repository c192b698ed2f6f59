"""Ranks as child processes of the process that uses them, and the engine it sees instead.

    front: LLM ─ GroupEngine ══ pipe per rank ══ LLM ─ LLMEngine :worker
                                                     ║ votes, exchange
                                                 LLM ─ LLMEngine :worker

A worker is the rank that torchrun would start, but fed by a pipe: `LLM` finds the group in the
environment. The front has no model and decides where requests go, nothing else.

Read next: `rank_worker.py` (the other end), `parallel.py`, docs/parallel.md.
"""

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from mdi_exec.engine.rank_worker import (
    Abort,
    Add,
    Answer,
    Ask,
    Close,
    Estimate,
    Failed,
    OutputNews,
    Ready,
    Serve,
    Setup,
    run_rank,
)
from mdi_exec.engine.request_state import RequestOutput, RequestState, check_prompt, ints32
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError, GroupError
from mdi_exec.ranks.parallel import RankAddress, lead_store
from mdi_exec.weights.tokenizer import Tokenizer
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from mdi_traces.run import Run

_HOST = "127.0.0.1"
_LOOK_S = 0.002  # longest wait for news in one `step`
_LAST_WORDS_S = 3.0  # after a rank's failure: for the one to be heard that failed first
_LEAVE_S = 10.0  # for a worker to end by itself


class GroupEngine:
    """The engines of a group, seen as one; has what `LLM` uses of `LLMEngine`.

    `scheduler_config` is the ranks' common one. `on_estimate` is called with each rank's line on
    the memory it will take, before it loads. Raises what a worker raises while it loads.
    """

    def __init__(
        self, model: str | Path, options: dict[str, Any], *, size: int, port: int, vocab_size: int,
        tokenizer: Tokenizer | None, seed: int, on_estimate: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.num_ranks = size
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.more_to_come = False
        self._on_estimate = on_estimate
        self._dice = random.Random(seed)
        self._live: dict[str, tuple[RequestState, int]] = {}
        self._num_added = 0
        self._outputs: list[RequestOutput] = []
        self._answers: dict[int, object] = {}  # by rank, to the question now asked
        self._is_serving = False
        self._stopped: str | None = None
        self._store = lead_store(_HOST, port)
        self._pipes: list[Connection] = []
        self._workers: list[BaseProcess] = []
        try:
            self._start(model, options)
            ready = self._await_answers()
        except BaseException:
            self._end()
            raise
        first = ready[0]
        assert isinstance(first, Ready), first
        self._start_ns = first.start_ns
        self._description = first.description
        self.scheduler_config: SchedulerConfig = first.scheduler_config

    def _start(self, model: str | Path, options: dict[str, Any]) -> None:
        # "spawn": a fork would copy threads' locks and, on a GPU, a context that cannot be copied.
        context = multiprocessing.get_context("spawn")
        for rank in range(self.num_ranks):
            mine, theirs = context.Pipe()
            address = RankAddress(rank, self.num_ranks, _HOST, self._store.port, leads=False)
            setup = Setup(address.to_environment(), str(model), options, torch.get_num_threads())
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

    def draw_seed(self, params: SamplingParams) -> SamplingParams:
        """As `LLMEngine.draw_seed`."""
        if params.seq_seed is not None:
            return params
        return replace(params, seq_seed=self._dice.getrandbits(64))

    def expect_requests(self) -> None:
        """Let the ranks take turns; only their warm-up comes before that."""
        if not self._is_serving:
            self._is_serving = True
            self._tell_all(Serve())

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """As `LLMEngine.check_request`."""
        self._require_open()
        check_prompt(prompt_token_ids, params, self.vocab_size)

    def add_request(
        self, prompt_token_ids: list[int], params: SamplingParams, req_id: str | None = None,
        *, rank: int | None = None, arrival_ns: int | None = None,
    ) -> str:  # fmt: skip
        """As `LLMEngine.add_request`, on `rank` (rank 0 if not given)."""
        self.check_request(prompt_token_ids, params)
        self.expect_requests()
        name = req_id if req_id is not None else str(self._num_added)
        if name in self._live:
            raise ConfigError("req_id", name, "is in use by an unfinished request")
        params, rank = self.draw_seed(params), rank or 0
        state = RequestState(
            req_id=name, prompt_len=len(prompt_token_ids), tokens=ints32(prompt_token_ids),
            params=params, arrival_ns=self.now_ns() if arrival_ns is None else arrival_ns,
            row=self._num_added,
        )  # fmt: skip
        self._num_added += 1
        self._live[name] = (state, rank)
        self._tell(rank, Add(name, list(prompt_token_ids), params, state.arrival_ns))
        return name

    def abort_request(self, req_id: str) -> None:
        """As `LLMEngine.abort_request`."""
        if req_id in self._live:
            self._tell(self._live[req_id][1], Abort(req_id))

    def has_unfinished_requests(self) -> bool:
        """Say whether some request has not been answered in full yet."""
        return bool(self._live)

    # ---- what the ranks say --------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Return what became visible on any rank since the last call; waits 2 ms at most.

        Raises the error of the rank that failed first; the group is closed then.
        """
        self._require_open()
        self._listen(_LOOK_S)
        outputs, self._outputs = self._outputs, []
        return outputs

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

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def is_stopped(self) -> bool:
        """Whether it was closed or a rank's error has stopped it."""
        return self._stopped is not None

    def close(self) -> None:
        """End what runs, let the workers leave, and end those that do not."""
        if self._stopped is None:
            self._stopped = "it was closed"
            self._tell_all(Close())
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
                assert isinstance(pipe, Connection), pipe
                self._hear(pipe)
            longest_s = 0.0

    def _hear(self, pipe: Connection) -> None:
        rank = self._pipes.index(pipe)
        try:
            said = pipe.recv()
        except (EOFError, OSError):
            said = None
        if said is None or isinstance(said, Failed):
            raise self._fail(rank, said)
        if isinstance(said, Answer):
            self._answers[rank] = said.value
        elif isinstance(said, Estimate):
            self._on_estimate(said.line)
        else:
            self._outputs += [self._note(news) for news in said]

    def _note(self, news: OutputNews) -> RequestOutput:
        state, _ = self._live[news.req_id]
        state.tokens.extend(news.token_ids)
        state.logprobs += news.logprobs
        state.finish_reason = news.finish_reason
        if news.finish_reason is not None:
            del self._live[news.req_id]
        return RequestOutput(state, news.token_ids, self.tokenizer)

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
        errors: dict[int, Exception | None] = {rank: said.error if said is not None else None}
        deadline = time.monotonic() + _LAST_WORDS_S
        while len(errors) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            if any(error and not isinstance(error, GroupError) for error in errors.values()):
                break
            quiet = [pipe for r, pipe in enumerate(self._pipes) if r not in errors]
            for pipe in wait(quiet, left):
                assert isinstance(pipe, Connection), pipe
                self._hear_last(pipe, errors)
        own = [e for e in errors.values() if e is not None and not isinstance(e, GroupError)]
        dead = [r for r, error in errors.items() if error is None]
        if own:
            found: Exception = own[0]
        elif dead:
            found = GroupError(f"rank {dead[0]} {self._how_it_ended(dead[0])}")
        else:
            found = next(error for error in errors.values() if error is not None)
        self._stopped = str(found)
        self._end(wait_s=_LAST_WORDS_S)
        return found

    def _hear_last(self, pipe: Connection, errors: dict[int, Exception | None]) -> None:
        rank = self._pipes.index(pipe)
        try:
            said = pipe.recv()
        except (EOFError, OSError):
            errors[rank] = None
            return
        if isinstance(said, Failed):
            errors[rank] = said.error

    def _how_it_ended(self, rank: int) -> str:
        worker = self._workers[rank]
        worker.join(_LAST_WORDS_S)
        code = worker.exitcode
        if code is not None and code < 0:
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
