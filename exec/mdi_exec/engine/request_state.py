"""A request inside the engine: its tokens, which the scheduler only counts, and what users get.

Read next: `engine.py` (who keeps these), `sampling.py` (how tokens are chosen), `text.py`.
"""

import random
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.weights.tokenizer import Tokenizer
from mdi_shared.errors import ConfigError

Logprobs = dict[int, float]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request: `tokens` are prompt and visible output; `row` counts requests as they came.

    Tokens and the block table are int32 arrays (`ints32`), of which a step copies its part at
    once: long lists would be converted number by number while the device waits. `logprobs` has one
    entry per output token: the drawn token and the best alternatives.
    """

    req_id: str
    prompt_len: int
    tokens: "array[int]"
    params: SamplingParams
    arrival_ns: int
    row: int
    logprobs: list[Logprobs] = field(default_factory=list)
    block_table: "array[int]" = field(default_factory=lambda: ints32())
    finish_reason: str | None = None


def ints32(values: Iterable[int] = ()) -> "array[int]":
    """Return integers as an array that grows like a list and that numpy reads without copying."""
    return array("i", values)


class RequestBook:
    """An engine's unfinished requests by name; new ones are checked, named and given seeds here.

    `lock` guards `live` against callers on other threads.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.live: dict[str, RequestState] = {}
        self.lock = threading.RLock()
        self._rng = random.Random(seed)  # seeds of requests that bring none
        self._num_added = 0

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, req_id: str | None,
        arrival_ns: int,
    ) -> RequestState:  # fmt: skip
        """Enter a checked request (see `check`), named after a counter if need be.

        Raises `ConfigError` for a name that is in use. Call it with the lock held.
        """
        name = req_id if req_id is not None else str(self._num_added)
        if name in self.live:
            raise ConfigError("req_id", name, "is in use by an unfinished request")
        state = RequestState(
            req_id=name, prompt_len=len(prompt_token_ids), tokens=ints32(prompt_token_ids),
            params=self.draw_seed(params), arrival_ns=arrival_ns, row=self._num_added,
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
        """Raise `ConfigError` for an empty prompt or for a token id outside the vocabulary."""
        if not prompt_token_ids:
            raise ConfigError("prompt_token_ids", prompt_token_ids, "must hold at least one token")
        if not _are_token_ids(prompt_token_ids, self.vocab_size):
            index = next(i for i, token in enumerate(prompt_token_ids)
                         if not _are_token_ids([token], self.vocab_size))  # fmt: skip
            raise ConfigError(f"prompt_token_ids[{index}]", prompt_token_ids[index],
                              f"must be an int from 0 to {self.vocab_size - 1}")  # fmt: skip
        params.require_vocabulary(self.vocab_size)


def _are_token_ids(ids: Sequence[object], vocab_size: int) -> bool:
    """Check a whole prompt at once: the device may be waiting for its next step meanwhile."""
    if set(map(type, ids)) != {int}:
        return False
    return min(ids) >= 0 and max(ids) < vocab_size  # type: ignore[type-var, operator]


class RequestOutput:
    """What a user sees of a request after a step.

    A view, cheap to make at every step: `token_ids`, `text` and `logprobs` are cut to what was
    visible then. `new_token_ids` came with this step; `finish_reason` is None while it runs.
    """

    __slots__ = ("_end", "_state", "_tokenizer", "finish_reason", "new_token_ids")

    def __init__(
        self, state: RequestState, new_token_ids: tuple[int, ...], tokenizer: Tokenizer | None
    ) -> None:
        self._state = state
        self._tokenizer = tokenizer
        self._end = len(state.tokens)
        self.new_token_ids = new_token_ids
        self.finish_reason = state.finish_reason

    @property
    def state(self) -> RequestState:
        """The request itself, which goes on while this view stays."""
        return self._state

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
        """Output tokens so far, without the prompt."""
        return tuple(self._state.tokens[self._state.prompt_len : self._end])

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """Per output token: log-probabilities of the distribution it was drawn from, by id."""
        return tuple(self._state.logprobs[: self._end - self._state.prompt_len])

    @property
    def text(self) -> str:
        """The output decoded; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(list(self.token_ids))

    def __repr__(self) -> str:
        return (
            f"RequestOutput(req_id={self.req_id!r}, token_ids={list(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r})"
        )
