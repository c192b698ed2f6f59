"""The worker's end of `workers.py`: one rank of a group, fed through a pipe.

A thread reads the pipe, so that a request's arrival is stamped when it comes and not when the step
under way is over. Messages are the frozen dataclasses below; answers go back between two turns.

Read next: `workers.py`, `engine.py`.
"""

import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from mdi_exec.engine.rank import Rank
from mdi_exec.engine.recording import RunHeader
from mdi_exec.engine.request_state import Logprobs, RequestOutput
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError, GroupError
from mdi_exec.ranks.meeting import RankAddress
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import MiniDeepInferError
from mdi_shared.placement import new_placement
from mdi_shared.rank_view import NOTHING_YET, report

_LAST_SEND_S = 5.0

# ---- from the front ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker starts with: its place in the group, and what `LLM` is called with."""

    address: RankAddress
    model: str
    options: dict[str, object]
    num_threads: int


@dataclass(frozen=True, slots=True)
class Add:
    """A request for this rank."""

    req_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_ns: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Do or give something and answer: "warm_up" (before serving), "quiet", "part"."""

    what: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Say that you are there; answered at any time, while the rank loads too."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Begin to take turns with the group."""


@dataclass(frozen=True, slots=True)
class Close:
    """End all requests and leave."""


# ---- to the front ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the rank will take of its device's memory, in words; it loads after that."""

    line: str


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a `Ping`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The first answer: the rank is loaded. `description` is None when nothing is recorded."""

    start_ns: int
    scheduler_config: SchedulerConfig
    description: RunHeader | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the one question that is open."""

    value: object


@dataclass(frozen=True, slots=True)
class OutputNews:
    """What a step added to a request."""

    req_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: str | None

    @classmethod
    def of(cls, output: RequestOutput) -> "OutputNews":
        new = output.new_token_ids
        logprobs = output.logprobs[-len(new) :] if new else ()
        return cls(output.req_id, new, logprobs, output.finish_reason)


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank's last word."""

    error: Exception


def run_rank(pipe: Connection, setup: Setup) -> None:
    """Be one rank until the front closes it or goes away. The whole of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the front decides
    torch.set_num_threads(setup.num_threads)
    outbox = _Outbox(pipe)
    try:
        _Worker(pipe, setup, outbox.put).run()
    except Exception as error:  # noqa: BLE001 - the front raises it
        outbox.put(Failed(_picklable(error)))
    finally:
        outbox.close()


def _picklable(error: Exception) -> Exception:
    if isinstance(error, MiniDeepInferError):
        return error
    return GroupError(f"{type(error).__name__}: {error}")


class _Outbox:
    """Sends in the background: a front that does not listen for a while holds nobody up."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.put = self._messages.put
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, unless the front takes nothing in any more."""
        self.put(None)
        self._thread.join(_LAST_SEND_S)

    def _send(self) -> None:
        with suppress(OSError):  # the front may have gone
            while (message := self._messages.get()) is not None:
                self._pipe.send(message)


class _Worker:
    def __init__(self, pipe: Connection, setup: Setup, send: Callable[[object], None]) -> None:
        self.pipe = pipe
        self._send = send
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._serving = threading.Event()
        self._is_loaded = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._read, name="pipe", daemon=True).start()
        self.rank = Rank(
            setup.model, setup.options, address=setup.address,
            on_estimate=lambda line: send(Estimate(line)),
        )  # fmt: skip
        self.engine = self.rank.engine
        self._is_loaded.set()

    def run(self) -> None:
        try:
            self._send(Answer(self._ready()))
            self._warm_up()
            self._serve()
        finally:
            self.rank.close(saves=False)  # the front does

    def _ready(self) -> Ready:
        engine = self.engine
        recording = engine.recording
        description = None
        if recording is not None:
            description = recording.describe(engine.scheduler, engine.num_ranks)
        return Ready(engine.start_ns, engine.scheduler_config, description)

    def _warm_up(self) -> None:
        """Answer questions until the front wants turns; all ranks get the same, in one order."""
        while not self._serving.is_set() or not self._asked.empty():
            what = self._asked.get()
            if what == "warm_up":
                self.engine.warm_up()
            if what:
                self._send(Answer(self._part() if what == "part" else None))

    def _serve(self) -> None:
        engine = self.engine
        engine.expect_requests()
        waiting_for_quiet, told = False, NOTHING_YET
        is_watched = new_placement(self.rank.options.placement).watches
        while not engine.is_idle:
            engine.more_to_come = not self._is_closed
            outputs = engine.step()
            if is_watched and (state := report(engine.scheduler)) != told:
                self._send(told := state)
            if outputs:
                self._send([OutputNews.of(output) for output in outputs])
            while not self._asked.empty():
                what = self._asked.get()
                if what == "part":
                    self._send(Answer(self._part()))
                waiting_for_quiet = waiting_for_quiet or what == "quiet"
            if waiting_for_quiet and engine.is_quiet:
                waiting_for_quiet = False
                self._send(Answer(None))

    def _part(self) -> object:
        recording = self.engine.recording
        assert recording is not None, "the front asks only for what is recorded"
        return recording.part(self.engine.scheduler)

    def _read(self) -> None:
        try:
            while not self._is_closed:
                self._obey(self.pipe.recv())
        except EngineStoppedError:
            return  # the main thread says why
        except (EOFError, OSError):
            self._obey(Close())

    def _obey(self, message: object) -> None:
        if isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, Add):
            self.engine.add_request(
                message.prompt_token_ids, message.params, message.req_id,
                arrival_ns=message.arrival_ns,
            )  # fmt: skip
        elif isinstance(message, Abort):
            self.engine.abort_request(message.req_id)
        elif isinstance(message, Ask):
            self._asked.put(message.what)
        elif isinstance(message, Serve):
            self._serving.set()
            self._asked.put("")  # wakes whoever waits for a question
        elif isinstance(message, Close):
            self._is_closed = True
            self._is_loaded.wait()
            self.engine.abort_all()
            self._serving.set()
            self._asked.put("")
