"""Which running sequences take part in the next decode step, and who must give way.

Three different orders meet here (docs/rules.md, R17): the shortest output is served
first, the longest output is the victim, and the batch is laid out by falling length.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from mdi_shared.decisions import Decisions
from mdi_shared.plan import NOBODY, Batch, Ending, Member
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence
from mdi_shared.upstream_order import sort_descending


@dataclass(slots=True, eq=False)
class DecodeStep:
    """The step being assembled.

    `seqs` are the sequences of `batch`. `joined` and `left` are its difference to the step before,
    `taken` the blocks that sequences got, by id.
    """

    finished: list[Sequence]
    ignored: list[Ending]
    batch: Batch = NOBODY
    seqs: list[Sequence] = field(default_factory=list)
    joined: tuple[Member, ...] = ()
    left: tuple[int, ...] = ()
    preempted: list[Sequence] = field(default_factory=list)
    taken: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


def _member(seq: Sequence) -> Member:
    return Member(-seq.base, seq.request.prompt_len, seq.seq_id, seq.slot)


class DecodeSelection:
    """Assembles decode steps.

    Orders survive from step to step: every running sequence takes part in every decode step and
    grows by one, so a step only visits who joins, leaves or needs a block. In strict mode, and with
    drafts in flight, where sequences grow unevenly, each step sorts.
    """

    __slots__ = ("_batch", "_members", "_seqs", "decisions", "queues")

    def __init__(self, queues: Queues, decisions: Decisions | None) -> None:
        self.queues = queues
        self.decisions = decisions
        self._batch = NOBODY
        self._members: list[Member] = []  # of the batch, in its order
        self._seqs: list[Sequence] = []

    def select(self) -> DecodeStep:
        """Choose the batch, give it blocks and preempt where there are too few."""
        queues = self.queues
        finished = queues.take_dead_running() if queues.dead else []
        step = DecodeStep(finished, queues.drop_all_dead() if queues.num_dead_waiting else [])
        if queues.keeps_order:
            self._give_blocks(step)
            if finished or step.preempted or queues.joined or queues.evicted:
                self._update(step)
        else:
            self._sort(step)
        queues.joined.clear()
        queues.evicted.clear()
        step.batch, step.seqs = self._batch, self._seqs
        return step

    def _give_blocks(self, step: DecodeStep) -> None:
        """Give a block to those that need one now; nobody else's table changes."""
        queues = self.queues
        needy = queues.clock.take_needy(queues.clock.planned, queues.config.block_size)
        if len(needy) <= queues.blocks.num_free:
            for seq in needy:
                step.taken.append((seq.seq_id, queues.add_blocks(seq, 1)))
        elif self.decisions is None:
            self._serve(needy, step)
        else:
            self._serve_by(self.decisions, needy, step)

    def _serve_by(self, decisions: Decisions, needy: list[Sequence], step: DecodeStep) -> None:
        """Serve as a scheduling policy has it: who gives way first is served last."""
        victims, wanting = decisions.victims_first(), set(needy)
        self._serve([seq for seq in reversed(victims) if seq in wanting], step, victims)

    def _update(self, step: DecodeStep) -> None:
        """Bring the batch up to date with who joined and who left."""
        members, seqs = self._members, self._seqs
        queues = self.queues
        left = dict.fromkeys((*step.finished, *step.preempted, *queues.evicted))
        gone = [seq for seq in left if seq in seqs]
        new = [(_member(seq), seq) for seq in queues.joined if seq.clock is not None]
        if not gone and not new:
            return
        # Copies: the lists are those of steps in flight.
        self._members, self._seqs = members, seqs = members.copy(), seqs.copy()
        for seq in gone:
            index = seqs.index(seq)
            del members[index], seqs[index]
        for member, seq in new:
            index = bisect_left(members, member)
            members.insert(index, member)
            seqs.insert(index, seq)
        step.joined = tuple([member for member, _ in new])
        step.left = tuple([seq.seq_id for seq in gone])
        self._batch = Batch(tuple(members))

    def _sort(self, step: DecodeStep) -> None:
        """Serve everybody and lay the batch out anew."""
        queues, left = self.queues, self._batch.seq_ids
        if queues.config.strict_upstream:
            # Upstream's orders: sorts of whatever order the last step left (R17).
            sort_descending(queues.running, lambda seq: seq.output_len)
            self._serve(reversed(queues.running), step)
            queues.running.reverse()
            sort_descending(queues.running, lambda seq: seq.num_tokens)
            seqs = queues.running.copy()
        else:
            queues.running.sort(key=lambda seq: (-seq.output_len, seq.seq_id))
            if self.decisions is not None and self._is_short():
                self._serve_by(self.decisions, queues.running, step)
            else:
                self._serve(reversed(queues.running), step)
            seqs = sorted(queues.running, key=_member)
        members = [Member(-seq.base, place, seq.seq_id, seq.slot) for place, seq in enumerate(seqs)]
        self._members, self._seqs, self._batch = members, seqs, Batch(tuple(members))
        step.joined, step.left = self._batch.members, left

    def _serve(
        self, served: Iterable[Sequence], step: DecodeStep, victims: list[Sequence] | None = None
    ) -> None:
        """Serve in the order given, preempt from the start of `victims`, else of `running`."""
        queues, first = self.queues, 0
        victims = queues.running if victims is None else victims
        for seq in served:
            if seq.clock is None:
                continue  # a victim of one before it
            while self._is_starved(seq) and victims[first] is not seq:
                self._preempt(victims[first], step)
                first += 1
            if self._is_starved(seq):
                self._preempt(seq, step)
                first += 1
            else:
                self._fit_table(seq, step)
        if step.preempted:
            queues.running = [seq for seq in queues.running if seq.clock is not None]

    def _is_short(self) -> bool:
        """Say whether the pool has fewer blocks than sequences that need one."""
        queues = self.queues
        needy = sum(seq.tokens_needed > queues.capacity(seq) for seq in queues.running)
        return needy > queues.blocks.num_free

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
        return seq.tokens_needed > queues.capacity(seq)

    def _fit_table(self, seq: Sequence, step: DecodeStep) -> None:
        """Give the table exactly the blocks it needs: one more, or the surplus back."""
        queues, have = self.queues, len(seq.block_table)
        need = queues.blocks_needed(seq)
        if need > have:
            assert need == have + 1, f"{seq.request.req_id!r} needs two blocks in one step"
            step.taken.append((seq.seq_id, queues.add_blocks(seq, 1)))
        elif need < have:
            queues.blocks.free(reversed(seq.block_table[need:]))
            del seq.block_table[need:]

    def _preempt(self, seq: Sequence, step: DecodeStep) -> None:
        ending = self.queues.preempt(seq)
        step.preempted.append(seq)
        if ending is not None:
            step.ignored.append(ending)
