"""What the simulated device produces: token counts from the trace, no text.

Every token is a plain id except the end-of-sequence token of a request whose trace says that it
ended before its `max_tokens`. Draft acceptance is drawn per (seed, request, output position), so it
does not depend on what else is in the batch.
"""

from dataclasses import dataclass, field

from mdi_shared.config import SchedulerConfig
from mdi_shared.plan import StepItem, StepPlan, StepResult

_MASK = (1 << 64) - 1


def _uniform(*keys: int) -> float:
    """Hash integers to a number in [0, 1): the SplitMix64 finaliser, applied key by key."""
    z = 0
    for key in keys:
        z = (z ^ key) + 0x9E3779B97F4A7C15 & _MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


@dataclass(slots=True, eq=False, kw_only=True)
class Outcomes:
    """Results of one rank's steps.

    `stops` maps a sequence to the output length at which its model says end of sequence; sequences
    that run to `max_tokens` are absent. `output_lens` holds what each sequence had put out when
    the newest step was processed; the driver keeps it up to date while `needs_lengths`.
    """

    config: SchedulerConfig
    seed: int
    accept_rate: float
    stops: dict[int, int] = field(default_factory=dict)
    output_lens: dict[int, int] = field(default_factory=dict)

    @property
    def needs_lengths(self) -> bool:
        return bool(self.stops) or self.config.num_draft_tokens > 0

    @property
    def _plain(self) -> int:
        """Any token that is not the end of a sequence."""
        return 0 if self.config.eos_token_id != 0 else 1

    def result(self, plan: StepPlan) -> StepResult:
        """Make the result of `plan`, or of any of its repetitions."""
        if not self.needs_lengths:
            tokens: tuple[tuple[int, ...], ...] = ((self._plain,),) * len(plan.seq_ids)
            return StepResult((*tokens[:-1], ()) if plan.is_partial else tokens)
        return StepResult(tuple([self._tokens(plan, item) for item in plan.items]))

    def steps_before_stop(self, plan: StepPlan) -> int:
        """Count the repetitions of `plan` up to the one that processes somebody's last token."""
        stops, done = self.stops, self.output_lens
        if not stops:
            return 1 << 30
        return min([stops[i] - done.get(i, 0) for i in plan.seq_ids if i in stops], default=1 << 30)

    def _tokens(self, plan: StepPlan, item: StepItem) -> tuple[int, ...]:
        if not item.is_last_chunk:
            return ()
        done = self.output_lens.get(item.seq_id, 0)
        count = 1 if plan.is_prefill else 1 + self._accepted(item, done)
        tokens = [self._plain] * count
        stop = self.stops.get(item.seq_id)
        if stop is not None and done < stop <= done + count:
            tokens[stop - done - 1] = self.config.eos_token_id
        return tuple(tokens)

    def _accepted(self, item: StepItem, done: int) -> int:
        """Count accepted drafts: each survives with the same chance if all before it did."""
        for draft in range(item.q - 1):
            if _uniform(self.seed, item.seq_id, done, draft) >= self.accept_rate:
                return draft
        return item.q - 1
