"""What the simulated device produces: token counts from the trace, no text.

Every token is a plain id except the end-of-sequence token of a request whose trace says that it
ended before its `max_tokens`. Draft acceptance is drawn per (seed, request, output position), so it
does not depend on what else is in the batch; a record has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from mdi_shared.clock import FAR
from mdi_shared.config import SchedulerConfig
from mdi_shared.plan import StepItem, StepOutcome, StepPlan, StepResult
from mdi_shared.request import Request

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

    `stops` maps a sequence to its prompt's length and to the output length at which its model says
    end of sequence; sequences that run to `max_tokens` are absent. `lengths` holds what each had
    put out when the newest step was processed; the driver keeps it up to date while
    `needs_lengths`, and tells of every step that it plans. `accepted`, when given, says how many
    drafts a step accepts for a sequence; else each has the chance `accept_rate`.
    """

    config: SchedulerConfig
    seed: int
    accept_rate: float
    stops: dict[int, tuple[int, int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    accepted: Callable[[int, int], int] | None = None
    _undrafted: set[int] = field(default_factory=set)  # whose prompt was the last they computed
    # Of those who run: the decode step that brings their last token, by its `shift`.
    _shift_of: dict[int, int] = field(default_factory=dict)
    _at_shift: dict[int, set[int]] = field(default_factory=dict)
    _shifts: list[int] = field(default_factory=list)  # a heap

    def stops_at(self, seq_id: int, request: Request, output_len: int) -> None:
        """Note that a sequence's model ends it with its output token number `output_len`."""
        self.stops[seq_id] = (request.prompt_len, output_len)

    @property
    def needs_lengths(self) -> bool:
        """With drafts nobody can say beforehand which step brings which token."""
        return self.config.num_draft_tokens > 0

    def note_lengths(self, outcome: StepOutcome) -> None:
        """Count the tokens of a processed step."""
        for seq_id, new in zip(outcome.seq_ids, outcome.tokens, strict=True):
            self.lengths[seq_id] = self.lengths.get(seq_id, 0) + len(new)

    def planned(self, plan: StepPlan) -> None:
        """Note who joins with a decode step that is about to be launched, and who has left."""
        if not self.stops or self.needs_lengths:
            return
        for seq_id in plan.left:
            shift = self._shift_of.pop(seq_id, None)
            if shift is not None:
                self._at_shift[shift].discard(seq_id)
        for member in plan.joined:
            if member.seq_id in self.stops:
                # Context length k makes the token that is number k of all (docs/rules.md, R29).
                shift = sum(self.stops[member.seq_id]) - 1 + member.neg_base
                self._shift_of[member.seq_id] = shift
                self._at_shift.setdefault(shift, set()).add(member.seq_id)
                heappush(self._shifts, shift)

    def steps_before_stop(self, plan: StepPlan) -> int:
        """Count the steps, `plan` included, up to the one whose turn processes a last token."""
        while self._shifts and not self._at_shift.get(self._shifts[0]):
            self._at_shift.pop(heappop(self._shifts), None)
        if not self._shifts:
            return FAR
        return self._shifts[0] - plan.shift + 1 + self.config.enable_zos

    def result(self, plan: StepPlan, shift: int) -> StepResult:
        """Make the result of `plan`, or of that of its repetitions that has this `shift`."""
        if plan.is_prefill or self.needs_lengths:
            return StepResult(tuple([self._tokens(plan, item) for item in plan.items]))
        last = self._at_shift.get(shift)
        if not last:
            return StepResult()
        eos, plain = self.config.eos_token_id, self._plain
        return StepResult(tuple([(eos if i in last else plain,) for i in plan.seq_ids]))

    @property
    def _plain(self) -> int:
        """Any token that is not the end of a sequence."""
        return 0 if self.config.eos_token_id != 0 else 1

    def _tokens(self, plan: StepPlan, item: StepItem) -> tuple[int, ...]:
        if not item.is_last_chunk:
            return ()
        prompt_len, stop = self.stops.get(item.seq_id, (0, 0))
        done = self.lengths.get(item.seq_id, 0) if self.needs_lengths else item.k - prompt_len
        count = 1 if plan.is_prefill else 1 + self._accepted(plan.step, item, done)
        if plan.is_prefill and self.needs_lengths:
            self._undrafted.add(item.seq_id)
        tokens = [self._plain] * count
        if done < stop <= done + count:
            tokens[stop - done - 1] = self.config.eos_token_id
        return tuple(tokens)

    def _accepted(self, step: int, item: StepItem, done: int) -> int:
        """Count accepted drafts: each survives with the same chance if all before it did.

        None is in the first step behind a prompt, which verifies placeholders.
        """
        if self.accepted is not None:
            return self.accepted(step, item.seq_id)
        if item.seq_id in self._undrafted:
            self._undrafted.discard(item.seq_id)
            return 0
        for draft in range(item.q - 1):
            if _uniform(self.seed, item.seq_id, done, draft) >= self.accept_rate:
                return draft
        return item.q - 1
