"""How far ahead a decode batch is certain, and what those steps take from the pool.

A decode step of an unchanged batch changes nothing but lengths. Until a sequence finishes, the
pool runs short or the group votes, the following steps are known, so a simulator may take them as
one. Stopping short of the true horizon is always safe: it only costs speed.
"""

from mdi_shared.queues import Queues
from mdi_shared.request import Sequence

FAR = 1 << 30


def steps_until_finish(batch: list[Sequence]) -> int:
    """Count the steps up to the one that, processed, ends the first sequence by its length."""
    return min([seq.finish_at - seq.num_tokens for seq in batch], default=FAR)


class Growth:
    """Blocks a batch will need over the next steps, each adding one token to every sequence.

    Made after the first of those steps was planned, so tables fit that step exactly.
    """

    __slots__ = ("batch", "block_size", "queues", "room")

    def __init__(self, batch: list[Sequence], queues: Queues) -> None:
        self.batch = batch
        self.queues = queues
        self.block_size = queues.config.block_size
        # Steps that still fit into the table; inflight counts the planned step already, and
        # a table holds what was in flight when a step is planned (R2), one less than now.
        self.room = [seq.capacity + 1 - seq.num_tokens - seq.inflight_total for seq in batch]

    def steps(self) -> int:
        """Count steps, the planned one included, in which nobody can be starved of a block."""
        if not self.batch:
            return FAR
        # Every sequence takes a block at most once in `block_size` steps.
        rounds = self.queues.blocks.num_free // len(self.batch)
        return max(rounds * self.block_size, min(self.room)) + 1

    def take(self, count: int) -> tuple[int, ...]:
        """Allocate for `count` further steps in the order single steps would.

        Returns the number of free blocks after each of them.
        """
        due: list[tuple[int, int, int, int]] = []
        for index, (seq, room) in enumerate(zip(self.batch, self.room, strict=True)):
            # Shortest output first is how a decode step serves (R17).
            due += [
                (step, seq.output_len, -seq.seq_id, index)
                for step in range(room + 1, count + 1, self.block_size)
            ]
        due.sort()
        taken = [0] * (count + 1)
        for step, _, _, index in due:
            self.queues.add_blocks(self.batch[index], 1)
            taken[step] += 1
        free, left = [], self.queues.blocks.num_free + len(due)
        for step in range(1, count + 1):
            left -= taken[step]
            free.append(left)
        return tuple(free)
