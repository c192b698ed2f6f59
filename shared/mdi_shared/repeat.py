"""How far ahead a decode batch is certain, so that a simulator may take those steps as one.

A decode step of an unchanged batch changes nothing but lengths. Until a sequence finishes, the
pool runs short or the group may prefill, the following steps are known. Stopping short of the true
horizon is always safe: it only costs speed. Ranks of a group step together, so the shortest
horizon is everybody's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mdi_shared.clock import FAR
from mdi_shared.queues import Queues


class Horizon(NamedTuple):
    """How many decode steps, the planned one included, one rank can foretell.

    Its batch stays as it is for `steps`, unless there is a prefill. `to_vote` steps lead to the
    next vote on one, `to_any` to the next at which a single rank's wish is enough. `has_waiting`
    says that somebody waits here, `is_idle` that this rank has nothing at all to do.
    """

    steps: int
    to_vote: int
    to_any: int
    has_waiting: bool
    is_idle: bool


def common_repeats(horizons: Sequence[Horizon]) -> tuple[int, int]:
    """Return how many steps a group may take in one go: whatever arrives, and if nothing does.

    Where all must want a prefill, one rank with nobody waiting keeps the group decoding.
    """
    if len(horizons) == 1:
        steps, to_vote, _, has_waiting, is_idle = horizons[0]
        certain = 1 if is_idle else min(steps, to_vote)
        return certain, certain if has_waiting or is_idle else steps
    steps = min([horizon.steps for horizon in horizons])
    if steps == 1 or all([horizon.is_idle for horizon in horizons]):
        return 1, 1
    certain = min(steps, horizons[0].to_vote)
    waiting = [horizon.has_waiting for horizon in horizons]
    if all(waiting):
        return certain, certain
    return certain, min(steps, horizons[0].to_any) if any(waiting) else steps


def foretell(queues: Queues, num_members: int, *, keep: int) -> int:
    """Count the steps, the one just planned included, that change nobody but by a token.

    The pool is sure to last where everybody could take a block for so long: each takes one at most
    in `block_size` steps. `keep` steps are in flight when a step is planned.
    """
    if not num_members:
        return FAR
    clock, size = queues.clock, queues.config.block_size
    rounds = queues.blocks.num_free // num_members
    blocks = rounds * size if rounds else clock.steps_to_block(size)
    # The step that ends a sequence is processed by the loop, with `keep` more in flight.
    return min(clock.steps_to_end() - (clock.planned - clock.done - 1 - keep), blocks + 1)


def take_blocks(queues: Queues, count: int, free_blocks: int) -> tuple[tuple[int, int], ...]:
    """Give out the blocks of `count` further decode steps in the order single steps would.

    Returns (step, blocks left) for each step after which others are left than before; at first they
    were `free_blocks`.
    """
    clock, size, blocks = queues.clock, queues.config.block_size, queues.blocks
    left = [] if blocks.num_free == free_blocks else [(1, blocks.num_free)]
    step = max(clock.steps_to_block(size), 0) + 1
    while step <= count:
        for seq in clock.take_needy(clock.planned + step - 1, size):
            queues.add_blocks(seq, 1)
        left.append((step, blocks.num_free))
        step = max(clock.steps_to_block(size), 0) + 1
    return tuple(left)
