"""The sequences of one rank and the memory they hold.

Between engine steps a live sequence is in exactly one of `waiting` (a queue whose head is served
first) and `running`. This file moves sequences and memory; who is chosen is decided in
`prefill.py` and `decode.py`.
"""

from bisect import insort
from collections import Counter, deque

from mdi_shared.blocks import BlockPool, Fit
from mdi_shared.clock import DecodeClock
from mdi_shared.config import WATERMARK, SchedulerConfig
from mdi_shared.plan import Ending
from mdi_shared.prefix.cache import PrefixCache
from mdi_shared.request import Sequence, State


def by_output(seq: Sequence) -> tuple[int, int]:
    """Order of `running`: the longest output first, of equals the older request first.

    The first of them is the victim when blocks run out.
    """
    return (seq.order, seq.seq_id)


class Queues:
    """Waiting and running sequences, the block pool and the state slots of one rank."""

    __slots__ = (
        "_stop_ids",
        "blocks",
        "clock",
        "config",
        "dead",
        "evicted",
        "is_even",
        "joined",
        "keeps_order",
        "leaked",
        "live",
        "num_dead_waiting",
        "num_departed",
        "prefix",
        "running",
        "slots",
        "waiting",
    )

    def __init__(self, config: SchedulerConfig, prefix: PrefixCache | None = None) -> None:
        self.config = config
        self.prefix = prefix
        self.blocks = BlockPool(config.num_blocks) if prefix is None else prefix.blocks
        self.slots = BlockPool(config.num_slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.live: dict[str, Sequence] = {}  # by request id, until finished
        self.clock = DecodeClock(1 + config.num_draft_tokens)
        self.is_even = config.num_draft_tokens == 0  # all grow alike: the clock tells who ends
        self.keeps_order = config.keeps_order
        self._stop_ids: frozenset[int] | None = None
        self.joined: list[Sequence] = []  # `running` since the last decode step was planned
        # Finished members, noted when it happens so that no step searches in vain.
        self.num_dead_waiting = 0
        self.dead: list[Sequence] = []  # of `running`
        self.evicted: list[Sequence] = []  # since the last decode step was planned
        self.num_departed = 0  # from the decode clock, ever
        self.leaked: list[tuple[str, int]] = []  # blocks that nobody can return, by request id

    def fits(self, seq: Sequence) -> Fit:
        """Say whether the blocks and the slot of a sequence that holds nothing can be had."""
        needed = self.blocks_needed(seq)
        pool = self.prefix
        fit = self.blocks.fits(needed) if pool is None else pool.fits(seq, needed)
        if fit is Fit.OK and self.slots.num_free == 0:
            return Fit.LATER
        return fit

    def allocate(self, seq: Sequence) -> None:
        """Reserve blocks for all its tokens, shared ones first, then a slot (R8)."""
        held = len(seq.block_table) + seq.slot
        assert held == 0, f"{seq.request.req_id!r} holds memory already"
        if self.prefix is not None:
            self.prefix.share(seq)
        self.add_blocks(seq, self.blocks_needed(seq) - len(seq.block_table))
        seq.slot = self.slots.allocate()[0]
        if self.prefix is not None:
            self.prefix.restore(seq)

    def blocks_needed(self, seq: Sequence) -> int:
        return -(-seq.tokens_needed // self.config.block_size)

    def add_blocks(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Append blocks from the pool to a sequence's table and return their ids."""
        new = self.blocks.allocate(count)
        seq.block_table += new
        if self.keeps_order and seq.clock is not None:
            seq.clock.holds(seq, self.capacity(seq))
        return tuple(new)

    def capacity(self, seq: Sequence) -> int:
        """Tokens that its blocks hold."""
        return len(seq.block_table) * self.config.block_size

    def release(self, seq: Sequence) -> None:
        """Return whatever the sequence holds, last block first; holding nothing is fine."""
        self.blocks.free(reversed(seq.block_table))
        seq.block_table = []
        if seq.slot:
            self.slots.free((seq.slot,))
            seq.slot = 0

    def join_running(self, seq: Sequence) -> None:
        """Let a sequence run whose prompt is done; its first token may have ended it already."""
        if seq.is_finished:
            seq.order = self.clock.done - seq.output_len
            self.dead.append(seq)
        else:
            seq.join(self.clock)
            self.joined.append(seq)
            self._stop_ids = None
            if self.is_even:
                self.clock.ends(seq)
            if self.keeps_order:
                self.clock.holds(seq, self.capacity(seq))
        if self.keeps_order:
            insort(self.running, seq, key=by_output)
        else:
            self.running.append(seq)

    @property
    def below_watermark(self) -> bool:
        """Whether the pool lets the head of the queue in, if it fits (R7).

        Unless `strict_upstream`, the watermark yields when the head holds its blocks already:
        upstream can wait there for ever (R22).
        """
        if self.blocks.usage <= WATERMARK:
            return True
        return not self.config.strict_upstream and bool(self.waiting[0].block_table)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that may stop somebody who runs."""
        if self._stop_ids is None:
            self._stop_ids = frozenset().union(*[seq.stop_ids for seq in self.running])
        return self._stop_ids

    def depart(self, seq: Sequence) -> None:
        """Take a sequence off the clock; its rows in flight will be dropped."""
        seq.leave()
        self.num_departed += 1

    def end_running(self, seq: Sequence) -> Ending:
        """Book the end of a running sequence; it keeps its seat and memory until R21."""
        self.depart(seq)
        self.dead.append(seq)
        self.live.pop(seq.request.req_id, None)
        if self.prefix is not None and seq.state is not State.ABORTED:
            self.prefix.finished(seq)
        return Ending(seq.seq_id, seq.finish_reason, seq.output_len)

    def take_dead_running(self) -> list[Sequence]:
        """Remove finished members of `running`, in its order; they keep their memory for now."""
        dead, self.dead = self.dead, []
        if len(dead) > 1:
            dead.sort(key=self.running.index)
        for seq in dead:
            self.running.remove(seq)
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
        if self.prefix is not None:
            self.prefix.preempted(seq)
        self.release(seq)
        self.depart(seq)
        if self.config.stop_preempted_request:
            seq.become(State.PREEMPTED)
            self.live.pop(seq.request.req_id, None)
            return Ending(seq.seq_id, seq.finish_reason, seq.output_len)
        self._forget(seq)
        self.requeue(seq)
        return None

    def evict(self, seq: Sequence) -> None:
        """Take a running sequence's memory for a more urgent one; the caller requeues it.

        It leaves the batch with the next decode step.
        """
        assert seq.clock is not None, f"{seq.request.req_id!r} does not run"
        # It leaves no further prefix: that could displace the one found for whoever comes in.
        self.release(seq)
        self.depart(seq)
        self._forget(seq)
        self.running.remove(seq)
        if seq in self.joined:
            self.joined.remove(seq)
        self.evicted.append(seq)

    def _forget(self, seq: Sequence) -> None:
        """Forget all attention state of a preempted sequence, but no token."""
        seq.prefilled = 0
        seq.num_preempted += 1
        seq.become(State.WAITING)

    def owned_blocks(self, seq: Sequence) -> int:
        """Count the blocks that are free once the sequence has left."""
        return sum([self.blocks.references(block) == 1 for block in seq.block_table])

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
            assert (seq.clock is None) is seq.is_finished, f"{seq.request.req_id} keeps no time"
        for seq in list(self.waiting)[1:]:
            behind = bool(seq.block_table) and not seq.is_finished
            assert not behind or self.config.strict_upstream, "only the head may hold blocks"
        if self.prefix is not None:
            self.prefix.check_integrity()
        assert self.num_dead_waiting == sum(seq.is_finished for seq in self.waiting)
        assert set(self.dead) == {seq for seq in self.running if seq.is_finished}

    def _check_member(self, seq: Sequence) -> None:
        name = seq.request.req_id
        assert 0 <= seq.cached <= seq.num_tokens, f"{name} has {seq.cached} tokens cached"
        assert bool(seq.block_table) == bool(seq.slot), f"{name} holds half its memory"
        assert 0 not in seq.block_table, f"{name} holds block 0"

    def _check_owners(self) -> None:
        """Assert that every block and slot in use has as many owners as references."""
        members = (*self.waiting, *self.running)
        blocks = Counter(block for seq in members for block in seq.block_table)
        slots = Counter(seq.slot for seq in members if seq.slot)
        for pool, held in ((self.blocks, blocks), (self.slots, slots)):
            for owned, count in held.items():
                assert pool.references(owned) == count, f"id {owned} has {count} owners"
