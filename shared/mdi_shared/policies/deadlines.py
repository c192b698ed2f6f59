"""Orders by the time a first token is due, and by what readers notice."""

from dataclasses import dataclass

from mdi_shared.policies.base import SECOND, Key, Policy, View, number, waited_s, work_left
from mdi_shared.request import Sequence


@dataclass(eq=False)
class EDF(Policy):
    """The earliest deadline first: arrival plus `Hints.deadline_ns`, else plus `ttft_s`.

    Source: the classic rule (Liu and Layland 1973), as serving simulators have it.
    """

    ttft_s: float = number(1.0, above=0)
    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        due = seq.request.hints.deadline_ns
        return seq.request.arrived_ns + (self.ttft_s * SECOND if due is None else due)


@dataclass(eq=False)
class LARS(Policy):
    """The least relative slack first: (deadline - now - work left) / time allowed.

    Time allowed is `Hints.deadline_ns`, else `base_s` and `stretch` times the prompt's own work,
    which takes `us_per_token` microseconds a token. So a long prompt neither holds up short ones
    nor waits for ever. Source: Medha (arXiv 2409.17264).
    """

    us_per_token: float = number(100.0, above=0)
    base_s: float = number(0.5, above=0)
    stretch: float = number(4.0, least=1)

    def order(self, seq: Sequence, view: View) -> Key:
        request, each_ns = seq.request, self.us_per_token * 1_000
        allowed = request.hints.deadline_ns or (
            self.base_s * SECOND + self.stretch * request.prompt_len * each_ns
        )
        slack = request.arrived_ns + allowed - view.now_ns - work_left(seq) * each_ns
        return slack / allowed


@dataclass(eq=False)
class QoE(Policy):
    """The greatest gain of experience per token of memory first; the least loss gives way.

    A reader expects the first token after `ttft_s` and reads `read_per_s` tokens a second. Their
    experience is what they have of what they would have read, at most 1. Gain is what `horizon_s`
    seconds of service, at `serve_per_s` tokens a second, make of it against as many of waiting.
    Who was preempted `cap` times gives way last. Source: Andes (arXiv 2404.16283), which compares
    areas under both curves; here their values at the horizon.
    """

    ttft_s: float = number(1.0)
    read_per_s: float = number(4.8, above=0)
    serve_per_s: float = number(20.0, above=0)
    horizon_s: float = number(5.0, above=0)
    cap: int = number(1)
    evict: int = number(0)

    def gain(self, seq: Sequence, view: View) -> float:
        """Return the gain per token that it holds or would hold."""
        reading_s = waited_s(seq, view) + self.horizon_s - self.ttft_s
        expected = min(reading_s * self.read_per_s, seq.request.max_tokens)
        if expected <= 0:
            return 0.0
        waits = min(seq.output_len / expected, 1.0)
        served = min((seq.output_len + self.serve_per_s * self.horizon_s) / expected, 1.0)
        return (served - waits) / seq.num_tokens

    def order(self, seq: Sequence, view: View) -> Key:
        return -self.gain(seq, view)

    def victim(self, seq: Sequence, view: View) -> Key:
        return (seq.num_preempted < self.cap, -self.gain(seq, view), seq.output_len, -seq.seq_id)
