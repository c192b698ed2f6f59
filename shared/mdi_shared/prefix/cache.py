"""What a rank keeps of prefixes: which blocks hold what, and the tails at which one can go on.

The core's own part of it: it finds, shares, enters and forgets; who copies a tail is the driver,
told by the plan (`StepPlan.copies`). All content here has been computed by a step that was planned
before, and a device runs steps and copies in the order of plans: what is found is there.

A sequence whose prompt is shorter than a block neither gives nor takes: the model lists a window of
such a prompt otherwise, so that its rows are not those of a longer prompt (docs/model.md).

Read next: `contents.py` (keys), `pool.py` (blocks), `tails.py`, `mdi_shared/prefill.py` (who asks).
"""

from bisect import insort
from typing import NamedTuple

from mdi_shared.blocks import Fit
from mdi_shared.config import SNAPSHOTS, SchedulerConfig
from mdi_shared.plan import Hit, TailCopy
from mdi_shared.prefix.contents import Contents
from mdi_shared.prefix.pool import SharedBlockPool
from mdi_shared.prefix.tails import TailPool
from mdi_shared.request import Sequence

PROMPT, TURN, BRANCH = SNAPSHOTS


class _Match(NamedTuple):
    """Blocks that hold the sequence's first tokens; the first `num_usable` end at a tail."""

    blocks: list[int]
    num_usable: int
    key: int  # of that tail


_NOTHING = _Match([], 0, 0)


class PrefixCache:
    """Prefixes of one rank. A hit leaves at least `margin` >= 1 tokens to compute.

    `prefix_snapshots` says when a tail is kept: at the end of a prompt, at the end of a turn (the
    request finished by itself), and at a branch, that is where a second prompt leaves a known
    prefix; its chunk ends there for that. A preempted sequence always leaves one.
    """

    __slots__ = ("_copies", "_found", "_hits", "_saves", "_size", "_splits", "blocks", "margin",
                 "tails")  # fmt: skip

    def __init__(self, config: SchedulerConfig, margin: int) -> None:
        assert margin >= 1, "the last token of a prompt is always computed"
        self.tails = TailPool(config.num_tails, config.prefix_eviction)
        self.blocks = SharedBlockPool(config.num_blocks, self.tails.drop)
        self.margin = margin
        self._size = config.block_size
        self._saves = frozenset(config.prefix_snapshots.split("+"))
        self._splits = BRANCH in self._saves and config.chunked_prefill
        self._found: tuple[Sequence | None, _Match] = (None, _NOTHING)
        self._copies: list[TailCopy] = []
        self._hits: list[Hit] = []

    # ---- admission -----------------------------------------------------------------------------

    def fits(self, seq: Sequence, needed: int) -> Fit:
        """Say whether a sequence of so many blocks can have those that are not there already.

        Notes what it would go on with: `seq.prefilled` are the tokens it need not compute.
        """
        match = self._match(seq)
        self._found = seq, match
        self._plan_branch(seq, match)
        given = 0 if seq.num_preempted else seq.request.cached_len
        seq.prefilled = max(given, match.num_usable * self._size)
        if needed >= self.blocks.num_total:
            return Fit.NEVER
        shared = match.blocks[: match.num_usable]
        num_idle = sum(map(self.blocks.is_idle, shared))
        free = self.blocks.num_free - num_idle
        return Fit.OK if free >= needed - len(shared) else Fit.LATER

    def share(self, seq: Sequence) -> None:
        """Begin the table of a sequence that fits with the blocks found for it just now."""
        owner, match = self._found
        assert owner is seq, f"nobody asked whether {seq.request.req_id!r} fits"
        seq.block_table += match.blocks[: match.num_usable]
        self.blocks.share(seq.block_table)
        seq.num_entered = match.num_usable

    def restore(self, seq: Sequence) -> None:
        """Have the tail copied to the slot that the sequence has got; note the hit."""
        _, match = self._found
        self._found = None, _NOTHING
        seq.resumed = match.num_usable * self._size
        if match.num_usable:
            self._copies.append(TailCopy(self.tails.use(match.key), seq.slot, seq.resumed, True))
        if match.blocks:
            self._hits.append(Hit(seq.seq_id, seq.resumed, len(match.blocks) * self._size))

    def _match(self, seq: Sequence) -> _Match:
        contents = self._contents(seq)
        if contents is None:
            return _NOTHING
        keys = contents.keys(max(seq.num_tokens - self.margin, 0) // self._size)
        blocks: list[int] = []
        num_usable = 0
        for key in keys:
            block = self.blocks.find(key)
            if not block:
                break
            blocks.append(block)
            if key in self.tails:
                num_usable = len(blocks)
        return _Match(blocks, num_usable, keys[num_usable - 1] if num_usable else 0)

    def _plan_branch(self, seq: Sequence, match: _Match) -> None:
        """End a chunk where the known prefix ends, if nothing can be used up to there."""
        if seq.branch in seq.checkpoints:
            seq.checkpoints.remove(seq.branch)  # of an earlier look, at what was known then
        seq.branch = 0
        if self._splits and len(match.blocks) > match.num_usable:
            seq.branch = len(match.blocks) * self._size
            if seq.branch not in seq.checkpoints:
                insort(seq.checkpoints, seq.branch)

    # ---- what has been computed ----------------------------------------------------------------

    def computed(self, seq: Sequence) -> None:
        """Enter what a chunk has computed; it has been processed, and its token is yet to come."""
        self._enter(seq, seq.prefilled)
        if seq.branch and seq.prefilled == seq.branch:
            self._save(seq, seq.branch, seq.prefilled)
        if PROMPT in self._saves and seq.prefilled == seq.num_tokens:
            self._save(seq, seq.num_tokens - 1, seq.num_tokens)

    def finished(self, seq: Sequence) -> None:
        """Enter what a request that ended by itself has computed; it still holds its memory."""
        self._enter(seq, seq.cached)
        if TURN in self._saves:
            # A step in flight may compute its last token, too.
            self._save(seq, seq.cached, seq.num_tokens)

    def preempted(self, seq: Sequence) -> None:
        """Enter what a victim has computed, which is about to lose its memory."""
        self._enter(seq, seq.cached)
        self._save(seq, seq.cached, seq.num_tokens)

    def _enter(self, seq: Sequence, tokens: int) -> None:
        contents, count = self._contents(seq), tokens // self._size
        if contents is None or count <= seq.num_entered:
            return
        keys = contents.keys(count)
        for block in range(seq.num_entered, len(keys)):
            self.blocks.enter(keys[block], seq.block_table[block])
        seq.num_entered = max(seq.num_entered, len(keys))

    def _save(self, seq: Sequence, tokens: int, reached: int) -> None:
        """Keep the state at the last cut of the first `tokens`; the slot has gone on to `reached`.

        A slot reaches back a block (`CacheLayout`). Contents known to a coarser grain are cut there
        as if it did: with all ids at hand the cut would be later.
        """
        contents = self._contents(seq)
        keys = contents.keys(tokens // self._size) if contents is not None else ()
        if contents is None or not keys or not self.blocks.find(keys[-1]):
            return
        cut, key = len(keys) * self._size, keys[-1]
        if key in self.tails:
            self.tails.use(key)
        elif cut > seq.resumed and reached - cut <= contents.grain:
            tail = self.tails.take(key, cut - seq.resumed)
            if tail:
                self._copies.append(TailCopy(tail, seq.slot, cut, False))
                seq.resumed = cut

    def _contents(self, seq: Sequence) -> Contents | None:
        return seq.request.contents if seq.request.prompt_len >= self._size else None

    # ---- the next plan -------------------------------------------------------------------------

    def take_copies(self) -> tuple[TailCopy, ...]:
        """Return the copies to be made before the next step runs, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_hits(self) -> tuple[Hit, ...]:
        """Return what the sequences admitted since the last plan found."""
        hits, self._hits = tuple(self._hits), []
        return hits

    def check_integrity(self) -> None:
        """Assert what holds between engine steps."""
        self.blocks.check_integrity()
        self.tails.check_integrity()
        for key in self.tails.kept_keys():
            assert self.blocks.find(key), "a tail stands behind no block"
