"""Who goes next: prompts, those who decode, or both in one step.

The production engine votes now and then (docs/rules.md, R6). These answer at every turn instead,
and the ranks of a group agree: prompts go as soon as one rank has some that may.
"""

from dataclasses import dataclass

from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import require, require_int
from mdi_shared.policies.base import Policy, View, number, shown


@dataclass(eq=False)
class Votes(Policy):
    """Prompts go when a vote says so: what the engine does without a policy."""


@dataclass(eq=False)
class PrefillFirst(Policy):
    """A prompt that may take memory goes before those who decode, at every turn.

    Source: Orca (OSDI 22), vLLM's first engine.
    """

    def phase(self, view: View) -> bool:
        return True


@dataclass(eq=False)
class DecodeFirst(Policy):
    """No prompt goes while anybody decodes on its rank.

    Source: what Sarathi-Serve (OSDI 24) calls decode-prioritizing, with FasterTransformer.
    """

    def phase(self, view: View) -> bool:
        return False


@dataclass(eq=False)
class Mixed(Policy):
    """Those who decode and prompt chunks go together, in steps of at most `budget` tokens.

    Who decodes comes first, prompts get what is left. 0 is the run's own token budget.
    Source: Sarathi-Serve (OSDI 24); vLLM since its first version.
    """

    budget: int = number(0)
    mixes = True

    def phase(self, view: View) -> bool:
        return True


def require_allowed(policy: Policy | None, config: SchedulerConfig) -> None:
    """Raise `ConfigError` for a policy that these options do not allow (docs/design.md)."""
    if policy is None:
        return
    name = shown(policy)
    require(not config.strict_upstream, "policy", name, "contradicts strict_upstream, which has "
            "the production engine's rules")  # fmt: skip
    require_int(f"policy {name}: evict", policy.evict, 0)
    if policy.evict:
        require(not config.stop_preempted_request, "policy", name, "evicts running requests, which "
                "stop_preempted_request would end")  # fmt: skip
        require(not policy.mixes, "policy", name, "evicts at an attempt to prefill; a mixed step "
                "has chosen who decodes by then")  # fmt: skip
    if not policy.mixes:
        return
    for option, needed in (("num_draft_tokens", 0), ("context_parallel_size", 1),
                           ("chunked_prefill", True)):  # fmt: skip
        require(getattr(config, option) == needed, "policy", name, "mixed steps need "
                f"{option} = {str(needed).lower()}")  # fmt: skip
    holds = type(policy.budget) is int and 0 <= policy.budget <= config.token_budget
    require(holds, "policy", name, f"the budget of a mixed step, {policy.budget}, must be an int "
            f"from 0 to the token budget, {config.token_budget}")  # fmt: skip
