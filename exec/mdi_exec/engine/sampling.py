"""What a request asks of the sampler, validated once, when it is made, and a step's rows of it.

Names and defaults are the production engine's (docs/rules.md, R37). This is not the sampler:
see `ops/sampler.py` for the order of operations, `ops/gumbel.py` for the random numbers.
"""

import secrets
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mdi_exec.model.staging import Array
from mdi_exec.ops.sampler import NO_GOLDEN, SamplingNeeds
from mdi_shared.errors import ConfigError
from mdi_shared.request import NO_HINTS, Hints

SEED_MODULUS = 2**64
MOST_INT32 = 2**31 - 1
MOST_TEMPERATURE = 3.4e38  # what float32 holds
MOST_TOP_LOGPROBS = 1000
MOST_SAMPLES = 1000  # of one prompt
MOST_STOPS, MOST_STOP_CHARS = 16, 256
COLDEST = 1e-5  # a temperature below counts as this one, without filters (R28)
NO_TOP_K = -1
MOST_RANKS = 2**62  # above every vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    `n` outputs are drawn for the prompt, each a request of its own. `temperature` 0 is greedy;
    `top_k` -1 is off; `max_tokens` 0 means 1. `stop_token_ids` end the request as EOS does,
    `ignore_eos` concerns EOS alone; `stop`, a text or several, ends it where the output's text has
    one, and cuts the text there. `first_n_token_no_eos` 1 bans EOS as the first token.
    `top_logprobs` adds that many alternatives to each token. `golden_token_ids` replace the sampled
    tokens one by one, -1 = sample normally. `seq_seed` is taken modulo 2^64; `rng_seed` is the one
    in use: `seq_seed`, or a random one of this object when that is None (a `dataclasses.replace`
    draws anew). `seed` and `logprobs` are other names to give `seq_seed` and `top_logprobs` by.
    `hints` are for the scheduling policy. Raises `ConfigError` naming field, value and what is
    allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] | list[str] | str = ()
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    golden_token_ids: tuple[int, ...] = ()
    seq_seed: int | None = None
    hints: Hints = NO_HINTS
    rng_seed: int = field(init=False, repr=False, compare=False)
    seed: InitVar[int | None] = None
    logprobs: InitVar[int | None] = None

    def __post_init__(self, seed: int | None, logprobs: int | None) -> None:
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name in ("stop_token_ids", "golden_token_ids", "stop"):
            if isinstance(getattr(self, name), list):
                self._set(name, tuple(getattr(self, name)))
        _check_types(self)
        self._set_alias("seed", seed, "seq_seed", None)
        self._set_alias("logprobs", logprobs, "top_logprobs", 0)
        self._check_filters()
        self._check_tokens()
        self._check_ends()
        self._set("max_tokens", max(self.max_tokens, 1))
        given = self.seq_seed
        self._set("rng_seed", secrets.randbits(64) if given is None else given % SEED_MODULUS)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set_alias(self, alias: str, value: object, name: str, default: object) -> None:
        if value is None:
            return
        _require(_is_int(value), alias, value, "must be an integer")
        other = getattr(self, name)
        _require(other in (default, value), alias, value, f"contradicts {name} = {other!r}")
        self._set(name, value)

    def _check_filters(self) -> None:
        temperature, top_p, top_k = self.temperature, self.top_p, self.top_k
        _require(0 <= temperature <= MOST_TEMPERATURE, "temperature", temperature,
                 f"must be from 0 (greedy) to {MOST_TEMPERATURE:g}")  # fmt: skip
        _require(0.0 < top_p <= 1.0, "top_p", top_p, "must be above 0 and at most 1 (1 = off)")
        _require(top_k == NO_TOP_K or 1 <= top_k <= MOST_INT32, "top_k", top_k,
                 f"must be from 1 to {MOST_INT32}, or -1 (off)")  # fmt: skip

    def _check_tokens(self) -> None:
        seed = self.seq_seed
        _require(seed is None or -(SEED_MODULUS // 2) <= seed < SEED_MODULUS, "seq_seed", seed,
                 "must fit in 64 bits")  # fmt: skip
        _require(1 <= self.n <= MOST_SAMPLES, "n", self.n, f"must be from 1 to {MOST_SAMPLES}")
        _require(0 <= self.top_logprobs <= MOST_TOP_LOGPROBS, "top_logprobs", self.top_logprobs,
                 f"must lie in 0 .. {MOST_TOP_LOGPROBS}")  # fmt: skip
        _require(all(t >= NO_GOLDEN for t in self.golden_token_ids), "golden_token_ids",
                 self.golden_token_ids, "each must be at least 0, or -1 (sample)")  # fmt: skip

    def _check_ends(self) -> None:
        _require(0 <= self.max_tokens <= MOST_INT32, "max_tokens", self.max_tokens,
                 f"must be from 1 to {MOST_INT32} (0 counts as 1)")  # fmt: skip
        _require(self.first_n_token_no_eos in (0, 1), "first_n_token_no_eos",
                 self.first_n_token_no_eos, "must be 0 or 1")  # fmt: skip
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids,
                 "each must be at least 0")  # fmt: skip
        fits = all(1 <= len(text) <= MOST_STOP_CHARS for text in self.stop)
        _require(fits and len(self.stop) <= MOST_STOPS, "stop", self.stop,
                 f"must be at most {MOST_STOPS} texts of 1 to {MOST_STOP_CHARS} "
                 "characters")  # fmt: skip

    def sample(self, index: int) -> "SamplingParams":
        """Return the parameters of output `index` of `n`, a request of its own; seeds count up."""
        if self.n == 1:
            return self
        seed = None if self.seq_seed is None else (self.seq_seed + index) % SEED_MODULUS
        return replace(self, n=1, seq_seed=seed)

    def golden_token(self, output_index: int) -> int:
        """Return the token that must be generated at this output index, -1 when none is given."""
        golden = self.golden_token_ids
        return golden[output_index] if output_index < len(golden) else NO_GOLDEN

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise `ConfigError` for a token id that the vocabulary does not have."""
        for name in ("stop_token_ids", "golden_token_ids"):
            ids = getattr(self, name)
            _require(all(t < vocab_size for t in ids), name, ids,
                     f"each must be below vocab_size = {vocab_size}")  # fmt: skip


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(field, value, allowed)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(params: SamplingParams) -> None:
    """An int option takes no bool, string or fraction; a bool option takes no int."""
    for name in ("temperature", "top_p"):
        value = getattr(params, name)
        _require(_is_int(value) or isinstance(value, float), name, value, "must be a number")
    for name in ("n", "top_k", "max_tokens", "top_logprobs", "first_n_token_no_eos"):
        _require(_is_int(getattr(params, name)), name, getattr(params, name), "must be an integer")
    for name in ("stop_token_ids", "golden_token_ids"):
        ids = getattr(params, name)
        _require(isinstance(ids, tuple) and all(_is_int(t) for t in ids), name, ids,
                 "must be a list or tuple of integers")  # fmt: skip
    is_texts = isinstance(params.stop, tuple) and all(isinstance(s, str) for s in params.stop)
    _require(is_texts, "stop", params.stop, "must be a text, or a list or tuple of texts")
    _require(isinstance(params.ignore_eos, bool), "ignore_eos", params.ignore_eos,
             "must be true or false")  # fmt: skip
    _require(params.seq_seed is None or _is_int(params.seq_seed), "seq_seed", params.seq_seed,
             "must be an integer, or None for a random one")  # fmt: skip


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts: the same for all, or one given for each.

    Raises `ConfigError` for as many as there are not prompts, and for what is no `SamplingParams`.
    """
    if params is None:
        return [SamplingParams() for _ in range(count)]
    if isinstance(params, SamplingParams):
        return [params] * count
    _require(isinstance(params, Sequence) and not isinstance(params, str), "sampling_params",
             params, "must be a SamplingParams, or a list of them")  # fmt: skip
    for index, one in enumerate(params):
        _require(isinstance(one, SamplingParams), f"sampling_params[{index}]", one,
                 "must be a SamplingParams")  # fmt: skip
    _require(len(params) == count, "sampling_params", len(params),
             f"there must be one for each of the {count} prompts")  # fmt: skip
    return list(params)


class Draw(NamedTuple):
    """What one row of logits is asked for.

    `position`, the index of the token being generated in its sequence, keys the random number.
    `output_index` counts the request's own tokens, 0 = its first.
    """

    params: SamplingParams
    position: int
    output_index: int


def sampling_needs(draws: Sequence[Draw]) -> SamplingNeeds:
    """Return what the most demanding of some draws needs."""
    params = [draw.params for draw in draws]
    warm = [p for p in params if p.temperature >= COLDEST]
    return SamplingNeeds(
        has_filters=any(p.top_p < 1.0 or p.top_k != NO_TOP_K for p in warm),
        has_noise=any(p.temperature != 0 for p in params),
        num_top=max((p.top_logprobs for p in params), default=0),
    )


def draw_columns(draws: Sequence[Draw]) -> dict[str, Array]:
    """Return the values of `SamplingRows` as host arrays [n], by name."""
    params = [draw.params for draw in draws]
    outputs = [draw.output_index for draw in draws]
    temperature = np.array([p.temperature for p in params], dtype=np.float64)
    is_cold = temperature < COLDEST
    top_k = np.array([p.top_k for p in params], dtype=np.int64)
    golden = [p.golden_token(i) if p.golden_token_ids else NO_GOLDEN
              for p, i in zip(params, outputs, strict=True)]  # fmt: skip
    banned_until = np.array([p.first_n_token_no_eos for p in params], dtype=np.int64)
    return {
        "seeds": np.array([p.rng_seed for p in params], dtype=np.uint64).view(np.int64),
        "positions": np.array([draw.position for draw in draws], dtype=np.int64),
        "temperature": np.maximum(temperature, COLDEST),
        "top_p": np.where(is_cold, 1.0, np.array([p.top_p for p in params], np.float64)),
        "top_k": np.where(is_cold | (top_k == NO_TOP_K), MOST_RANKS, top_k),
        "golden_ids": np.array(golden, dtype=np.int64),
        "is_greedy": temperature == 0,
        "bans_eos": banned_until > np.array(outputs, dtype=np.int64),
    }
