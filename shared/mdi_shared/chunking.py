"""How many tokens of the prompt at hand the next step runs.

`TokenBudget` fills the step up to the token budget, as the production engine does. `CostTarget`
fills it up to a step time, so that chunks shrink as their context grows and every step takes
about equally long (docs/rules.md, R33; the formulation is this project's own). Admission,
checkpoints and the lookahead are the scheduler's business, not a policy's.

Read next: `prefill.py` (the caller), `cost/step_cost.py` and `work.py` (what a step takes).
"""

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Protocol

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.cost.work import add_work, decode_work, prefill_work
from mdi_shared.errors import ConfigError
from mdi_shared.plan import PromptRow


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
    """As many tokens as keep the step's device time at or below `target_ns` (R33).

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
    """Return the policy `config` names, or the token budget where `fallback_note` says why.

    Raises `ConfigError` when `slo_itl_ms` leaves no time for a prefill step.
    """
    if config.chunk_policy == "token_budget" or why_not_control(cost) is not None:
        return TokenBudget()
    return CostTarget(shape, cost, _target_ns(config, shape, cost), cp_align=config.cp_align)


def fallback_note(config: SchedulerConfig, cost: StepCost) -> str | None:
    """Say that chunks follow the token budget although `config` asks for a cost target, and why."""
    reason = why_not_control(cost) if config.chunk_policy == "cost_target" else None
    if reason is None:
        return None
    return f"chunks follow the token budget, {config.token_budget:,}, not the cost target: {reason}"


def why_not_control(cost: StepCost) -> str | None:
    """Return why chunk sizes may not be chosen by `cost`; None when they may (R32, the gate).

    A fitted model must have predicted prefill steps of held-out shapes well enough; its file says
    so. A model that was not fitted has no such error and is taken at its word.
    """
    fit = cost.fit.get("prefill") if isinstance(cost, LinearCost) else None
    if not isinstance(fit, Mapping) or fit.get("usable_for_control", False) is True:
        return None
    error = fit.get("held_out_mape")
    size = f"is {error:.1%}" if isinstance(error, float) else "is not known"
    return f"the model's error on prefill steps of held-out shapes {size}, too uncertain for that"


def _target_ns(config: SchedulerConfig, shape: ModelShape, cost: StepCost) -> int:
    """Return the device time to aim at, ns: the one given, or what the allowed gap leaves.

    A prefill step falls into one gap between two tokens of every running sequence. Two more things
    fall into that gap, and neither overlaps with the step: the host's work for it, taken for a full
    token budget, and the decode step that ends the gap, taken as the shortest there is.
    """
    if config.prefill_target_ms is not None:
        return int(config.prefill_target_ms * 1e6 + 0.5)
    assert config.slo_itl_ms is not None, "the config demands one of the two for cost_target"
    host = cost.host.of_step(1, config.token_budget, is_alone=True)
    others = sum(host) + cost.device_ns(decode_work(shape, [1]))
    target = int(config.slo_itl_ms * 1e6 + 0.5) - others
    if target < 1:
        raise ConfigError("slo_itl_ms", config.slo_itl_ms, f"must be above the {others / 1e6:.3f} "
                          "ms that the host and one decode step take")  # fmt: skip
    return target


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
