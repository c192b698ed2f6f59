"""The sequences of one rank and the memory they hold.

Between engine steps a live sequence is in exactly one of `waiting` (a queue whose head is served
first) and `running`. This file moves sequences and memory; who is chosen is decided in
`prefill.py` and `decode.py`.
"""

from collections import Counter, deque

from mdi_shared.blocks import BlockPool, Fit
from mdi_shared.config import SchedulerConfig
from mdi_shared.plan import Ending
from mdi_shared.request import Sequence, State


class Queues:
    """Waiting and running sequences, the block pool and the state slots of one rank."""

    __slots__ = (
        "blocks",
        "config",
        "leaked",
        "live",
        "num_dead_running",
        "num_dead_waiting",
        "order_is_stale",
        "running",
        "slots",
        "waiting",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockPool(config.num_blocks)
        self.slots = BlockPool(config.num_slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.live: dict[str, Sequence] = {}  # by request id, until finished
        # Finished members, counted when it happens so that no step searches in vain.
        self.num_dead_waiting = 0
        self.num_dead_running = 0
        self.leaked: list[tuple[str, int]] = []  # blocks that nobody can return, by request id
        self.order_is_stale = False  # somebody joined `running` since it was last sorted

    def fits(self, seq: Sequence) -> Fit:
        """Say whether the blocks and the slot of a sequence that holds nothing can be had."""
        fit = self.blocks.fits(self.blocks_needed(seq))
        if fit is Fit.OK and self.slots.num_free == 0:
            return Fit.LATER
        return fit

    def allocate(self, seq: Sequence) -> None:
        """Reserve blocks for all its tokens, then a slot (R8)."""
        held = len(seq.block_table) + seq.slot
        assert held == 0, f"{seq.request.req_id!r} holds memory already"
        self.add_blocks(seq, self.blocks_needed(seq))
        seq.slot = self.slots.allocate()[0]

    def blocks_needed(self, seq: Sequence) -> int:
        return -(-seq.tokens_needed // self.config.block_size)

    def add_blocks(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Append blocks from the pool to a sequence's table and return their ids."""
        new = self.blocks.allocate(count)
        seq.block_table += new
        seq.capacity += count * self.config.block_size
        return tuple(new)

    def release(self, seq: Sequence) -> None:
        """Return whatever the sequence holds, last block first; holding nothing is fine."""
        self.blocks.free(reversed(seq.block_table))
        seq.block_table = []
        seq.capacity = 0
        if seq.slot:
            self.slots.free((seq.slot,))
            seq.slot = 0

    def join_running(self, seq: Sequence) -> None:
        """Append a sequence whose prompt is done; its first token may have ended it already."""
        self.running.append(seq)
        self.order_is_stale = True
        self.num_dead_running += seq.is_finished

    def take_dead_running(self) -> list[Sequence]:
        """Remove finished members of `running`, in its order; they keep their memory for now."""
        if self.num_dead_running == 0:
            return []
        running = State.RUNNING  # compared directly: under load this loop runs in nearly every step
        dead = [seq for seq in self.running if seq.state is not running]
        self.running = [seq for seq in self.running if seq.state is running]
        self.num_dead_running = 0
        return dead

    def requeue(self, seq: Sequence) -> None:
        """Put a preempted sequence at the front of the queue.

        Upstream lets it overtake a half-prefilled head, which keeps the blocks of its whole prompt
        and can then starve the one in front of it for ever. By default the half-prefilled head
        stays first: it needs no further block, so it always gets on.
        """
        head_holds = bool(self.waiting) and bool(self.waiting[0].block_table)
        if head_holds and not self.config.strict_upstream:
            self.waiting.insert(1, seq)
        else:
            self.waiting.appendleft(seq)

    def preempt(self, seq: Sequence) -> Ending | None:
        """Take a running sequence's memory at once; its step in flight will be dropped (R19).

        Returns an ending when the configuration stops preempted requests instead of
        recomputing them.
        """
        self.release(seq)
        if self.config.stop_preempted_request:
            seq.become(State.PREEMPTED)
            self.live.pop(seq.request.req_id, None)
            return Ending(seq.seq_id, seq.finish_reason, seq.output_len)
        seq.reset_for_recompute()
        seq.become(State.WAITING)
        self.requeue(seq)
        return None

    def drop_dead_head(self) -> Ending:
        """Remove the head, which is finished."""
        self.num_dead_waiting -= 1
        return self._book_out(self.waiting.popleft())

    def _book_out(self, seq: Sequence) -> Ending:
        """Return the ending of a finished sequence that was taken from `waiting`.

        Upstream forgets the memory of one that was aborted between two chunks (R20).
        """
        if self.config.strict_upstream:
            self.leaked += [(seq.request.req_id, len(seq.block_table))] if seq.block_table else []
        else:
            self.release(seq)
        return Ending(seq.seq_id, seq.finish_reason, seq.output_len)

    def drop_all_dead(self) -> list[Ending]:
        """Remove finished members anywhere in `waiting`."""
        if self.num_dead_waiting == 0:
            return []
        dead = [seq for seq in self.waiting if seq.is_finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.is_finished)
        self.num_dead_waiting = 0
        return [self._book_out(seq) for seq in dead]

    def reject_head(self) -> Ending:
        """Refuse the head for good: too long for the model, the budget or the pool."""
        seq = self.waiting.popleft()
        seq.become(State.IGNORED)
        self.live.pop(seq.request.req_id, None)
        return self._book_out(seq)

    def check_integrity(self) -> None:
        """Assert what holds of members, memory and counts between engine steps."""
        members = (*self.waiting, *self.running)
        ids = [seq.seq_id for seq in members]
        assert len(ids) == len(set(ids)), "a sequence stands in two queues"
        for seq in members:
            self._check_member(seq)
        self._check_owners()
        for seq in self.running:
            assert seq.state is not State.WAITING, f"{seq.request.req_id} is in the wrong queue"
            if not seq.is_finished and seq.inflight_total == 0:
                assert seq.cached == seq.num_tokens - 1, f"{seq.request.req_id}: not all is cached"
        for seq in list(self.waiting)[1:]:
            behind = bool(seq.block_table) and not seq.is_finished
            assert not behind or self.config.strict_upstream, "only the head may hold blocks"
        assert self.num_dead_waiting == sum(seq.is_finished for seq in self.waiting)
        assert self.num_dead_running == sum(seq.is_finished for seq in self.running)

    def _check_member(self, seq: Sequence) -> None:
        name = seq.request.req_id
        assert 0 <= seq.cached <= seq.num_tokens, f"{name} has {seq.cached} tokens cached"
        assert bool(seq.block_table) == bool(seq.slot), f"{name} holds half its memory"
        assert seq.capacity == len(seq.block_table) * self.config.block_size, name
        assert 0 not in seq.block_table, f"{name} holds block 0"

    def _check_owners(self) -> None:
        """Assert that every block and slot in use has as many owners as references."""
        members = (*self.waiting, *self.running)
        blocks = Counter(block for seq in members for block in seq.block_table)
        slots = Counter(seq.slot for seq in members if seq.slot)
        for pool, held in ((self.blocks, blocks), (self.slots, slots)):
            for owned, count in held.items():
                assert pool.references(owned) == count, f"id {owned} has {count} owners"
