"""Options of the scheduler, validated once, when they are made.

Names are the production engine's where it has them (docs/rules.md, R37). Where a default differs
from it, `docs/design.md` says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from mdi_shared.errors import ConfigError

UNLIMITED = 2**30
MOST_SEQS = 65_536  # seats of a rank; each takes memory before the first request comes
MOST_BLOCKS = 2**24  # two billion tokens at 128 a block; the list of free ones is kept in memory
MOST_SLOTS_PER_SEAT = 100.0
WATERMARK = 0.9  # share of the block pool above which no new prefill is wanted (R7)
CHUNK_POLICIES = ("token_budget", "cost_target")
RETIRED = {"balance_target": False}  # options of earlier versions, and the value that was "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Everything the scheduler of one rank needs to know.

    Lengths and budgets are tokens, `num_blocks` counts KV blocks of `block_size` tokens including
    block 0, which is never handed out. `max_num_batched_tokens=None` derives the budget (see
    `token_budget`). `prefill_target_ms` is the device time a prefill step aims at, `slo_itl_ms`
    instead the longest gap between two tokens that a prefill step may cause. Raises `ConfigError`
    naming the field, its value and what is allowed.
    """

    max_num_seqs: int = 256
    max_model_len: int = 131_072
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    prefill_max_sum_seqlen_k: int = UNLIMITED
    stop_preempted_request: bool = False
    lookahead: int = 0
    block_size: int = 128
    num_blocks: int = 16_384
    state_slot_ratio: float = 1.2
    num_draft_tokens: int = 0
    enable_zos: bool = True
    context_parallel_size: int = 1
    eos_token_id: int = 1
    chunk_policy: str = "token_budget"
    prefill_target_ms: float | None = None
    slo_itl_ms: float | None = None
    strict_upstream: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        for name in (
            "max_num_seqs", "max_model_len", "prefill_attempt_interval",
            "prefill_any_attempt_interval", "block_size", "context_parallel_size",
        ):  # fmt: skip
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("lookahead", "num_draft_tokens", "eos_token_id"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must be at least 0")
        _require(self.max_num_seqs <= MOST_SEQS, "max_num_seqs", self.max_num_seqs,
                 f"must be between 1 and {MOST_SEQS:,}")  # fmt: skip
        _require(2 <= self.num_blocks <= MOST_BLOCKS, "num_blocks", self.num_blocks,
                 f"must be between 2 (block 0 is reserved) and {MOST_BLOCKS:,}")  # fmt: skip
        _require(1.0 <= self.state_slot_ratio <= MOST_SLOTS_PER_SEAT, "state_slot_ratio",
                 self.state_slot_ratio,
                 f"must be between 1.0 and {MOST_SLOTS_PER_SEAT} slots per seat")  # fmt: skip
        self._check_budget()
        self._check_chunk_policy()

    def _check_budget(self) -> None:
        budget, rows = self.max_num_batched_tokens, self.max_num_seqs * (1 + self.num_draft_tokens)
        if budget is not None:
            _require(budget >= rows, "max_num_batched_tokens", budget,
                     f"must be at least max_num_seqs * (1 + num_draft_tokens) = {rows}, "
                     "the rows of a full decode step")  # fmt: skip
            _require(budget >= self.cp_align, "max_num_batched_tokens", budget,
                     f"must be at least 2 * context_parallel_size = {self.cp_align}")  # fmt: skip
            _require(not self.strict_upstream or budget >= self.block_size,
                     "max_num_batched_tokens", budget, "the production engine does not start with "
                     f"less than a block, block_size = {self.block_size}")  # fmt: skip
            _require(self.chunked_prefill or budget >= self.max_model_len,
                     "max_num_batched_tokens", budget,
                     f"without chunked_prefill it must hold a whole prompt, max_model_len = "
                     f"{self.max_model_len}; raise it, lower max_model_len, or set "
                     "chunked_prefill = true")  # fmt: skip
        _require(self.cp_align <= self.token_budget, "context_parallel_size",
                 self.context_parallel_size, f"must be at most {self.token_budget // 2}: chunks "
                 "come in multiples of twice as many tokens and must fit into the token budget of "
                 f"{self.token_budget}")  # fmt: skip
        _require(self.prefill_max_sum_seqlen_k >= self.prompt_limit, "prefill_max_sum_seqlen_k",
                 self.prefill_max_sum_seqlen_k,
                 f"must be at least the longest prompt admitted, {self.prompt_limit}")  # fmt: skip
        _require(self.block_size >= 1 + self.num_draft_tokens, "block_size", self.block_size,
                 "must be at least 1 + num_draft_tokens: a step adds one block")  # fmt: skip

    def _check_chunk_policy(self) -> None:
        _require(self.chunk_policy in CHUNK_POLICIES, "chunk_policy", self.chunk_policy,
                 f"must be one of {', '.join(CHUNK_POLICIES)}")  # fmt: skip
        bounds = {name: getattr(self, name) for name in ("prefill_target_ms", "slo_itl_ms")}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        if self.chunk_policy != "cost_target":
            for name, bound in given.items():
                _require(False, name, bound, "is used by chunk_policy = 'cost_target' only")
            return
        _require(bool(given), "prefill_target_ms", None, "chunk_policy = 'cost_target' needs a "
                 "step time above 0 ms, or slo_itl_ms")  # fmt: skip
        _require(len(given) == 1, "slo_itl_ms", self.slo_itl_ms, "contradicts prefill_target_ms = "
                 f"{self.prefill_target_ms}: give one of them")  # fmt: skip
        for name, bound in given.items():
            _require(0 < bound < inf, name, bound, "must be a finite number above 0 ms")
        _require(self.chunked_prefill, "chunked_prefill", self.chunked_prefill,
                 "chunk_policy = 'cost_target' splits prompts, so it must be true")  # fmt: skip

    @property
    def cp_align(self) -> int:
        """Chunk lengths are counted in multiples of this many tokens (R13)."""
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size

    @property
    def token_budget(self) -> int:
        """Prefill tokens per step.

        Not given: 8,192 with chunked prefill, else one whole prompt, and never less than a full
        decode step. `strict_upstream` keeps the production rule (R37), whose budget follows
        max_model_len even when prompts can be chunked.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        rows = self.max_num_seqs * (1 + self.num_draft_tokens)
        if self.chunked_prefill and not self.strict_upstream:
            return max(8_192, rows)
        return max(self.max_model_len, 4_096, rows)

    @property
    def prompt_limit(self) -> int:
        """Longest prompt admitted, tokens.

        A prompt that may not be cut must fit into a step, and context parallelism counts in
        multiples of `cp_align`. Upstream forgets the latter: such a prompt waits there for ever.
        """
        if self.chunked_prefill:
            return self.max_model_len
        align = 1 if self.strict_upstream else self.cp_align
        return min(self.max_model_len, self.token_budget // align * align)

    @property
    def num_slots(self) -> int:
        """State slots including slot 0, which is never handed out."""
        return int(self.state_slot_ratio * self.max_num_seqs) + 1

    @property
    def runtime_max_model_len(self) -> int:
        """Positions a step may touch: the cap plus drafts in flight (R5)."""
        drafts = self.num_draft_tokens
        return self.max_model_len + 2 * drafts + (drafts + 1 if self.enable_zos else 0)

    def require_pool_fits(self) -> None:
        """Raise `ConfigError` when one request of `max_model_len` could exhaust the pool.

        The production engine refuses to start in that case (R37): runtime_max_model_len must
        not exceed 80 % of the pool's tokens.
        """
        most = int(0.8 * self.block_size * self.num_blocks)
        if self.runtime_max_model_len > most:
            need = -(-self.runtime_max_model_len * 10 // (8 * self.block_size))
            raise ConfigError(
                "num_blocks", self.num_blocks,
                f"the KV pool is too small for one request of max_model_len = "
                f"{self.max_model_len}: it needs num_blocks >= {need} (more KV memory), or "
                f"max_model_len <= {most - (self.runtime_max_model_len - self.max_model_len)}",
            )  # fmt: skip

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "SchedulerConfig":
        """Build from names and values; an unknown name is an error that lists the known ones.

        Records of earlier versions hold retired options, which are read where they were off.
        """
        known = [f.name for f in fields(cls)]
        for name, value in options.items():
            if name in RETIRED and value is not RETIRED[name]:
                raise ConfigError(name, value, "this option was removed (docs/log.md says why); "
                                  f"a record may have it as {RETIRED[name]}")  # fmt: skip
            if name not in known and name not in RETIRED:
                raise ConfigError(name, value, f"unknown option; known: {', '.join(known)}")
        return cls(**{name: options[name] for name in options if name not in RETIRED})


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(field, value, allowed)


def _check_types(config: SchedulerConfig) -> None:
    """An int option takes no bool, string or fraction; a bool option takes no int."""
    for field in fields(config):
        value = getattr(config, field.name)
        declared = field.type
        kinds = (declared.__name__ if isinstance(declared, type) else str(declared)).split(" | ")
        name = type(value).__name__ if value is not None else "None"
        ok = name in kinds or (name == "int" and "float" in kinds)
        _require(ok, field.name, value, f"must be {' or '.join(kinds)}")
