"""Who gives way when blocks run out; they combine with any order and admission."""

from dataclasses import dataclass

from mdi_shared.policies.base import Key, Policy, View
from mdi_shared.policies.prediction import Predicting
from mdi_shared.request import Sequence


@dataclass(eq=False)
class Newest(Policy):
    """The request that came last. Source: vLLM with first come, first served."""

    def victim(self, seq: Sequence, view: View) -> Key:
        return seq.seq_id


@dataclass(eq=False)
class LongestOutput(Policy):
    """The longest output, of equals the older request: what the engine does without a policy."""


@dataclass(eq=False)
class LowestPriority(Policy):
    """The least urgent class, of equals the newest. Source: vLLM's priority scheduling."""

    def victim(self, seq: Sequence, view: View) -> Key:
        return (-seq.request.hints.priority, seq.seq_id)


@dataclass(eq=False)
class LeastComputed(Policy):
    """The one with the fewest tokens to compute again. Source: vLLM RFC 54644, PR 53723."""

    def victim(self, seq: Sequence, view: View) -> Key:
        return -seq.num_tokens


@dataclass(eq=False)
class CostAware(Policy):
    """The most blocks freed per token to compute again, less for one that is nearly done.

    blocks / tokens * (1 - output / max_tokens). Source: vLLM PR 56897.
    """

    def victim(self, seq: Sequence, view: View) -> Key:
        done = seq.output_len / seq.request.max_tokens
        return len(seq.block_table) / seq.num_tokens * (1 - done)


@dataclass(eq=False)
class LongestRemaining(Predicting):
    """The one with most output still predicted, as SRPT would have it."""

    def victim(self, seq: Sequence, view: View) -> Key:
        return self.left(seq)
