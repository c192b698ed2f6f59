"""Which prompts, and how much of each, make the next prefill step (engine-semantics §2.3).

Admission is strictly first come, first served: the first sequence that cannot be admitted stops
the search. At most one prompt is left partial, and it is the last of the step.
"""

from mdi_shared.blocks import Fit
from mdi_shared.chunking import ChunkPolicy
from mdi_shared.cost.work import PromptRow
from mdi_shared.plan import Ending
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence, State


class PrefillBatch:
    """The step being assembled, with the room that is left."""

    __slots__ = (
        "ignored", "k_room", "new_blocks", "picked", "policy", "qs", "rows", "used_tokens",
    )  # fmt: skip

    def __init__(self, k_room: int, policy: ChunkPolicy) -> None:
        self.policy = policy
        self.picked: list[Sequence] = []
        self.qs: list[int] = []
        self.new_blocks: list[tuple[int, ...]] = []
        self.rows: list[PromptRow] = []  # for the chunk policy
        self.ignored: list[Ending] = []
        self.used_tokens = 0
        self.k_room = k_room  # sum of full lengths still allowed


class PrefillSelection:
    """Assembles prefill steps from the head of the waiting queue."""

    __slots__ = ("policy", "queues")

    def __init__(self, queues: Queues, policy: ChunkPolicy) -> None:
        self.queues = queues
        self.policy = policy

    def select(self, policy: ChunkPolicy | None = None) -> PrefillBatch | None:
        """Take sequences out of `waiting`; None when neither a sequence nor a rejection came up.

        A batch that holds only rejections still counts as a prefill step. `policy` replaces the
        own one this time.
        """
        queues, config = self.queues, self.queues.config
        batch = PrefillBatch(config.prefill_max_sum_seqlen_k, policy or self.policy)
        while queues.waiting:
            seq = queues.waiting[0]
            if seq.is_finished:
                queues.waiting.popleft()
                queues.num_dead_waiting -= 1
                batch.ignored.append(queues.drop_dead(seq))
                continue
            if not seq.schedulable:
                break
            if not seq.block_table:
                fit = queues.fits(seq)
                if seq.num_tokens > config.prompt_limit or fit is Fit.NEVER:
                    batch.ignored.append(queues.reject_head())
                    continue
                if fit is Fit.LATER:
                    break
            tokens = self._tokens_to_run(batch, seq)
            if tokens == 0:
                break
            if self._take_head(batch, seq, tokens):
                break  # a partial prompt is the last of its step
        return batch if batch.picked or batch.ignored else None

    def preview(self, policy: ChunkPolicy) -> list[PromptRow]:
        """Return the rows `select` would pick with `policy`, checkpoints aside; changes nothing."""
        queues, config = self.queues, self.queues.config
        rows: list[PromptRow] = []
        seats = config.max_num_seqs - len(queues.running)
        free_blocks, free_slots = queues.blocks.num_free, queues.slots.num_free
        used, k_room, align = 0, config.prefill_max_sum_seqlen_k, config.cp_align
        for seq in queues.waiting:
            if seq.is_finished:
                continue
            if not seq.schedulable:
                break
            if not seq.block_table:
                if seq.num_tokens > config.prompt_limit or queues.fits(seq) is Fit.NEVER:
                    continue
                free_blocks -= queues.blocks_needed(seq)
                free_slots -= 1
            k_room -= seq.num_tokens
            if min(free_blocks, free_slots, k_room) < 0 or len(rows) >= seats:
                break
            work, room = seq.num_tokens - seq.cached, (config.token_budget - used) // align * align
            tokens = policy.chunk_tokens(rows, seq.cached, work, room, seq.num_tokens)
            if tokens < max(config.lookahead, 1) or (tokens < work and not config.chunked_prefill):
                break
            used += -(-tokens // align) * align
            rows.append((tokens, seq.cached + tokens, seq.num_tokens))
            if tokens < work:
                break
        return rows

    def _tokens_to_run(self, batch: PrefillBatch, seq: Sequence) -> int:
        """Steps 4 to 11 of §2.3; 0 = it must wait. Consumes checkpoints even then (§13.10)."""
        config = self.queues.config
        if len(self.queues.running) + len(batch.picked) + 1 > config.max_num_seqs:
            return 0
        if batch.k_room < seq.num_tokens:
            return 0
        batch.k_room -= seq.num_tokens
        work = seq.num_tokens - seq.cached
        align = config.cp_align
        room = (config.token_budget - batch.used_tokens) // align * align
        tokens = batch.policy.chunk_tokens(batch.rows, seq.cached, work, room, seq.num_tokens)
        assert 0 <= tokens <= min(work, room), f"chunk policy asked for {tokens} of {work} tokens"
        while seq.checkpoints and seq.checkpoints[0] <= seq.cached:
            seq.checkpoints.pop(0)
        if seq.checkpoints and seq.checkpoints[0] <= seq.cached + tokens:
            tokens = seq.checkpoints.pop(0) - seq.cached
        assert tokens > 0 or batch.picked, "an empty step has room for no token at all"
        if tokens < work and not config.chunked_prefill:
            return 0
        if config.strict_upstream:
            return tokens if tokens >= max(config.lookahead, 1) else 0
        # A short chunk waits for a step with more room. The end of a prompt never gets longer, and
        # nothing comes before the first chunk of a step: waiting would help neither (§2.3, 11).
        is_short = tokens < config.lookahead and tokens < work
        return 0 if is_short and batch.picked else tokens

    def _take_head(self, batch: PrefillBatch, seq: Sequence, tokens: int) -> bool:
        """Commit the head to the step; return True when its prompt stays partial."""
        queues, align = self.queues, self.queues.config.cp_align
        queues.waiting.popleft()
        held = len(seq.block_table)
        if not held:
            queues.allocate(seq)
        rest = seq.num_tokens - seq.cached - tokens
        seq.chunk_rest = rest
        if rest == 0:
            seq.become(State.RUNNING)
        batch.used_tokens += -(-tokens // align) * align
        batch.picked.append(seq)
        batch.qs.append(tokens)
        batch.new_blocks.append(tuple(seq.block_table[held:]))
        batch.rows.append((tokens, seq.cached + tokens, seq.num_tokens))
        return rest > 0
