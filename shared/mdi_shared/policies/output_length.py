"""Orders by predicted outputs."""

from dataclasses import dataclass

from mdi_shared.policies.base import Key, View, number, work_left
from mdi_shared.policies.prediction import Predicting
from mdi_shared.request import Sequence


@dataclass(eq=False)
class SJF(Predicting):
    """The shortest predicted output first. Source: SSJF; learning to rank (NeurIPS 24)."""

    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return self.predicted(seq)


@dataclass(eq=False)
class SRPT(Predicting):
    """The shortest remaining work first; who has most of it left gives way.

    Work is the output still predicted, and the prompt to compute at `ratio` tokens for one of
    output. Without `evict` the engine preempts only when blocks run out.
    Source: TRAIL (arXiv 2410.01035), ELIS.
    """

    ratio: float = number(64.0, above=0)
    evict: int = number(0)
    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return self.left(seq) + work_left(seq) / self.ratio

    def victim(self, seq: Sequence, view: View) -> Key:
        return self.left(seq)


@dataclass(eq=False)
class LimitedSRPT(SRPT):
    """SRPT that spares whoever has put out more than `limit` of what was predicted.

    Preempting one that is nearly done holds its memory for longest in vain.
    Source: TRAIL, whose C is 0.8.
    """

    limit: float = number(0.8, most=1)

    def is_open(self, seq: Sequence) -> bool:
        return seq.output_len < self.limit * self.predicted(seq)

    def victim(self, seq: Sequence, view: View) -> Key:
        return (self.is_open(seq), self.left(seq))

    def makes_way(self, seq: Sequence, waiter: Sequence, view: View) -> bool:
        return self.is_open(seq) and super().makes_way(seq, waiter, view)
