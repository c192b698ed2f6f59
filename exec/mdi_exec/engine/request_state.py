"""A request inside the engine: its tokens, which the scheduler only counts, and what users get.

Read next: `engine.py` (who keeps these), `sampling.py` (how tokens are chosen), `text.py`.
"""

import random
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.text import OutputText
from mdi_exec.weights.tokenizer import Tokenizer
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError, require_int
from mdi_shared.prefix.contents import TokenContents
from mdi_shared.request import Request

Logprobs = dict[int, float]
ERROR = "error"  # finish reason of who still waited when the engine stopped


@dataclass(slots=True, eq=False)
class RequestState:
    """One request: `tokens` are prompt and visible output; `row` counts requests as they came.

    Tokens and the block table are int32 arrays (`ints32`), of which a step copies its part at
    once: long lists would be converted number by number while the device waits. `logprobs` has one
    entry per output token: the drawn token and the best alternatives. Outputs go to `sink`.
    """

    req_id: str
    prompt_len: int
    tokens: "array[int]"
    params: SamplingParams
    arrival_ns: int
    row: int
    text: OutputText
    sink: "Sink"
    logprobs: list[Logprobs] = field(default_factory=list)
    block_table: "array[int]" = field(default_factory=lambda: ints32())
    finish_reason: str | None = None

    def request(self, config: SchedulerConfig) -> Request:
        """Return what a scheduler of this config needs to know."""
        params, shares = self.params, config.enable_prefix_cache
        return Request(
            req_id=self.req_id, prompt_len=self.prompt_len, max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos, stop_token_ids=params.stop_token_ids,
            arrived_ns=self.arrival_ns, hints=params.hints,
            contents=TokenContents(self.tokens, config.block_size) if shares else None,
        )  # fmt: skip

    def stop_string_within(self, count: int) -> int | None:
        """Say after how many of the `count` newest tokens the text runs into one of `params.stop`.

        None if it does not, or has ended before.
        """
        old = len(self.tokens) - self.prompt_len - count
        if self.finish_reason is None:
            for shown in range(1, count + 1):
                with _DECODING:
                    self._decode(old + shown)
                if self.text.is_stopped:
                    return shown
        return None

    def text_of(self, start: int, stop: int, *, is_final: bool) -> str:
        """Return the text of output tokens start .. stop-1, and with `is_final` of the end."""
        with _DECODING:
            self._decode(stop)
            return self.text.between(start, stop) + (self.text.rest() if is_final else "")

    def _decode(self, num_tokens: int) -> None:
        start = self.prompt_len + self.text.num_tokens
        self.text.push(self.tokens[start : self.prompt_len + num_tokens])


_DECODING = threading.Lock()  # outputs of one request may be read on several threads


def ints32(values: Iterable[int] = ()) -> "array[int]":
    """Return integers as an array that grows like a list and that numpy reads without copying."""
    return array("i", values)


class RequestBook:
    """An engine's unfinished requests by name, and the outputs that nobody has taken yet.

    New requests are checked, named and given seeds here. `lock` guards `live` against callers on
    other threads; outputs go to the `sink` a request came with, or to `take`.
    """

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None, seed: int) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.live: dict[str, RequestState] = {}
        self.lock = threading.RLock()
        self._outputs: deque[RequestOutput] = deque()
        self._rng = random.Random(seed)  # seeds of requests that bring none
        self._num_added = 0

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, req_id: str | None,
        arrival_ns: int, sink: "Sink | None",
    ) -> RequestState:  # fmt: skip
        """Enter a checked request (see `check`), named after a counter if need be.

        Raises `ConfigError` for a name that is in use or is no text. Call it with the lock held.
        """
        name = req_id if req_id is not None else str(self._num_added)
        require_name(name)
        if params.n != 1:
            raise ConfigError("n", params.n, "must be 1 for a request; LLM adds one per output")
        if sink is not None and not callable(getattr(sink, "append", None)):
            raise ConfigError("sink", sink, "must have a method append, like a list")
        if name in self.live:
            raise ConfigError("req_id", name, "is in use by an unfinished request")
        state = RequestState(
            req_id=name, prompt_len=len(prompt_token_ids), tokens=ints32(prompt_token_ids),
            params=self.draw_seed(params), arrival_ns=arrival_ns, row=self._num_added,
            text=OutputText(self.tokenizer, params.stop),
            sink=sink if sink is not None else self._outputs,
        )  # fmt: skip
        self._num_added += 1
        self.live[name] = state
        return state

    def draw_seed(self, params: SamplingParams) -> SamplingParams:
        """Give `params` a seed if they bring none: the next one, counted over all such requests."""
        if params.seq_seed is not None:
            return params
        return replace(params, seq_seed=self._rng.getrandbits(64))

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise `ConfigError` for an empty prompt or for a token id outside the vocabulary.

        Likewise for stop strings where no tokenizer says what a token spells.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError("sampling_params", params, "must be a SamplingParams")
        if not isinstance(prompt_token_ids, list) or not prompt_token_ids:
            raise ConfigError(
                "prompt_token_ids", prompt_token_ids, "must be a list of at least one token"
            )
        if not _are_token_ids(prompt_token_ids, self.vocab_size):
            index = next(i for i, token in enumerate(prompt_token_ids)
                         if not _are_token_ids([token], self.vocab_size))  # fmt: skip
            raise ConfigError(f"prompt_token_ids[{index}]", prompt_token_ids[index],
                              f"must be an int from 0 to {self.vocab_size - 1}")  # fmt: skip
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop", params.stop, "the checkpoint has no tokenizer.json; give "
                              "stop_token_ids")  # fmt: skip
        params.require_vocabulary(self.vocab_size)

    def show(self, state: RequestState, new_token_ids: tuple[int, ...], *, hidden: int = 0) -> None:
        """Give out what a step added to a request; the last time when it has a finish reason.

        `hidden` tokens stand behind the new ones that nobody shall see.
        """
        if state.finish_reason is not None:
            self.live.pop(state.req_id, None)
        state.sink.append(RequestOutput(state, new_token_ids, hidden))

    def end_all(self) -> None:
        """Give everybody who still waits a last output: the engine has stopped."""
        with self.lock:
            for state in list(self.live.values()):
                state.finish_reason = ERROR
                self.show(state, ())

    def take(self) -> list["RequestOutput"]:
        """Return the outputs, since the last call, of requests that came without a sink."""
        return [self._outputs.popleft() for _ in range(len(self._outputs))]


def arrival(given_ns: int | None, now_ns: int) -> int:
    """Return when a request arrived: now, or before. Raises `ConfigError` for other times."""
    if given_ns is None:
        return now_ns
    require_int("arrival_ns", given_ns, 0, now_ns)
    return given_ns


def require_name(req_id: object) -> None:
    """Raise `ConfigError` unless a request may be called so: a text that files can hold."""
    if not isinstance(req_id, str) or any("\ud800" <= char <= "\udfff" for char in req_id):
        raise ConfigError("req_id", req_id, "must be a text of Unicode characters")


def _are_token_ids(ids: Sequence[object], vocab_size: int) -> bool:
    """Check a whole prompt at once: the device may be waiting for its next step meanwhile."""
    if set(map(type, ids)) != {int}:
        return False
    return min(ids) >= 0 and max(ids) < vocab_size  # type: ignore[type-var, operator]


class RequestOutput:
    """What a user sees of a request after a step.

    A view, cheap to make at every step: `token_ids`, `text` and `logprobs` are cut to what was
    visible then, and text is decoded when it is read. `new_token_ids` and `new_text` came with this
    step; `finish_reason` is None while the request runs. `LLM` says which prompt it answers,
    `prompt_index`, and which of `SamplingParams.n` outputs it is, `sample_index`.
    """

    __slots__ = ("_end", "_state", "finish_reason", "new_token_ids", "prompt_index", "sample_index")

    def __init__(
        self, state: RequestState, new_token_ids: tuple[int, ...] = (), hidden: int = 0
    ) -> None:
        self._state = state
        self._end = len(state.tokens) - state.prompt_len - hidden
        self.new_token_ids = new_token_ids
        self.finish_reason = state.finish_reason
        self.prompt_index = self.sample_index = 0

    @property
    def req_id(self) -> str:
        return self._state.req_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self._state.tokens[: self._state.prompt_len])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output tokens so far, without the prompt; those of a stop string are among them."""
        return tuple(self._state.tokens[self._state.prompt_len :][: self._end])

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """Per output token: log-probabilities of the distribution it was drawn from, by id."""
        return tuple(self._state.logprobs[: self._end])

    @property
    def text(self) -> str:
        """The output decoded so far, without special tokens; empty without a tokenizer.

        It ends before a stop string. Later outputs only add to it: an end that may still become a
        character or a stop string comes with a later one. Bytes that are no UTF-8 read U+FFFD.
        """
        return self._text_from(0)

    @property
    def new_text(self) -> str:
        """What this step added to `text`; those of all steps join to it."""
        return self._text_from(self._end - len(self.new_token_ids))

    def _text_from(self, start: int) -> str:
        return self._state.text_of(start, self._end, is_final=self.finished)

    def to_plain(self) -> dict[str, Any]:
        """Return what another process needs to show this output, as plain data."""
        return {
            "req_id": self.req_id,
            "place": [self.prompt_index, self.sample_index],
            "prompt": list(self.prompt_token_ids),
            "tokens": list(self.token_ids),
            "logprobs": [list(entry.items()) for entry in self.logprobs],
            "stop": list(self._state.params.stop),
            "finish_reason": self.finish_reason,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], tokenizer: Tokenizer | None) -> "RequestOutput":
        """Return the output that `to_plain` took apart."""
        prompt, params = plain["prompt"], SamplingParams(stop=plain["stop"])
        state = RequestState(
            req_id=plain["req_id"], prompt_len=len(prompt), tokens=ints32(prompt + plain["tokens"]),
            params=params, arrival_ns=0, row=0, text=OutputText(tokenizer, params.stop),
            sink=deque(), logprobs=[dict(map(tuple, entry)) for entry in plain["logprobs"]],
            finish_reason=plain["finish_reason"],
        )  # fmt: skip
        output = cls(state)
        output.prompt_index, output.sample_index = plain["place"]
        return output

    def __repr__(self) -> str:
        return (
            f"RequestOutput(req_id={self.req_id!r}, text={self.text!r}, "
            f"token_ids={list(self.token_ids)}, finish_reason={self.finish_reason!r})"
        )


class Sink(Protocol):
    """Where a request's outputs go: a deque, or what its caller makes of them."""

    def append(self, output: RequestOutput, /) -> object: ...
