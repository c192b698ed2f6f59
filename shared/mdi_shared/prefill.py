"""Which prompts, and how much of each, the next prefill or mixed step runs (docs/rules.md, R8).

Admission is strictly in the queue's order, first come, first served unless a scheduling policy has
sorted it: the first sequence that cannot be admitted stops the search. At most one prompt is left
partial, and it is the last of the step.
"""

from dataclasses import dataclass, field

from mdi_shared.blocks import Fit
from mdi_shared.chunking import ChunkPolicy
from mdi_shared.decisions import Decisions
from mdi_shared.errors import UpstreamCheckError
from mdi_shared.eviction import find_victims
from mdi_shared.plan import Ending, Member, PromptRow
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence, State


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """The step being assembled, with the room that is left.

    A mixed step begins with the rows of those who decode.
    """

    k_room: int  # sum of full lengths still allowed
    budget: int = 0  # of tokens
    decoding: tuple[PromptRow, ...] = ()
    picked: list[Sequence] = field(default_factory=list)
    rows: list[PromptRow] = field(default_factory=list)  # of each picked: q, k and full length
    taken: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # blocks, by sequence
    is_partial: bool = False  # the last one's prompt goes on after this step
    ignored: list[Ending] = field(default_factory=list)
    used_tokens: int = 0  # padded for context parallelism, and those of `decoding`
    evicted: list[Sequence] = field(default_factory=list)
    below: bool = True  # the watermark lets in whoever fits

    def members(self) -> tuple[Member, ...]:
        return tuple([
            Member(-k, seq.request.prompt_len, seq.seq_id, seq.slot)
            for seq, (_, k, _) in zip(self.picked, self.rows, strict=True)
        ])  # fmt: skip


class PrefillSelection:
    """Assembles prefill steps from the head of the waiting queue."""

    __slots__ = ("decisions", "policy", "queues")

    def __init__(self, queues: Queues, policy: ChunkPolicy, decisions: Decisions | None) -> None:
        self.queues = queues
        self.policy = policy
        self.decisions = decisions

    def select(self, beside: tuple[PromptRow, ...] | None = None) -> PrefillBatch | None:
        """Take sequences out of `waiting`; None when neither a sequence nor a rejection came up.

        A batch that holds only rejections still counts as a prefill step. In a mixed step prompts
        get the room that the rows `beside` them leave of its budget.
        """
        queues, config, decisions = self.queues, self.queues.config, self.decisions
        if decisions is not None and queues.waiting:
            decisions.begin_prefill()
        batch = PrefillBatch(config.prefill_max_sum_seqlen_k, config.token_budget)
        if decisions is not None and decisions.evicts and queues.waiting:
            batch.below = queues.below_watermark
        if beside is not None and decisions is not None:
            batch.budget = decisions.mixed_budget()
            batch.decoding, batch.used_tokens = beside, len(beside)
        while queues.waiting and not batch.is_partial:
            seq = queues.waiting[0]
            if seq.is_finished:
                batch.ignored.append(queues.drop_dead_head())
                continue
            victims: list[Sequence] = []
            if not seq.block_table:
                if seq.num_tokens > config.prompt_limit or queues.fits(seq) is Fit.NEVER:
                    batch.ignored.append(queues.reject_head())
                    continue
                room = self._make_room(batch, seq)
                if room is None:
                    break
                victims = room
            tokens = self._tokens_to_run(batch, seq, len(victims))
            if tokens == 0:
                break
            self._evict(batch, victims)
            self._take_head(batch, seq, tokens)
        for seq in reversed(batch.evicted):
            queues.requeue(seq)
        return batch if batch.picked or batch.ignored else None

    def _make_room(self, batch: PrefillBatch, head: Sequence) -> list[Sequence] | None:
        """Return who gives way so that the head may take memory; None: it must wait."""
        queues, decisions = self.queues, self.decisions
        victims: list[Sequence] | None
        if decisions is not None and decisions.evicts:
            num_picked = len(batch.picked)
            victims = find_victims(queues, decisions, head, num_picked, below=batch.below)
        else:
            victims = None if queues.fits(head) is Fit.LATER else []
        if victims is None or decisions is None or decisions.admits(head, batch.picked, victims):
            return victims
        return None

    def _evict(self, batch: PrefillBatch, victims: list[Sequence]) -> None:
        for victim in victims:
            self.queues.evict(victim)
            batch.below = True
        batch.evicted += victims

    def _tokens_to_run(self, batch: PrefillBatch, seq: Sequence, num_leaving: int) -> int:
        """Return how many tokens of the head to run (R10 to R16); 0 = it must wait.

        A checkpoint is consumed even then (R14). `num_leaving` running sequences would make way.
        """
        config = self.queues.config
        seated = len(self.queues.running) - num_leaving + len(batch.picked)
        if seated >= config.max_num_seqs:
            return 0
        room = (batch.budget - batch.used_tokens) // config.cp_align * config.cp_align
        if batch.k_room < seq.num_tokens or (room <= 0 and not batch.picked):
            return 0
        batch.k_room -= seq.num_tokens
        work = seq.num_tokens - seq.cached
        if config.strict_upstream and work < config.lookahead:
            raise UpstreamCheckError(
                f"lookahead = {config.lookahead}: the production engine stops here, for request "
                f"{seq.request.req_id!r} has {work} tokens left to prefill"
            )
        rows = [*batch.decoding, *batch.rows] if batch.decoding else batch.rows
        tokens = self.policy.chunk_tokens(rows, seq.cached, work, room, seq.num_tokens)
        assert 0 <= tokens <= min(work, room), f"chunk policy asked for {tokens} of {work} tokens"
        while seq.checkpoints and seq.checkpoints[0] <= seq.cached:
            seq.checkpoints.pop(0)
        if seq.checkpoints and seq.checkpoints[0] <= seq.cached + tokens:
            tokens = seq.checkpoints.pop(0) - seq.cached
        assert tokens > 0 or rows, "an empty step has room for no token at all"
        if tokens < work and not config.chunked_prefill:
            return 0
        if config.strict_upstream:
            return tokens if tokens >= max(config.lookahead, 1) else 0
        # A short chunk waits for a step with more room. The end of a prompt never gets longer, and
        # nothing comes before the first chunk of a step: waiting would help neither (R16).
        is_short = tokens < config.lookahead and tokens < work
        return 0 if is_short and batch.picked else tokens

    def _take_head(self, batch: PrefillBatch, seq: Sequence, tokens: int) -> None:
        """Commit the head to the step."""
        queues, align = self.queues, self.queues.config.cp_align
        queues.waiting.popleft()
        if self.decisions is not None:
            self.decisions.took(seq, tokens)
        if not seq.block_table:
            queues.allocate(seq)
            batch.taken.append((seq.seq_id, tuple(seq.block_table)))
        k = seq.cached + tokens
        batch.is_partial = k < seq.num_tokens
        if not batch.is_partial:
            seq.become(State.RUNNING)
        batch.used_tokens += -(-tokens // align) * align
        batch.picked.append(seq)
        batch.rows.append((tokens, k, seq.num_tokens))
