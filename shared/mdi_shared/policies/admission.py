"""Who may take memory: rules that look ahead at what running requests will come to hold.

Only `admit` (and for MC-SF the order); they combine with any order and victim.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from mdi_shared.policies.base import Key, Policy, View, number
from mdi_shared.policies.prediction import Predicting
from mdi_shared.request import Sequence


def peak_tokens(rows: Iterable[tuple[int, int]]) -> int:
    """Return the most tokens that requests of (held, left to put out) will hold at one time.

    Each grows by a token a step and then leaves. The peak is at an end: with `left` falling,
    max over i of (held_1 + ... + held_i + i * left_i). Source: the past-future scheduler of
    LightLLM (ASPLOS 25); the condition of MC-SF (arXiv 2502.07115) at each completion is the same.
    """
    peak = held_so_far = 0
    for count, (held, left) in enumerate(sorted(rows, key=itemgetter(1), reverse=True), start=1):
        held_so_far += held
        peak = max(peak, held_so_far + count * left)
    return peak


def _with(seq: Sequence, view: View) -> Iterator[Sequence]:
    yield from view.running
    yield seq


def _fits_at_peak(rows: Iterable[tuple[int, int]], view: View) -> bool:
    """Say whether the peak fits the pool; a block that is not full counts whole."""
    spare = view.block_size - 1
    return peak_tokens((held + spare, left) for held, left in rows) <= (
        view.num_blocks * view.block_size
    )


@dataclass(eq=False)
class RunToCompletion(Policy):
    """Admit nobody once the batch decodes: all of it ends before the next one begins.

    With `prefill_attempt_interval` 1 a batch is what the pool and the seats hold at once.
    Source: static batching, as in FasterTransformer; the baseline of Orca (OSDI 22).
    """

    def admit(self, seq: Sequence, view: View) -> bool:
        return all(other.output_len <= 1 for other in view.running)


@dataclass(eq=False)
class Watermark(Policy):
    """Admit while at most `share` of the pool is in use with the new one.

    Source: vLLM's first engine, which kept 1 % free (0.99). Every run has the engine's own
    watermark besides: no prefill above 90 % in use (docs/rules.md, R7).
    """

    share: float = number(0.9, above=0, most=1)

    def admit(self, seq: Sequence, view: View) -> bool:
        used = view.num_blocks - view.free_blocks + view.blocks_of(seq.tokens_needed)
        return used <= self.share * view.num_blocks


@dataclass(eq=False)
class Conservative(Policy):
    """Admit only if all fit even when each puts out its `max_tokens`.

    Hardly anybody is preempted then, and queues are long.
    Source: the baseline of LightLLM (ASPLOS 25), as described there.
    """

    def admit(self, seq: Sequence, view: View) -> bool:
        most = (s.request.prompt_len + s.request.max_tokens for s in _with(seq, view))
        return sum(map(view.blocks_of, most)) <= view.num_blocks


@dataclass(eq=False)
class PastFuture(Policy):
    """Admit if the predicted peak of memory fits, outputs predicted from those that have ended.

    The prediction is a running mean, each ended output with weight `alpha`, at least 1.1 times
    what is out already, and at most `max_tokens`, which holds until the first has ended. `reserve`
    is the share of the pool left free. Source: LightLLM (ASPLOS 25).
    """

    alpha: float = number(0.05, above=0, most=1)
    reserve: float = number(0.0, most=0.9)
    mean: float | None = field(default=None, init=False)

    def left(self, seq: Sequence) -> int:
        """Return the tokens it is expected to put out yet, at least one."""
        most = seq.request.max_tokens
        if self.mean is not None:
            most = min(most, int(max(self.mean, 1.1 * seq.output_len)))
        return max(most - seq.output_len, 1)

    def admit(self, seq: Sequence, view: View) -> bool:
        room = (1 - self.reserve) * view.num_blocks * view.block_size
        spare = view.block_size - 1
        return peak_tokens((s.num_tokens + spare, self.left(s)) for s in _with(seq, view)) <= room

    def served(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        if seq.is_finished and seq.output_len:
            mean = seq.output_len if self.mean is None else self.mean
            self.mean = mean + self.alpha * (seq.output_len - mean)


@dataclass(eq=False)
class Future(Predicting):
    """Admit if the peak of memory fits, by the predicted outputs (see `Predicting`)."""

    def admit(self, seq: Sequence, view: View) -> bool:
        return _fits_at_peak(((s.num_tokens, self.left(s)) for s in _with(seq, view)), view)


@dataclass(eq=False)
class MCSF(Future):
    """Memory-constrained shortest first: by rising predicted output, as long as the peak fits.

    Source: arXiv 2502.07115. There time goes by in decode steps and a prompt takes one.
    """

    keeps_keys = True

    def order(self, seq: Sequence, view: View) -> Key:
        return self.predicted(seq)


@dataclass(eq=False)
class Wait(Policy):
    """Admit requests of a type only in batches of `threshold`.

    Types are prompts of 1 to `width` tokens, of `width` + 1 to 2 `width`, and so on. The one fluid
    model of the source sets a threshold for each type; here one serves all.
    Source: WAIT (arXiv 2504.11320), without its nested form.
    """

    threshold: int = number(4, least=1)
    width: int = number(1_024, least=1)
    _open: Counter[int] = field(default_factory=Counter, init=False)  # that may still come, by type
    _seen: set[int] = field(default_factory=set, init=False)

    def kind(self, seq: Sequence) -> int:
        return (seq.request.prompt_len - 1) // self.width

    def admit(self, seq: Sequence, view: View) -> bool:
        kind = self.kind(seq)
        if self._open[kind] > 0 or seq.seq_id in self._seen:
            return True
        alike = (None for other in view.waiting
                 if self.kind(other) == kind and other.seq_id not in self._seen)  # fmt: skip
        return sum(1 for _ in islice(alike, self.threshold)) == self.threshold

    def served(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        if prompt_tokens and seq.seq_id not in self._seen:
            self._seen.add(seq.seq_id)
            kind = self.kind(seq)
            self._open[kind] = (self._open[kind] if self._open[kind] > 0 else self.threshold) - 1
        if seq.is_finished:
            self._seen.discard(seq.seq_id)
