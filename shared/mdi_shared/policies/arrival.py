"""Orders that know arrivals and classes only."""

from dataclasses import dataclass
from math import inf

from mdi_shared.policies.base import SECOND, Key, Policy, View, number
from mdi_shared.policies.prediction import hashed
from mdi_shared.request import Sequence


@dataclass(eq=False)
class FCFS(Policy):
    """First come, first served: what the engine does without a policy."""


@dataclass(eq=False)
class LCFS(Policy):
    """Last come, first served; to see how much the order matters at all."""

    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return -seq.request.arrived_ns


@dataclass(eq=False)
class Random(Policy):
    """By a hash of the request's id and `seed`: an order that knows nothing, as a baseline."""

    seed: int = number(0)
    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return hashed(f"{self.seed} {seq.request.req_id}")


@dataclass(eq=False)
class Priority(Policy):
    """The most urgent class first; the least urgent gives way, of equals the newest.

    Waiting for `aging_s` seconds raises a request by one class. Source: the priority scheduling
    of vLLM, which does not age (there 0 is most urgent; here a larger number is).
    """

    aging_s: float = number(inf, above=0)
    evict: int = number(0)
    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        # All wait alike from now on: what counts is who came first.
        return seq.request.arrived_ns / SECOND / self.aging_s - seq.request.hints.priority

    def victim(self, seq: Sequence, view: View) -> Key:
        return (-seq.request.hints.priority, seq.request.arrived_ns, seq.seq_id)
