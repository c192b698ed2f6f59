"""Orders by the length of the prompt, which is known without any prediction."""

from dataclasses import dataclass

from mdi_shared.policies.base import SECOND, Key, Policy, View, number, waited_s, work_left
from mdi_shared.request import Sequence


@dataclass(eq=False)
class ShortestPrompt(Policy):
    """The prompt with the fewest tokens left to compute first: SJF on the input.

    Cached prefixes do not count, tokens to recompute do. Source: BLIS `sjf`, SGLang PR 30806.
    """

    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return work_left(seq)


@dataclass(eq=False)
class SJFAging(Policy):
    """Shortest prompt with aging, as a score: length / (1 + p / median) + wait * t / scale.

    The greatest score first. `length` and `wait` are the weights, `median` tokens and `scale_s`
    seconds the scales. Source: TensorRT-LLM PR 12428, with its defaults.
    """

    median: float = number(32_768, above=0)
    scale_s: float = number(5.0, above=0)
    length: float = number(0.5)
    wait: float = number(0.5)
    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        short = self.length / (1 + work_left(seq) / self.median)
        # All wait alike from now on: what counts is who came first.
        return self.wait * seq.request.arrived_ns / SECOND / self.scale_s - short


@dataclass(eq=False)
class SJFDecay(Policy):
    """Shortest prompt with aging, in tokens: each second of waiting takes `rate` tokens off.

    Source: SGLang PR 30806.
    """

    rate: float = number(1_000.0)
    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return work_left(seq) + self.rate * seq.request.arrived_ns / SECOND


@dataclass(eq=False)
class TwoLanes(Policy):
    """Prompts of at most `threshold` tokens first, but before all a long one older than `bound_s`.

    Each lane is first come, first served. Source: vLLM-Ascend PR 11352.
    """

    threshold: int = number(2_048)
    bound_s: float = number(10.0)

    def order(self, seq: Sequence, view: View) -> Key:
        if seq.request.prompt_len <= self.threshold:
            return 1
        return 0 if waited_s(seq, view) > self.bound_s else 2
