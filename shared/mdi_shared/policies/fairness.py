"""Fair shares between clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mdi_shared.errors import ConfigError
from mdi_shared.policies.base import Key, View, number
from mdi_shared.policies.prediction import Predicting
from mdi_shared.request import Sequence


@dataclass(eq=False)
class VTC(Predicting):
    """Virtual token counter: the client that was given least first, its requests by arrival.

    A prompt token counts `prompt`, an output token `output`, divided by the client's weight
    (`weights=alice:2/bob:1`; 1 unless named). A client that comes back to the queue is lifted to
    the least counter there, so that idling earns nothing. With `predict` 1 the predicted output
    is charged when the prompt is first planned, and corrected as tokens come.
    Source: VTC (OSDI 24): two backlogged clients differ by at most a bound.
    """

    prompt: float = number(1.0)
    output: float = number(2.0)
    weights: str = ""
    predict: int = number(0, most=1)
    counters: dict[str, float] = field(default_factory=dict, init=False)
    _shares: Mapping[str, float] = field(default_factory=dict, init=False)
    _charged: dict[int, int] = field(default_factory=dict, init=False)  # output paid ahead
    _queued: frozenset[str] = field(default=frozenset(), init=False)
    _floor: float = field(default=0.0, init=False)  # the least counter when the queue last had one

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shares = _parse_weights(self.weights)

    def look(self, view: View) -> None:
        queued = frozenset([seq.request.hints.client or "" for seq in view.waiting])
        stayed = [self.counters.get(client, 0.0) for client in queued & self._queued]
        self._floor = max(self._floor, min(stayed)) if stayed else self._floor
        for client in sorted(queued - self._queued):
            self.counters[client] = max(self.counters.get(client, 0.0), self._floor)
        self._queued = queued

    def order(self, seq: Sequence, view: View) -> Key:
        return (self.counters.get(_client(seq), 0.0), seq.request.arrived_ns)

    def served(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        if self.predict and prompt_tokens and seq.seq_id not in self._charged:
            self._charged[seq.seq_id] = self.left(seq)
            self._charge(seq, 0, self._charged[seq.seq_id])
        paid = min(self._charged.get(seq.seq_id, 0), output_tokens)
        self._charge(seq, prompt_tokens, output_tokens - paid)
        if paid:
            self._charged[seq.seq_id] -= paid
        if seq.is_finished:
            self._charge(seq, 0, -self._charged.pop(seq.seq_id, 0))

    def _charge(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        client = _client(seq)
        tokens = self.prompt * prompt_tokens + self.output * output_tokens
        share = self._shares.get(client, 1.0)
        self.counters[client] = self.counters.get(client, 0.0) + tokens / share


def _client(seq: Sequence) -> str:
    return seq.request.hints.client or ""


def _parse_weights(text: str) -> dict[str, float]:
    """Read `alice:2/bob:1`; raises `ConfigError`."""
    weights: dict[str, float] = {}
    for part in text.split("/") if text else ():
        client, _, share = part.rpartition(":")
        try:
            weights[client] = float(share)
        except ValueError:
            weights[client] = 0.0
        if not client or not 0 < weights[client] < float("inf"):
            raise ConfigError("policy parameter weights", text, "must be CLIENT:SHARE, several "
                              "joined by /, each share a number above 0")  # fmt: skip
    return weights
