"""A device that remembers what stands where, for tests of prefix reuse.

It runs plans in their order and checks before each row that blocks and slot hold the row's own
past. A position is stored as the tokens up to it, so nothing stale, missing or foreign passes.
"""

from collections import deque

from mdi_exec.engine.request_state import ints32
from mdi_shared.plan import StepPlan
from mdi_shared.prefix.contents import TokenContents
from mdi_shared.scheduler import Scheduler


class PrefixDevice:
    """Wraps a scheduler's methods; requests with `contents_of` their tokens are followed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.size = scheduler.config.block_size
        self.tokens = {}  # sequence id -> token ids, which the device knows first
        self.seen = {}  # the same, as far as they have been told to the driver
        self.blocks, self.slots, self.tails, self.tables = {}, {}, {}, {}
        self.plans: deque[StepPlan] = deque()
        self.hits, self.num_copies = {}, 0
        self.commit = scheduler.commit
        put_in_flight = scheduler._put_in_flight
        scheduler._put_in_flight = lambda *args: self.note(put_in_flight(*args))
        scheduler.commit = self.run_and_commit

    def contents_of(self, seq_id, prompt):
        self.tokens[seq_id] = list(prompt)
        self.seen[seq_id] = ints32(prompt)
        return TokenContents(self.seen[seq_id], self.size)

    def note(self, plan):
        self.plans.append(plan)
        for hit in plan.hits:
            assert hit.tokens <= hit.known
            assert hit.known < len(self.seen[hit.seq_id]) + 1
            self.hits[hit.seq_id] = self.hits.get(hit.seq_id, 0) + hit.tokens
        return plan

    def run_and_commit(self, result):
        plan = self.plans.popleft()
        for copy in plan.copies:
            self.copy(copy)
        for index, item in enumerate(plan.items):
            self.run(item)
            new = result.tokens[index] if result.tokens else (7,)
            tokens = self.tokens[item.seq_id]
            if item.is_last_chunk and item.k == len(tokens):
                tokens += new
        outcome = self.commit(result)
        for seq_id, new in zip(outcome.seq_ids, outcome.tokens, strict=True):
            self.seen[seq_id].extend(new)
        return outcome

    def copy(self, copy):
        self.num_copies += 1
        wanted = range(copy.cut - self.size, copy.cut)
        if copy.to_slot:
            assert copy.tail in self.tails, "a tail that was never kept"
            assert list(self.tails[copy.tail]) == list(wanted), "a tail of another cut"
            self.slots[copy.slot] = dict(self.tails[copy.tail])
        else:
            ring = self.slots[copy.slot]
            assert all(at in ring for at in wanted), f"the slot has gone on beyond {copy.cut}"
            self.tails[copy.tail] = {at: ring[at] for at in wanted}

    def run(self, item):
        tokens = self.tokens[item.seq_id]
        table = self.tables.setdefault(item.seq_id, [])
        del table[item.num_blocks - len(item.new_blocks) :]
        table += item.new_blocks
        start = item.k - item.q
        ring = self.slots.setdefault(item.slot, {})
        if start == 0:
            ring.clear()
        for at in range(start):
            held = self.blocks[table[at // self.size]].get(at % self.size)
            assert held == tuple(tokens[: at + 1]), f"position {at} is not its own"
        for at in range(max(0, start - self.size + 1), start):
            assert ring.get(at) == tuple(tokens[: at + 1]), f"window position {at} is not its own"
        for at in range(start, item.k):
            past = tuple(tokens[: at + 1])
            assert len(past) == at + 1, "a row before its token"
            self.blocks.setdefault(table[at // self.size], {})[at % self.size] = past
            ring[at] = past
        for at in [at for at in ring if at < item.k - 2 * self.size]:
            del ring[at]
