"""Who gives way to a more urgent request that waits, where a scheduling policy allows it.

By default nobody: a running request is preempted only when blocks run out. A policy with `evict`
above 0 may take the memory of running ones for the head of the queue, at a prefill attempt. The
core keeps progress: nobody is evicted unless the head gets a chunk in this very step, nobody more
often than `evict` times, and each has been given a token since it was last admitted, for only who
has one is running.

Read next: `decisions.py` (the policy's part), `prefill.py` (who asks).
"""

from mdi_shared.config import WATERMARK
from mdi_shared.decisions import Decisions
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence


def find_victims(
    queues: Queues, decisions: Decisions, head: Sequence, num_picked: int, *, below: bool
) -> list[Sequence] | None:
    """Return who must give way for `head` to get blocks, a slot and a seat; None: it must wait.

    Changes nothing. `num_picked` have a seat in the step being assembled. Unless the pool was
    `below` its watermark when the attempt began, it must be once they have left (R7).
    """
    leaving: list[Sequence] = []
    need, free, config = queues.blocks_needed(head), queues.blocks.num_free, queues.config

    def has_room() -> bool:
        seats = config.max_num_seqs - len(queues.running) - num_picked + len(leaving)
        slots = queues.slots.num_free + len(leaving)
        is_low = below or queues.blocks.usage_at(free) <= WATERMARK
        return seats > 0 and slots > 0 and free >= need and is_low

    if has_room():
        return leaving
    for victim in decisions.giving_way(head):
        leaving.append(victim)
        free += queues.owned_blocks(victim)
        if has_room():
            return leaving
    return None
