"""Orders by the service a request has had: nothing needs to be predicted."""

from collections import defaultdict
from dataclasses import dataclass, field

from mdi_shared.policies.base import Key, Policy, View, number, waited_s
from mdi_shared.request import Sequence


@dataclass(eq=False)
class MLFQ(Policy):
    """Skip-join multi-level feedback queue: the highest level first, its members by arrival.

    Level i lasts `quantum` * `ratio`^i tokens. A request joins the first level whose quantum holds
    its prompt, falls a level with each quantum it has used up, prompt and output, and rises to the
    top after `promote_s` seconds. The lowest level gives way.
    Source: FastServe (NSDI 26), where quanta are times and running ones are preempted at will.
    """

    quantum: int = number(256, least=1)
    ratio: int = number(2, least=2)
    levels: int = number(8, least=1, most=64)
    promote_s: float = number(60.0, above=0)
    evict: int = number(0)

    def level(self, seq: Sequence, view: View) -> int:
        """Return its level, 0 the highest."""
        if waited_s(seq, view) > self.promote_s:
            return 0
        prompt, used = seq.request.prompt_len, seq.num_tokens
        has_joined, lasts = False, self.quantum
        for level in range(self.levels - 1):
            has_joined = has_joined or prompt <= lasts
            if has_joined:
                used -= lasts
                if used <= 0:
                    return level
            lasts *= self.ratio
        return self.levels - 1

    def order(self, seq: Sequence, view: View) -> Key:
        return (self.level(seq, view), seq.request.arrived_ns)

    def victim(self, seq: Sequence, view: View) -> Key:
        return (self.level(seq, view), seq.output_len, -seq.seq_id)

    def makes_way(self, seq: Sequence, waiter: Sequence, view: View) -> bool:
        return self.level(waiter, view) < self.level(seq, view)


@dataclass(eq=False)
class LAS(Policy):
    """Least attained service first, of the request's whole program, in levels.

    Service is tokens, prompt and output. Level 0 ends at `quantum`, each further one at `ratio`
    times as much; inside a level by arrival. A request without a program is its own.
    Source: PLAS of Autellix (arXiv 2502.13965); its critical paths (ATLAS) are not here.
    """

    quantum: int = number(2_048, least=1)
    ratio: int = number(2, least=2)
    evict: int = number(0)
    attained: dict[str | int, int] = field(default_factory=lambda: defaultdict(int), init=False)

    def level(self, seq: Sequence) -> int:
        """Return the level of its program, 0 the highest."""
        level, ends, attained = 0, self.quantum, self.attained.get(_program(seq), 0)
        while ends <= attained:
            level, ends = level + 1, ends * self.ratio
        return level

    def order(self, seq: Sequence, view: View) -> Key:
        return (self.level(seq), seq.request.arrived_ns)

    def makes_way(self, seq: Sequence, waiter: Sequence, view: View) -> bool:
        return self.level(waiter) < self.level(seq)

    def victim(self, seq: Sequence, view: View) -> Key:
        return (self.attained.get(_program(seq), 0), seq.output_len, -seq.seq_id)

    def served(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        self.attained[_program(seq)] += prompt_tokens + output_tokens
        if seq.is_finished and seq.request.hints.program is None:
            del self.attained[_program(seq)]


def _program(seq: Sequence) -> str | int:
    """Name the program; a request of none is its own, by a number, which no name is."""
    program = seq.request.hints.program
    return program if program is not None else seq.seq_id
