"""Which running sequences take part in the next decode step, and who must give way.

Three different orders meet here (docs/rules.md, R17): the shortest output is served
first, the longest output is the victim, and the batch is laid out by falling length.
"""

from dataclasses import dataclass, field

from mdi_shared.decisions import Decisions
from mdi_shared.plan import Ending
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence
from mdi_shared.upstream_order import sort_descending


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """The step being assembled. `new_blocks` holds only sequences that took a block."""

    finished: list[Sequence]
    ignored: list[Ending]
    batch: list[Sequence] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    new_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)


def _by_output(seq: Sequence) -> tuple[int, int]:
    """Order of `running`: the longest output first, of equals the older request first.

    The first of them is the victim when blocks run out.
    """
    return (-seq.output_len, seq.seq_id)


def _by_length(seq: Sequence) -> tuple[int, int, int]:
    """Order of the batch: the longest, of equals the longer output, then the older first."""
    return (-seq.num_tokens, -seq.output_len, seq.seq_id)


class DecodeSelection:
    """Assembles decode steps.

    Both orders survive from step to step: every running sequence takes part in every decode step
    and grows by one, so the lists are sorted again only after somebody joined. With drafts in
    flight sequences grow unevenly and each step sorts.
    """

    __slots__ = ("_laid_out", "decisions", "queues")

    def __init__(self, queues: Queues, decisions: Decisions | None) -> None:
        self.queues = queues
        self.decisions = decisions
        self._laid_out: list[Sequence] = []

    def select(self) -> DecodeBatch:
        """Choose the batch, give it blocks and preempt where there are too few."""
        queues = self.queues
        out = DecodeBatch(queues.take_dead_running(), queues.drop_all_dead())
        if queues.config.strict_upstream:
            self._select_strict(out)
        else:
            self._select(out)
        return out

    def _select(self, out: DecodeBatch) -> None:
        queues = self.queues
        drafting = queues.config.num_draft_tokens > 0
        stale = queues.order_is_stale or drafting
        if stale:
            queues.running.sort(key=_by_output)
        # Written out, not `tokens_needed`: this line runs for every sequence in every step.
        needy = [s for s in queues.running if s.num_tokens + s.inflight_total > s.capacity]
        has_asked = False
        if drafting or len(needy) > queues.blocks.num_free:
            has_asked = self._ask_for_victims()
            picked = self._serve(queues.running, out)
            picked.reverse()
            queues.running = picked
        else:  # enough for all, so only those that need a block are touched
            for seq in reversed(needy):
                out.new_blocks[seq.seq_id] = queues.add_blocks(seq, 1)
        queues.order_is_stale = has_asked  # `running` is in the policy's order, if any
        if stale:
            self._laid_out = sorted(queues.running, key=_by_length)
        elif out.finished or out.preempted:
            self._laid_out = self._without_leavers(out)
        out.batch = self._laid_out

    def _ask_for_victims(self) -> bool:
        """Let a scheduling policy, where there is one, order `running` if blocks are short."""
        queues = self.queues
        if self.decisions is None:
            return False
        wanted = sum(seq.tokens_needed > seq.capacity for seq in queues.running)
        if wanted <= queues.blocks.num_free:
            return False
        queues.running = self.decisions.victims_first()
        return True

    def _without_leavers(self, out: DecodeBatch) -> list[Sequence]:
        """The last layout less those that left; a new list, for the old one is in flight."""
        if out.preempted:
            here = {seq.seq_id for seq in self.queues.running}
            return [seq for seq in self._laid_out if seq.seq_id in here]
        left = self._laid_out.copy()
        for seq in out.finished:
            left.remove(seq)
        return left

    def _select_strict(self, out: DecodeBatch) -> None:
        """Upstream's orders: sorts of whatever order the last step left (R17)."""
        queues = self.queues
        sort_descending(queues.running, lambda seq: seq.output_len)
        picked = self._serve(queues.running, out)
        sort_descending(picked, lambda seq: seq.num_tokens)
        queues.running = picked
        out.batch = picked.copy()  # `running` changes while the batch is in flight

    def _serve(self, running: list[Sequence], out: DecodeBatch) -> list[Sequence]:
        """Serve from the end of `running`, preempt from its start; return those served."""
        picked: list[Sequence] = []
        first, index = 0, len(running)
        while first < index:
            index -= 1
            seq = running[index]
            while first < index and self._is_starved(seq):
                self._preempt(running[first], out)
                first += 1
            if self._is_starved(seq):
                self._preempt(seq, out)
            else:
                self._fit_table(seq, out)
                picked.append(seq)
        return picked

    def _is_starved(self, seq: Sequence) -> bool:
        """Say whether the pool is too empty for this sequence to go on.

        Upstream wants a free block for every sequence, needed or not; by default only a block
        that is really needed counts (R18).
        """
        queues = self.queues
        if queues.blocks.num_free:
            return False  # one block is always enough: a step adds at most a block's tokens
        if queues.config.strict_upstream:
            return True
        return seq.tokens_needed > seq.capacity

    def _fit_table(self, seq: Sequence, out: DecodeBatch) -> None:
        """Give the table exactly the blocks it needs: one more, or the surplus back."""
        queues, have = self.queues, len(seq.block_table)
        need = queues.blocks_needed(seq)
        if need > have:
            assert need == have + 1, f"{seq.request.req_id!r} needs two blocks in one step"
            out.new_blocks[seq.seq_id] = queues.add_blocks(seq, 1)
        elif need < have:
            queues.blocks.free(reversed(seq.block_table[need:]))
            del seq.block_table[need:]
            seq.capacity = need * queues.config.block_size

    def _preempt(self, seq: Sequence, out: DecodeBatch) -> None:
        ending = self.queues.preempt(seq)
        out.preempted.append(seq.seq_id)
        if ending is not None:
            out.ignored.append(ending)
