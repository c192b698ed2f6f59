"""How many tokens of the prompt at hand the next step runs.

`TokenBudget` fills the step up to the token budget, as the production engine does. `CostTarget`
fills it up to a step time, so that chunks shrink as their context grows and every step takes
about equally long (engine-semantics §7.3; the formulation is this project's own). Admission,
checkpoints and the lookahead are the scheduler's business, not a policy's.

Read next: `prefill.py` (the caller), `cost.py` and `work.py` (what a step takes).
"""

from collections.abc import Callable, Sequence
from math import lcm
from typing import Protocol

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost import StepCost
from mdi_shared.errors import ConfigError
from mdi_shared.shape import ModelShape
from mdi_shared.work import PromptRow, add_work, prefill_work


class ChunkPolicy(Protocol):
    """Decides the size of a chunk."""

    @property
    def target_ns(self) -> int:
        """Step time aimed at; 0 = none."""
        ...

    def chunk_tokens(
        self,
        picked: Sequence[PromptRow],
        cached: int,
        remaining: int,
        room: int,
        prompt_len: int,
    ) -> int:
        """Return how many of the `remaining` >= 1 tokens to run now; 0 = the step is full.

        `picked` are (q, k, prompt length) of the sequences already in the step, `cached` tokens
        of this prompt are done, and `room` tokens are left of the token budget, a multiple of
        the context-parallel alignment. An empty step with room gets at least one token.
        """
        ...


class TokenBudget:
    """As many tokens as there is room for."""

    target_ns = 0

    def chunk_tokens(
        self,
        picked: Sequence[PromptRow],
        cached: int,
        remaining: int,
        room: int,
        prompt_len: int,
    ) -> int:
        return min(remaining, room)


class CostTarget:
    """As many tokens as keep the step's device time at or below `target_ns` (§7.3).

    A chunk that is not a prompt's last is a multiple of `align` and `cp_align`, and at least
    `min_chunk` tokens: a smaller one waits, or, in an empty step, is raised to that whatever
    the target says, so that every prompt proceeds. A rest below `tail_min` tokens joins the
    chunk before it if that costs at most a tenth over the target. Raises `ConfigError` for a
    setting below its least value.
    """

    def __init__(
        self,
        shape: ModelShape,
        cost: StepCost,
        target_ns: int,
        *,
        align: int = 128,
        cp_align: int = 1,
        tail_min: int = 256,
        min_chunk: int = 256,
    ) -> None:
        for name, value, least in (
            ("target_ns", target_ns, 1),
            ("align", align, 1),
            ("cp_align", cp_align, 1),
            ("tail_min", tail_min, 0),
            ("min_chunk", min_chunk, 1),
        ):
            if value < least:
                raise ConfigError(name, value, f"must be at least {least}")
        self.shape = shape
        self.cost = cost
        self.target_ns = target_ns
        self.align = lcm(align, cp_align)
        self.tail_min = tail_min
        self.min_chunk = -(-min_chunk // cp_align) * cp_align

    def chunk_tokens(
        self,
        picked: Sequence[PromptRow],
        cached: int,
        remaining: int,
        room: int,
        prompt_len: int,
    ) -> int:
        base = prefill_work(self.shape, picked)

        def step_ns(tokens: int) -> int:
            row = (tokens, cached + tokens, prompt_len)
            return self.cost.device_ns(add_work(base, prefill_work(self.shape, [row])))

        most = min(remaining, room)
        fitting = _largest(most, lambda tokens: step_ns(tokens) <= self.target_ns)
        if fitting == remaining:
            return remaining
        merged = remaining - fitting < self.tail_min and remaining <= room
        if merged and 10 * step_ns(remaining) <= 11 * self.target_ns:
            return remaining
        tokens = fitting // self.align * self.align
        if tokens >= self.min_chunk:
            return tokens
        return 0 if picked else min(self.min_chunk, most)


def make_policy(config: SchedulerConfig, shape: ModelShape, cost: StepCost) -> ChunkPolicy:
    """Return the policy `config` names; `prefill_target_ms` is a step's device time."""
    if config.chunk_policy == "token_budget":
        return TokenBudget()
    assert config.prefill_target_ms is not None, "the config demands a target for cost_target"
    target_ns = int(config.prefill_target_ms * 1e6 + 0.5)
    return CostTarget(shape, cost, target_ns, cp_align=config.cp_align)


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """Return the largest n in 0..most for which `holds`; it must hold below any n it holds for.

    Takes at most 1 + log2(most) probes; 0 counts as holding.
    """
    if most < 1 or holds(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
