"""A scheduling policy: which request next, may it take memory, who gives way.

The core asks at decisions only and keeps memory, life cycle and progress to itself; the rules and a
table of all policies are in docs/policies.md. One must be deterministic, with no clock but
`View.now_ns` and no randomness but hashes of request ids, so that the simulator, the engine and a
replay of a recorded run decide alike.

Read next: `mdi_shared/decisions.py` (who asks), `registry.py` (policies by name).
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from math import inf

from mdi_shared.by_name import check_parameters
from mdi_shared.by_name import number as number
from mdi_shared.request import Sequence

SECOND = 1_000_000_000  # ns
Key = int | float | str | tuple[int | float | str, ...]


@dataclass(slots=True, eq=False)
class View:
    """What a policy sees besides the sequence it is asked about; not to be changed.

    `now_ns` is the time of the last poll. `waiting` stand in the queue's order, `running` hold
    memory: those that decode and those picked for the step being assembled. Blocks are of
    `block_size` tokens.
    """

    block_size: int
    num_blocks: int  # that can be handed out
    now_ns: int = 0
    free_blocks: int = 0
    waiting: Rows[Sequence] = ()
    running: Rows[Sequence] = ()

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-tokens // self.block_size)


class Policy:
    """First come, first served; the longest output gives way. Override what differs.

    Keys of one hook are all numbers, all strings, or all tuples of these that compare; no NaN.
    `max_wait_s` puts whoever has been in the system for longer before all others, by arrival, and
    asks `admit` no more about them. `evict` is how often a running request may give way to a more
    urgent one that waits (see `makes_way`); at 0, the default, requests are preempted only when
    blocks run out. `keeps_keys` promises that a request's key of `order` lasts while it waits, so
    that it is asked once, and again after a preemption; by default it is asked at every attempt.
    """

    max_wait_s: float = inf
    keeps_keys: bool = False
    evict: int = 0
    mixes: bool = False  # steps may hold prompt chunks beside those who decode,
    budget: int = 0  # of so many tokens in all; 0 = of the run's token budget

    @property
    def has_phase(self) -> bool:
        """Whether `phase` is asked at every turn, instead of the engine's votes now and then."""
        return type(self).phase is not Policy.phase

    def phase(self, view: View) -> bool:
        """Say whether prompts go in this turn: before those who decode, or beside if it `mixes`.

        Where a policy does not answer, votes decide. Asked at each turn in which somebody waits and
        somebody decodes, below the watermark (docs/rules.md, R7). A group's answer is yes where
        one rank's is.
        """
        return True

    def look(self, view: View) -> None:
        """Prepare for the questions of one prefill attempt; asked before any of them."""

    def order(self, seq: Sequence, view: View) -> Key:
        """Return the key by which `waiting` is sorted, least first; equals keep their order.

        That is: preempted ones first, then by arrival. Who holds blocks stays first anyway.
        """
        return 0

    def admit(self, seq: Sequence, view: View) -> bool:
        """Say whether the first of `waiting`, whose blocks are free, may take them now.

        Not asked when nothing runs. No ends the step's search. It must change nothing: one
        that may come can still lack a seat.
        """
        return True

    def victim(self, seq: Sequence, view: View) -> Key:
        """Return the key of a running sequence when blocks run out; the greatest gives way first.

        Of equals, the older request.
        """
        return (seq.output_len, -seq.seq_id)

    def makes_way(self, seq: Sequence, waiter: Sequence, view: View) -> bool:
        """Say whether a running sequence shall be preempted for `waiter`, the first of `waiting`.

        Asked at a prefill attempt, if `evict` is above 0 and `waiter` lacks blocks or a seat, of
        one running sequence after the other in the order of `victim`, until there is room; if
        there cannot be, all stay. Left as it is, who would come behind `waiter` in the queue.
        """
        return self.order(waiter, view) < self.order(seq, view)  # type: ignore[operator]

    def served(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """Note tokens a sequence was given since the last call for it.

        Prompt tokens when a chunk is planned, output tokens before the next prefill attempt, which
        is also when `seq.is_finished` is first seen.
        """

    def answering(self, hook: str) -> "Policy":
        """Return who answers the question of that name."""
        return self

    def answers(self, hook: str) -> bool:
        """Say whether it has an answer of its own to the question of that name."""
        own = getattr(self.answering(hook), hook)
        return getattr(own, "__func__", None) is not getattr(Policy, hook)

    def __post_init__(self) -> None:
        check_parameters("policy", self)


def shown(policy: Policy) -> str:
    """Return what an error calls a policy."""
    own = type(policy).__str__ is not object.__str__
    return str(policy) if own else type(policy).__name__


def waited_s(seq: Sequence, view: View) -> float:
    """Return how long ago the request arrived, s."""
    return max(view.now_ns - seq.request.arrived_ns, 0) / SECOND


def work_left(seq: Sequence) -> int:
    """Return the tokens of its prompt that are yet to be computed, recomputed ones included."""
    return seq.num_tokens - seq.cached
