"""Calls that share an engine: each gets the outputs it asked for, and no others.

Every request brings the queue of its call. Whoever needs an output runs the engine's turns, one
thread at a time; what a turn brings for other calls waits in their queues. Read next: `llm.py`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from mdi_exec.engine.request_state import ERROR, RequestOutput, Sink
from mdi_shared.errors import ConfigError, MiniDeepInferError

Place = tuple[int, int]  # index of the prompt, and of its sample


class Engine(Protocol):
    """What is asked of `LLMEngine` or `GroupEngine`."""

    def turn(self) -> None: ...
    def drain(self) -> None: ...
    def abort_request(self, req_id: str) -> None: ...
    def has_unfinished_requests(self) -> bool: ...

    @property
    def is_stopped(self) -> bool: ...


class Turns:
    """Takes turns of `engine` for all open streams.

    `in_step` says that other processes make the same calls and their engines take the same turns
    (torchrun): all of it is one thread's then, and goes on until every rank is done. `on_quiet` is
    called when the last stream has ended.
    """

    def __init__(self, engine: Engine, *, in_step: bool, on_quiet: Callable[[], None]) -> None:
        self.engine = engine
        self.in_step = in_step
        self._on_quiet = on_quiet
        self._changed = threading.Condition()
        self._holder: int | None = None  # the thread that does something with the engine now
        self._num_waiting = 0  # threads that want it for themselves, which come first
        self._num_open = 0
        self._thread = 0

    def opened(self) -> None:
        """Note that a stream begins. Raises `ConfigError` for a second thread under torchrun."""
        with self._changed:
            own = threading.get_ident()
            if self.in_step and self._num_open and self._thread != own:
                raise ConfigError("threads", 2, "under torchrun one thread makes all calls")
            self._num_open += 1
            self._thread = own

    def closed(self) -> bool:
        """Note that a stream has ended; return whether it was the last one."""
        with self._changed:
            self._num_open -= 1
            return self._num_open == 0

    def run(self, action: Callable[[], None]) -> None:
        """Do something with the engine, or wait until another thread has: look again then."""
        with self._changed:
            if self._holder is not None or self._num_waiting:
                self._changed.wait()
                return
            self._holder = threading.get_ident()
        self._do(action)

    def alone(self, action: Callable[[], None]) -> None:
        """Do something with the engine once no other thread does; waits for a turn under way.

        Under torchrun one thread makes all calls, and a turn may wait for the rank that calls this.
        """
        own = threading.get_ident()
        if self.in_step or self._holder == own:  # the latter from inside a turn
            action()
            return
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder is None)
                self._holder = own
            finally:
                self._num_waiting -= 1
        self._do(action)

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        finally:
            with self._changed:
                self._holder = None
                self._changed.notify_all()

    def settle(self) -> None:
        """Let steps in flight land, and call `on_quiet`; nothing when the engine has stopped."""
        if not self.engine.is_stopped:
            self.engine.drain()
            self._on_quiet()


class OutputStream:
    """The outputs of one call, at every step that adds to a request; the last one has a reason.

    Closing it, leaving its `with` block or letting go of it aborts what still runs. When the engine
    fails, all its requests get a last output with the finish reason `error`; then it raises.
    """

    def __init__(self, turns: Turns, add: Callable[[Sink], Iterable[tuple[str, Place]]]) -> None:
        self._turns = turns
        self._queue: deque[RequestOutput] = deque()
        self._places: dict[str, Place] = {}  # of requests whose last output has not been given
        self._has_failed = False  # the engine has stopped under it: the next turn says why
        self._error: Exception | None = None
        self._is_open = False
        turns.opened()
        self._is_open = True
        self._places.update(add(self._queue))  # one by one: those before an error are aborted

    def __iter__(self) -> "OutputStream":
        return self

    def __next__(self) -> RequestOutput:
        while not self._queue and self._is_open:
            if self._error is not None:
                self._end()
                raise self._error
            if self._is_complete() and not self._has_failed:
                if self._end():
                    self._turns.run(self._turns.settle)
            else:
                self._take_turn()
        if not self._queue:
            raise StopIteration
        output = self._queue.popleft()
        output.prompt_index, output.sample_index = self._places[output.req_id]
        if output.finished:
            del self._places[output.req_id]
            self._has_failed = self._has_failed or output.finish_reason == ERROR
        return output

    def _is_complete(self) -> bool:
        if self._turns.in_step:
            return not self._turns.engine.has_unfinished_requests()
        return not self._places

    def _take_turn(self) -> None:
        try:
            self._turns.run(self._turns.engine.turn)
        except Exception as error:  # noqa: BLE001 - raised behind the last outputs
            self._error = error

    def _end(self) -> bool:
        was_open, self._is_open = self._is_open, False
        return was_open and self._turns.closed()

    def close(self) -> None:
        """Abort what still runs, and take turns until it has ended; harmless when done twice."""
        self._abort()
        if not self._turns.in_step and not self._turns.engine.is_stopped:
            for _ in self:
                pass
        self._end()
        self._queue.clear()

    def _abort(self) -> None:
        if self._is_open:
            for name in self._places:
                self._turns.engine.abort_request(name)

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is None:
            self.close()
        else:
            self.__del__()

    def __del__(self) -> None:
        with suppress(MiniDeepInferError):  # nobody is there to hear of it
            self._abort()
        self._end()
