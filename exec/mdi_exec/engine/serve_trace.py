"""Runs a request trace through the real engine: arrivals honoured, prompts made up.

Traces hold lengths and times, no text. Prompt tokens are random ids drawn per request from a seed,
outputs run to the length the trace names, and end-of-sequence tokens are ignored, so that the work
is the trace's whatever the weights say. Times to serve compress with `RequestTrace.scaled`.

Read next: `engine.py`, `recording.py` (what comes out), `mdi_sim/source.py` (the simulator's twin).
"""

import heapq
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.workers import GroupEngine
from mdi_shared.placement import Placement, Placer, RoundRobin, require_ranks
from mdi_shared.request import Request
from mdi_traces.columns import codes, ints
from mdi_traces.hints import trace_hints
from mdi_traces.pacing import require_bearable_waits
from mdi_traces.requests import RequestTrace

_LONGEST_SLEEP_S = 0.05  # so that an interrupt is noticed


class TraceClient:
    """Sends a trace's requests when they fall due; a turn with a think time follows its session.

    `seed` draws the prompts' tokens, from ids that are not special. Deterministic but for time.
    In a group, requests go to the ranks their trace names, others where `placement` says, a
    session as a whole; one that watches the ranks is asked when a request is due. Under torchrun
    every rank has a client, which sends what is placed there. Raises `ConfigError` for a trace in
    which nothing is due for days.
    """

    def __init__(
        self, engine: LLMEngine | GroupEngine, trace: RequestTrace, *, seed: int = 0,
        placement: Placement | None = None,
    ) -> None:  # fmt: skip
        require_bearable_waits(trace)
        table = trace.table
        self.engine = engine
        self.seed = seed
        self._req_ids = table["req_id"].to_pylist()
        self._prompt_lens = ints(table["prompt_len"]).tolist()
        # Drawn before time runs: drawing one later would hold up a step.
        self._prompts = [self._draw_prompt(row) for row in range(len(table))]
        self._output_lens = ints(table["output_len"]).tolist()
        self._hints = trace_hints(trace)
        self._thinks = ints(table["think_ns"], null=-1).tolist()
        self._row_of = {req_id: row for row, req_id in enumerate(self._req_ids)}
        self._follower: dict[int, int] = {}
        self._live: set[str] = set()
        last_of: dict[int, int] = {}
        self._due: list[tuple[int, int]] = []
        self._sessions = sessions = codes(table["session_id"])[0].tolist()
        self._max_tokens = ints(table["max_tokens"]).tolist()
        self._named = ints(table["rank"], null=-1).tolist()
        if engine.num_ranks == 1:
            self._named = [-1] * len(table)
        require_ranks(self._req_ids, self._named, engine.num_ranks)
        self._placer = Placer(placement or RoundRobin(), engine.rank_views)
        watches = engine.num_ranks > 1 and self._placer.placement.watches
        arrivals = ints(table["arrival_ns"]).tolist()
        self._ranks: dict[int, int] = {}  # left empty where requests are placed when they are due
        if not watches:
            self._ranks = {row: self._place(row, due) for row, due in enumerate(arrivals)}
        for row, (arrival, session) in enumerate(zip(arrivals, sessions, strict=True)):
            if not watches and not engine.takes(self._ranks[row]):
                continue
            before = last_of.get(session) if session >= 0 and self._thinks[row] >= 0 else None
            if before is None:
                self._due.append((arrival, row))
            else:
                self._follower[before] = row
            if session >= 0:
                last_of[session] = row
        heapq.heapify(self._due)

    def _place(self, row: int, due_ns: int) -> int:
        request = Request(
            req_id=self._req_ids[row], prompt_len=self._prompt_lens[row],
            max_tokens=self._max_tokens[row], arrived_ns=due_ns, hints=self._hints[row],
        )  # fmt: skip
        return self._placer.place(request, self._named[row], self._sessions[row])

    def run(
        self, on_progress: Callable[[int], None] | None = None, *, seconds: float | None = None
    ) -> None:
        """Serve the whole trace; `on_progress` gets the number of requests that just ended.

        After `seconds`, if given, nothing more is sent and what still runs is aborted.
        """
        engine = self.engine
        engine.expect_requests()
        begin_ns = engine.now_ns()
        stop_ns = math.inf if seconds is None else begin_ns + seconds * 1e9
        while self._due or engine.has_unfinished_requests():
            if engine.now_ns() >= stop_ns:
                self._stop()
                stop_ns = math.inf
            self._send_due(begin_ns)
            engine.more_to_come = bool(self._due)
            if not engine.has_unfinished_requests():
                if self._due:
                    wait_s = (self._due[0][0] - (engine.now_ns() - begin_ns)) / 1e9
                    time.sleep(min(max(wait_s, 0.0), _LONGEST_SLEEP_S))
                continue
            ended = [output.req_id for output in engine.step() if output.finished]
            for req_id in ended:
                self._live.discard(req_id)
                self._follow(self._row_of[req_id], engine.now_ns() - begin_ns)
            if ended and on_progress is not None:
                on_progress(len(ended))
        engine.drain()

    def _stop(self) -> None:
        self._due.clear()
        self._follower.clear()
        for req_id in sorted(self._live):
            self.engine.abort_request(req_id)

    def _send_due(self, begin_ns: int) -> None:
        """Send what is due by now; it counts as arrived when it was due, not when it was sent."""
        now_ns = self.engine.now_ns() - begin_ns
        while self._due and self._due[0][0] <= now_ns:
            due, row = heapq.heappop(self._due)
            params = SamplingParams(
                max_tokens=self._output_lens[row], ignore_eos=True, seq_seed=row, temperature=1.0,
                hints=self._hints[row],
            )  # fmt: skip
            rank = self._ranks[row] if self._ranks else self._place(row, due)
            name = self.engine.add_request(
                self._prompts[row].tolist(), params, self._req_ids[row], rank=rank,
                arrival_ns=begin_ns + due,
            )  # fmt: skip
            self._live.add(name)

    def _follow(self, row: int, now_ns: int) -> None:
        next_row = self._follower.get(row)
        if next_row is not None:
            heapq.heappush(self._due, (now_ns + self._thinks[next_row], next_row))

    def _draw_prompt(self, row: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        rng = np.random.default_rng((self.seed, row))
        lowest = min(3, self.engine.vocab_size - 1)  # ids 0 to 2 are begin, end and padding
        shape = (self._prompt_lens[row],)
        return rng.integers(lowest, self.engine.vocab_size, shape, dtype=np.int32)
