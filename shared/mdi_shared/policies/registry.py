"""Policies by name: `srpt:sigma=0.5`, `order=sjf+admit=past_future+victim=newest`.

A specification is parts joined by +. The first may be a policy's name alone, which then answers
everything; AXIS=NAME replaces its answer to one question; `max_wait_s=S` bounds waiting. A name
takes parameters after a colon, joined by commas.
"""

from collections.abc import Mapping
from copy import deepcopy
from math import inf

from mdi_shared.by_name import named, read_number
from mdi_shared.errors import ConfigError
from mdi_shared.policies.admission import (
    MCSF,
    Conservative,
    Future,
    PastFuture,
    RunToCompletion,
    Wait,
    Watermark,
)
from mdi_shared.policies.arrival import FCFS, LCFS, Priority, Random
from mdi_shared.policies.attained import LAS, MLFQ
from mdi_shared.policies.base import Key, Policy, View
from mdi_shared.policies.deadlines import EDF, LARS, QoE
from mdi_shared.policies.fairness import VTC
from mdi_shared.policies.output_length import SJF, SRPT, LimitedSRPT
from mdi_shared.policies.phases import DecodeFirst, Mixed, PrefillFirst, Votes
from mdi_shared.policies.prompt_length import ShortestPrompt, SJFAging, SJFDecay, TwoLanes
from mdi_shared.policies.victims import (
    CostAware,
    LeastComputed,
    LongestOutput,
    LongestRemaining,
    LowestPriority,
    Newest,
)
from mdi_shared.request import Sequence

POLICIES: Mapping[str, type[Policy]] = {
    "fcfs": FCFS, "lcfs": LCFS, "random": Random, "priority": Priority,
    "shortest_prompt": ShortestPrompt, "sjf_aging": SJFAging, "sjf_decay": SJFDecay,
    "two_lanes": TwoLanes, "sjf": SJF, "srpt": SRPT, "limited_srpt": LimitedSRPT,
    "mlfq": MLFQ, "las": LAS, "edf": EDF, "lars": LARS, "qoe": QoE, "vtc": VTC,
    "mcsf": MCSF, "run_to_completion": RunToCompletion, "watermark": Watermark,
    "conservative": Conservative, "future": Future, "past_future": PastFuture, "wait": Wait,
    "newest": Newest, "longest_output": LongestOutput, "lowest_priority": LowestPriority,
    "least_computed": LeastComputed, "cost_aware": CostAware,
    "longest_remaining": LongestRemaining,
    "votes": Votes, "prefill_first": PrefillFirst, "decode_first": DecodeFirst, "mixed": Mixed,
}  # fmt: skip
NO_POLICY = "fcfs"  # the engine's own rules, without asking anybody
AXES = ("phase", "order", "admit", "victim")
# Inherited, but a choice by name.
_DEFAULTS = {"phase": "votes", "order": "fcfs", "victim": "longest_output"}


class Combined(Policy):
    """One policy per question; each is told what was served."""

    def __init__(self, spec: str, axes: Mapping[str, Policy], max_wait_s: float) -> None:
        self.spec = spec
        self.max_wait_s = max_wait_s
        self._phase, self._order, self._admit, self._victim = (axes[axis] for axis in AXES)
        self._all = tuple(dict.fromkeys(axes.values()))
        self.mixes, self.budget = self._phase.mixes, self._phase.budget
        self.evict = self._order.evict
        self.keeps_keys = self._order.keeps_keys
        self._by_hook = {"phase": self._phase, "order": self._order, "admit": self._admit,
                         "victim": self._victim}  # fmt: skip

    def __str__(self) -> str:
        return self.spec

    def answering(self, hook: str) -> Policy:
        return self._by_hook.get(hook, self)

    def answers(self, hook: str) -> bool:
        asked = [self._by_hook[hook]] if hook in self._by_hook else self._all
        return any([policy.answers(hook) for policy in asked])

    def look(self, view: View) -> None:
        for policy in self._all:
            policy.look(view)

    @property
    def has_phase(self) -> bool:
        return self._phase.has_phase

    def phase(self, view: View) -> bool:
        return self._phase.phase(view)

    def order(self, seq: Sequence, view: View) -> Key:
        return self._order.order(seq, view)

    def admit(self, seq: Sequence, view: View) -> bool:
        return self._admit.admit(seq, view)

    def victim(self, seq: Sequence, view: View) -> Key:
        return self._victim.victim(seq, view)

    def makes_way(self, seq: Sequence, waiter: Sequence, view: View) -> bool:
        return self._order.makes_way(seq, waiter, view)

    def served(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        for policy in self._all:
            policy.served(seq, prompt_tokens, output_tokens)


def policy_from_spec(spec: str) -> Policy:
    """Return a fresh policy; raises `ConfigError` naming what is allowed."""
    if not isinstance(spec, str):
        raise ConfigError("policy", spec, "must be a text such as srpt:sigma=0.5, or a Policy")
    parts = spec.split("+")
    has_base = "=" not in parts[0].partition(":")[0]
    base = _named(spec, parts[0]) if has_base else Policy()
    axes = dict.fromkeys(AXES, base)
    max_wait_s, given = inf, set()
    for part in parts[1:] if has_base else parts:
        axis, equals, name = part.partition("=")
        if axis in given:
            raise ConfigError("policy", spec, f"gives {axis} twice")
        given.add(axis)
        if axis == "max_wait_s":
            max_wait_s = read_number("policy", spec, "max_wait_s", name, float)
            if max_wait_s < 0:
                raise ConfigError("policy", spec, "max_wait_s must be at least 0 s")
        elif axis in AXES and equals:
            axes[axis] = _named(spec, name, axis)
        else:
            raise ConfigError("policy", spec, f"{part!r} must be AXIS=NAME with an axis of "
                              f"{', '.join(AXES)}, or max_wait_s=SECONDS")  # fmt: skip
    if any(axes[axis].evict and axes[axis] is not axes["order"] for axis in AXES):
        raise ConfigError("policy", spec, "evict is for the policy that answers order")
    return Combined(spec, axes, max_wait_s)


def new_policy(given: str | Policy) -> Policy | None:
    """Return a policy that has decided nothing yet: a copy of the caller's, or one by its name.

    None for `fcfs`: the core then asks nothing.
    """
    if isinstance(given, Policy):
        return deepcopy(given)
    return None if given == NO_POLICY else policy_from_spec(given)


def policy_name(given: str | Policy) -> str:
    """Return what a run's metadata calls a policy."""
    return type(given).__name__ if isinstance(given, Policy) else given


def answers(kind: type[Policy], axis: str) -> bool:
    """Say whether policies of this class have an answer of their own to `axis`."""
    return getattr(kind, axis) is not getattr(Policy, axis)


def names_of(axis: str) -> list[str]:
    """Return the names that `axis` can be given."""
    return [name for name, kind in POLICIES.items()
            if answers(kind, axis) or name == _DEFAULTS.get(axis)]  # fmt: skip


def _named(spec: str, text: str, axis: str | None = None) -> Policy:
    """Build NAME or NAME:PARAMETER=VALUE,…"""
    if axis is None:
        return named("policy", spec, text, POLICIES, "a policy")
    known = {name: POLICIES[name] for name in names_of(axis)}
    return named("policy", spec, text, known, f"a policy with an answer to {axis}")
