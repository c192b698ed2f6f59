"""What the layers of one forward pass share: row numbers, rotations, and the last selection.

Every per-sequence state is read the same way: rows of the step follow the rows kept from before, so
"position x of this sequence" is one row number whether x is new or cached.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.batch import BLOCK_TOKENS, Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.rope import RopeTables
from mdi_exec.model.staged_keys import StagedKeys
from mdi_exec.ops.index_scores import Listed, PagedRows, selected_rows
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.step_rows import (
    PLAIN,
    RATIOS,
    YARN,
    YARN_PAIR,
    StepRows,
    StepShape,
    StepTables,
    step_rows,
)
from mdi_exec.ranks.exchange import NO_EXCHANGE, ExpertExchange

# Scored columns come in whole tiles.
COLUMN_TILE = 64


class GroupRows(NamedTuple):
    """The group of r tokens that ends at each row of the step, at one ratio r.

    entry int64 [T]: pool row of the new entry; rows that end no group compute one all the same, and
    put it into row 0, of the reserved block 0. rotation: of the groups' first positions.
    """

    entry: Tensor
    rotation: Rotation


class StepContext:
    """Index tensors of one batch, made once per step; `selected` and `candidates` change by layer.

    selected [T, topk]: rows of the entries the last index source chose, -1 = none; of the pool, or
    of `staged` where that stages a ratio's entries.
    candidates [T, C]: blocks of entries the candidate source kept, or None. `reads_ring`: rows read
    their window from the slot's ring, once their own keys are there. That needs one row a sequence:
    a longer chunk overwrites what its first rows still see. `expert_counts`, when given, collects
    each layer's rows per own expert. `exchange` leads to other ranks' experts.
    Nothing here makes the host wait for the device.
    """

    def __init__(
        self, batch: Batch, cache: DeviceCache, ropes: RopeTables,
        expert_counts: list[Tensor] | None = None, exchange: ExpertExchange = NO_EXCHANGE,
    ) -> None:  # fmt: skip
        self.batch = batch
        self.cache = cache
        self.selected: Tensor | None = None
        self.candidates: Tensor | None = None
        self.expert_counts = expert_counts
        self.exchange = exchange
        self.reads_ring = batch.one_per_seq
        self.tables = StepTables(*(getattr(batch, name) for name in StepTables._fields))
        layout, config = cache.layout, cache.layout.config
        self.rings = layout.ring_rows
        source = config.candidate_source_layer_id
        ratio = 1 if source is None else layout.ratio(source)
        size = config.candidate_block_size
        most = min(-(-self.num_columns(ratio) // size), config.candidate_topk_blocks)
        shape = StepShape(config.sliding_window, self.rings, self.reads_ring, BLOCK_TOKENS, size,
                          ratio, most)  # fmt: skip
        self.rows: StepRows = step_rows(self.tables, shape, ropes.frequencies)
        self.window_rows = self.rows.window_rows
        self.staged = StagedKeys(batch, cache, self.window_rows)
        self._window: tuple[Tensor, Tensor] | None = None

    def note_expert_counts(self, counts: Tensor) -> None:
        """Keep a layer's rows per expert, int32 [E], when someone records them."""
        if self.expert_counts is not None:
            self.expert_counts.append(counts)

    def rotation(self, ratio: int) -> Rotation:
        """Rotation of the rows' own positions in a layer of this ratio."""
        return self.rows.rotation(YARN if ratio else PLAIN)

    def target(self, length: int) -> Tensor:
        """Where each row goes in a slot ring of `length` positions, int64 [T].

        Every row is written, so that nothing depends on how many of a chunk's rows outlive it:
        those that do not go to the reserved slot 0.
        """
        return self.rows.targets[self.rings.index(length)]

    def window(self) -> tuple[Tensor, Tensor]:
        """Where rows do not read the ring: what their window is made of, int64 [n * R] and [T].

        First come the rings' rows of the batch's sequences, of which these are the numbers, behind
        them the step's rows, whose places these are.
        """
        if self._window is None:
            on, ring, slots = self.batch.device, self.rings[0], self.batch.slots
            kept = (slots.unsqueeze(1) * ring + torch.arange(ring, device=on)).flatten()
            place = torch.arange(len(kept), len(kept) + self.batch.num_rows, device=on)
            self._window = kept, place
        return self._window

    def groups(self, ratio: int) -> GroupRows:
        """Groups of `ratio` tokens by their last row."""
        which = YARN if ratio == 1 else YARN_PAIR
        return GroupRows(self.rows.entries[RATIOS.index(ratio)], self.rows.rotation(which))

    def num_columns(self, ratio: int) -> int:
        """Columns of a row of scores of all entries: those of the longest context, in tiles."""
        return max(1, -(-(self.batch.max_k // ratio) // COLUMN_TILE)) * COLUMN_TILE

    def listed(self, rows: slice, size: int) -> Listed:
        """Some rows' candidate blocks of `size` entries."""
        assert self.candidates is not None, "the candidate source runs before its users"
        return Listed(self.candidates[rows], size, self.rows.listed[rows])

    def selected_rows(
        self, ratio: int, pages: PagedRows, columns: Tensor, listed: Listed | None
    ) -> Tensor:
        """Rows, as `selected` counts them, of chosen columns int32 [R, M] of some rows."""
        is_staged = self.staged.entries(ratio) is not None
        return selected_rows(columns, pages, listed, staged=is_staged)

    def pages(self, ratio: int) -> PagedRows:
        """The step's rows and their sequences' entries, for scoring."""
        batch, rows = self.batch, self.rows
        return PagedRows(
            block_tables=batch.block_tables, per_block=self.cache.layout.block_entries(ratio),
            seq=rows.seq, place=rows.place, visible=rows.visible[RATIOS.index(ratio)],
            one_per_seq=batch.one_per_seq,
        )  # fmt: skip
