"""How far ahead decode steps are certain, so that a simulator may take them as one.

A decode step changes nothing but lengths, and lengths say who ends when. Until the pool runs short
or the group may prefill, the following steps are known, with all ends by length. Stopping short of
the true horizon is always safe: it only costs speed.

Read next: `advance.py` (books such steps), `mdi_sim/stretch.py` (takes them).
"""

from collections.abc import Iterator
from typing import NamedTuple

from mdi_shared import request
from mdi_shared.clock import FAR
from mdi_shared.plan import Batch, Member
from mdi_shared.queues import Queues


class Change(NamedTuple):
    """The batch from the step on that is planned `turn` turns later, without those just ended.

    `gone` had their last token processed in the turn before; they stand in the order of the batch.
    """

    turn: int
    batch: Batch
    seqs: list[request.Sequence]
    members: list[Member]
    gone: list[request.Sequence]


class Outlook:
    """The batches that follow a planned decode step, made when somebody looks that far."""

    __slots__ = ("_changes", "_coming")

    def __init__(
        self, queues: Queues, members: list[Member], seqs: list[request.Sequence], keep: int
    ) -> None:
        self._changes: list[Change] = []
        self._coming = _changes(queues, members, seqs, keep)

    def change(self, index: int) -> Change | None:
        """Return the change of this number; None when none is left that leaves anybody."""
        if index == len(self._changes):
            found = next(self._coming, None)
            if found is None:
                return None
            self._changes.append(found)
        return self._changes[index]

    def until(self, turn: int) -> list[Change]:
        """Return the changes up to a turn."""
        index = 0
        while (found := self.change(index)) is not None and found.turn <= turn:
            index += 1
        return self._changes[:index]


def _changes(
    queues: Queues, members: list[Member], seqs: list[request.Sequence], keep: int
) -> Iterator[Change]:
    clock = queues.clock
    # The turn of a step processes the one planned `keep` before it; the next turn leaves it out.
    first = clock.planned - keep - 1
    for time, gone in clock.coming_ends():
        members, seqs, places = members.copy(), seqs.copy(), sorted(map(seqs.index, gone))
        gone = [seqs[place] for place in places]
        for place in reversed(places):
            del members[place], seqs[place]
        if not members:
            return
        yield Change(time - first, Batch(tuple(members)), seqs, members, gone)


NO_CHANGES = Outlook.__new__(Outlook)
NO_CHANGES._changes, NO_CHANGES._coming = [], iter(())


class Horizon(NamedTuple):
    """How many decode steps, the planned one included, one rank can foretell.

    For `steps` its batch changes by nothing but the ends in `outlook`, unless there is a prefill.
    `to_vote` steps lead to the next vote on one, `to_any` to the next at which a single rank's wish
    is enough. `has_waiting` says that somebody waits here, `is_idle` that this rank has nothing at
    all to do.
    """

    steps: int
    to_vote: int
    to_any: int
    has_waiting: bool
    is_idle: bool
    outlook: Outlook = NO_CHANGES


def foretell(queues: Queues, num_members: int, *, keep: int) -> int:
    """Count the steps, the one just planned included, that change nobody but by length.

    The pool is sure to last where everybody could take a block for so long: each takes one at most
    in `block_size` steps. `keep` steps are in flight when a step is planned.
    """
    if not num_members:
        return FAR
    clock, size = queues.clock, queues.config.block_size
    rounds = queues.blocks.num_free // num_members
    blocks = rounds * size if rounds else max(clock.next_need(size) - clock.planned, 0)
    # The step that ends the last one is processed by the loop, with `keep` more in flight.
    return min(clock.last_end() - clock.planned + 1 + keep, blocks + 1)
