"""Options of the scheduler, validated once, when they are made.

Names are the production engine's where it has them (docs/rules.md, R37). Where a default differs
from it, `docs/design.md` says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from mdi_shared.errors import ConfigError, Rule, require, require_int, require_rules

UNLIMITED = 2**30
MOST_SEQS = 65_536  # seats of a rank; each takes memory before the first request comes
MOST_BLOCKS = 2**24  # two billion tokens at 128 a block; the list of free ones is kept in memory
MOST_SLOTS_PER_SEAT = 100.0
MOST_INT = 2**53  # of any option: up to it a float is exact
WATERMARK = 0.9  # share of the block pool above which no new prefill is wanted (R7)
CHUNK_POLICIES = ("token_budget", "cost_target")
SNAPSHOTS = ("prompt", "turn", "branch")  # when prefix reuse keeps a tail (prefix/cache.py)
EVICTIONS = ("lru", "flops")  # which one gives way (prefix/tails.py)
_AT_LEAST = {  # the least value of options that count
    1: ("max_num_seqs", "max_model_len", "prefill_attempt_interval",
        "prefill_any_attempt_interval", "block_size", "context_parallel_size"),
    0: ("lookahead", "num_draft_tokens", "eos_token_id"),
}  # fmt: skip
RETIRED = {"balance_target": False}  # options of earlier versions, and the value that was "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Everything the scheduler of one rank needs to know.

    Lengths and budgets are tokens, `num_blocks` counts KV blocks of `block_size` tokens including
    block 0, which is never handed out. `max_num_batched_tokens=None` derives the budget (see
    `token_budget`). `prefill_target_ms` is the device time a prefill step aims at, `slo_itl_ms`
    instead the longest gap between two tokens that a prefill step may cause.
    `enable_prefix_cache` lets requests go on where earlier ones had the same first tokens: at cuts
    whose state is among `prefix_tails` copies (left out: two per seat). `prefix_snapshots`, joined
    by +, says when one is kept, `prefix_eviction` which one gives way. Raises `ConfigError` naming
    the field, its value and what is allowed.
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
    enable_prefix_cache: bool = False
    prefix_tails: int | None = None
    prefix_snapshots: str = "+".join(SNAPSHOTS)
    prefix_eviction: str = EVICTIONS[0]

    def __post_init__(self) -> None:
        _check_types(self)
        for least, names in _AT_LEAST.items():
            for name in names:
                require_int(name, getattr(self, name), least)
        for rules in (self._pool_rules(), self._budget_rules(), self._chunk_policy_rules(),
                      self._prefix_rules()):  # fmt: skip
            require_rules(self, rules)

    def _pool_rules(self) -> Iterator[Rule]:
        yield "max_num_seqs", self.max_num_seqs <= MOST_SEQS, f"must be between 1 and {MOST_SEQS:,}"
        yield ("num_blocks", 2 <= self.num_blocks <= MOST_BLOCKS,
               f"must be between 2 (block 0 is reserved) and {MOST_BLOCKS:,}")  # fmt: skip
        yield ("state_slot_ratio", 1.0 <= self.state_slot_ratio <= MOST_SLOTS_PER_SEAT,
               f"must be between 1.0 and {MOST_SLOTS_PER_SEAT} slots per seat")  # fmt: skip

    def _budget_rules(self) -> Iterator[Rule]:
        budget = self.token_budget
        if self.max_num_batched_tokens is not None:
            yield from self._given_budget_rules(budget)
        yield ("context_parallel_size", self.cp_align <= budget, f"must be at most {budget // 2}: "
               "chunks come in multiples of twice as many tokens and must fit into the token "
               f"budget of {budget}")  # fmt: skip
        yield ("prefill_max_sum_seqlen_k", self.prefill_max_sum_seqlen_k >= self.prompt_limit,
               f"must be at least the longest prompt admitted, {self.prompt_limit}")  # fmt: skip
        yield ("block_size", self.block_size >= 1 + self.num_draft_tokens,
               "must be at least 1 + num_draft_tokens: a step adds one block")  # fmt: skip

    def _given_budget_rules(self, budget: int) -> Iterator[Rule]:
        name, rows = "max_num_batched_tokens", self._full_step_rows
        yield (name, budget >= rows, f"must be at least max_num_seqs * (1 + num_draft_tokens) = "
               f"{rows}, the rows of a full decode step")  # fmt: skip
        yield (name, budget >= self.cp_align,
               f"must be at least 2 * context_parallel_size = {self.cp_align}")  # fmt: skip
        yield (name, budget >= self.block_size or not self.strict_upstream, "the production "
               "engine does not start with less than a block, block_size = "
               f"{self.block_size}")  # fmt: skip
        yield (name, budget >= self.max_model_len or self.chunked_prefill, "without "
               f"chunked_prefill it must hold a whole prompt, max_model_len = {self.max_model_len};"
               " raise it, lower max_model_len, or set chunked_prefill = true")  # fmt: skip

    def _chunk_policy_rules(self) -> Iterator[Rule]:
        policies = ", ".join(CHUNK_POLICIES)
        yield "chunk_policy", self.chunk_policy in CHUNK_POLICIES, f"must be one of {policies}"
        bounds = {name: getattr(self, name) for name in ("prefill_target_ms", "slo_itl_ms")}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        if self.chunk_policy != "cost_target":
            for name in given:
                yield name, False, "is used by chunk_policy = 'cost_target' only"
            return
        yield ("prefill_target_ms", bool(given), "chunk_policy = 'cost_target' needs a step time "
               "above 0 ms, or slo_itl_ms")  # fmt: skip
        yield ("slo_itl_ms", len(given) == 1, "contradicts prefill_target_ms = "
               f"{self.prefill_target_ms}: give one of them")  # fmt: skip
        for name, bound in given.items():
            yield name, 0 < bound < inf, "must be a finite number above 0 ms"
        yield ("chunked_prefill", self.chunked_prefill,
               "chunk_policy = 'cost_target' splits prompts, so it must be true")  # fmt: skip

    def _prefix_rules(self) -> Iterator[Rule]:
        is_on, tails, saves = self.enable_prefix_cache, self.prefix_tails, self.prefix_snapshots
        yield ("enable_prefix_cache", not (is_on and self.strict_upstream), "contradicts "
               "strict_upstream: the production engine has no prefix cache")  # fmt: skip
        yield ("prefix_tails", is_on or tails is None, "is used by enable_prefix_cache = true only")
        yield ("prefix_tails", tails is None or 1 <= tails <= MOST_BLOCKS,
               f"must be between 1 and {MOST_BLOCKS:,}")  # fmt: skip
        names = saves.split("+")
        known = set(names) <= set(SNAPSHOTS) and len(names) == len(set(names))
        yield "prefix_snapshots", known, f"must be some of {', '.join(SNAPSHOTS)}, joined by +"
        yield ("prefix_eviction", self.prefix_eviction in EVICTIONS,
               f"must be one of {', '.join(EVICTIONS)}")  # fmt: skip

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
        usual = self.chunked_prefill and not self.strict_upstream
        return max(8_192 if usual else max(self.max_model_len, 4_096), self._full_step_rows)

    @property
    def _full_step_rows(self) -> int:
        """Rows of a decode step whose every seat is taken."""
        return self.max_num_seqs * (1 + self.num_draft_tokens)

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
    def num_tails(self) -> int:
        """Tails that prefix reuse keeps, and number 0, which is none; 0 without prefix reuse."""
        if not self.enable_prefix_cache:
            return 0
        return 1 + (2 * self.max_num_seqs if self.prefix_tails is None else self.prefix_tails)

    @property
    def keeps_order(self) -> bool:
        """Whether running sequences keep their order, and the decode clock tells who needs a block.

        They do where all grow by one token per step; upstream sorts equals anew in each.
        """
        return self.num_draft_tokens == 0 and not self.strict_upstream

    @property
    def runtime_max_model_len(self) -> int:
        """Positions a step may touch: the cap plus drafts in flight (R5)."""
        drafts = self.num_draft_tokens
        return self.max_model_len + 2 * drafts + (drafts + 1 if self.enable_zos else 0)

    @property
    def least_blocks(self) -> int:
        """The smallest pool that `require_pool_fits` lets pass."""
        return -(-self.runtime_max_model_len * 10 // (8 * self.block_size))

    def require_pool_fits(self) -> None:
        """Raise `ConfigError` when one request of `max_model_len` could exhaust the pool.

        The production engine refuses to start in that case (R37): runtime_max_model_len must
        not exceed 80 % of the pool's tokens.
        """
        most = int(0.8 * self.block_size * self.num_blocks)
        beyond = self.runtime_max_model_len - self.max_model_len
        require(beyond + self.max_model_len <= most, "num_blocks", self.num_blocks,
                f"the KV pool is too small for one request of max_model_len = {self.max_model_len}"
                f": it needs num_blocks >= {self.least_blocks} (more KV memory), or max_model_len "
                f"<= {most - beyond}")  # fmt: skip

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


def _check_types(config: SchedulerConfig) -> None:
    """An int option takes no bool, string, fraction or huge number; a bool option takes no int."""
    for field in fields(config):
        value, declared = getattr(config, field.name), field.type
        kinds = (declared.__name__ if isinstance(declared, type) else str(declared)).split(" | ")
        name = type(value).__name__ if value is not None else "None"
        ok = name in kinds or (name == "int" and "float" in kinds)
        require(ok, field.name, value, f"must be {' or '.join(kinds)}")
        is_wide = type(value) is int and value > MOST_INT
        require(not is_wide, field.name, value, f"must be at most {MOST_INT:,}")
