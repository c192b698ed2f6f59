"""What the layers of one forward pass share: row numbers, rotations, and the last selection.

Every per-sequence state is read the same way: rows of the step follow the rows kept from before, so
"position x of this sequence" is one row number whether x is new or cached.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.rope import RopeTables
from mdi_exec.model.staged_keys import StagedKeys
from mdi_exec.ops.index_scores import PagedRows
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.sparse_attention import NO_COLUMN, NONE
from mdi_exec.ranks.exchange import NO_EXCHANGE, ExpertExchange


class RingRows(NamedTuple):
    """Rows of a slot ring in one step, for a ring of R positions.

    kept [n * R]: pool rows of the batch's sequences; new rows count from n * R on. target [T]: pool
    row to which each row of the step goes. Every row is written, so that nothing depends on how
    many of a chunk's rows outlive it: those that do not go to the reserved slot 0.
    """

    kept: Tensor
    target: Tensor


class GroupRows(NamedTuple):
    """The group of r tokens that ends at each row of the step, at one ratio r.

    members [T, r]: rows of its tokens among kept and new ones (see `RingRows`). first_position [T].
    is_complete bool [T]: the row really ends a group. entry [T]: pool row of the new entry; rows
    that end no group compute one all the same, and put it into row 0, of the reserved block 0.
    """

    members: Tensor
    first_position: Tensor
    is_complete: Tensor
    entry: Tensor


class StepContext:
    """Index tensors of one batch, made once per step; `selected` and `candidates` change by layer.

    selected [T, topk]: rows of the entries the last index source chose, -1 = none; of the pool, or
    of `staged` where that stages a ratio's entries.
    candidates [T, C]: blocks of entries the candidate source kept, or None. `expert_counts`, when
    given, collects each layer's rows per own expert. `exchange` leads to other ranks' experts.
    Nothing here makes the host wait for the device.
    """

    def __init__(
        self, batch: Batch, cache: DeviceCache, ropes: RopeTables,
        expert_counts: list[Tensor] | None = None, exchange: ExpertExchange = NO_EXCHANGE,
    ) -> None:  # fmt: skip
        self.batch = batch
        self.cache = cache
        self.ropes = ropes
        self.selected: Tensor | None = None
        self.candidates: Tensor | None = None
        self.expert_counts = expert_counts
        self.exchange = exchange
        self._pages: dict[int, PagedRows] = {}  # by ratio
        self._rotations = {r: ropes.rotation(batch.positions, r) for r in (0, 1)}
        window = cache.layout.config.sliding_window
        first = torch.maximum(
            batch.positions - (window - 1), batch.window_from[batch.seq_of_row]
        ).clamp(min=0)
        targets = first.unsqueeze(1) + torch.arange(window, device=batch.device)
        rows = self._rows_of(targets, batch.seq_of_row, cache.layout.window_rows)
        is_seen = targets <= batch.positions.unsqueeze(1)
        rows = rows.masked_fill(~is_seen, NONE)
        self.window_rows = rows.masked_fill(self._is_no_column(window), NO_COLUMN).to(torch.int32)
        self.window_ring = self.ring(cache.layout.window_rows)
        self.staged = StagedKeys(batch, cache, self.window_rows)

    def _is_no_column(self, window: int) -> Tensor:
        """Say where a row's list of window keys has ended, bool [T, W].

        The released model lists min(prompt, window) keys for the rows of a prompt, `window` for
        those after it; selected entries follow, so the list decides which blocks of the softmax
        they fall into. It counts the prompt as the request came: then a row is the same whatever
        chunk it is in, and when a preempted sequence is computed again.
        """
        given = self.batch.given_len[self.batch.seq_of_row]
        is_short = (self.batch.positions < given) & (given < window)
        columns = torch.where(is_short, given, window)
        return torch.arange(window, device=self.batch.device) >= columns.unsqueeze(1)

    def note_expert_counts(self, counts: Tensor) -> None:
        """Keep a layer's rows per expert, int32 [E], when someone records them."""
        if self.expert_counts is not None:
            self.expert_counts.append(counts)

    def rotation(self, ratio: int) -> Rotation:
        """Rotation of the rows' own positions in a layer of this ratio."""
        return self._rotations[min(ratio, 1)]

    def ring(self, length: int) -> RingRows:
        """Rows of a slot ring that keeps `length` positions per sequence."""
        batch, seq = self.batch, self.batch.seq_of_row
        offsets = torch.arange(length, device=batch.device)
        kept = (batch.slots.unsqueeze(1) * length + offsets).flatten()
        stays = batch.positions >= batch.k_len[seq] - length
        target = batch.slots[seq] * stays * length + batch.positions % length
        return RingRows(kept, target)

    def look_back(self, depth: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows of positions p, p-1, .. p-depth+1 of every row, [T, depth], and which exist.

        `length` is the ring's; it must keep at least depth - 1 positions.
        """
        batch = self.batch
        targets = batch.positions.unsqueeze(1) - torch.arange(depth, device=batch.device)
        return self._rows_of(targets, batch.seq_of_row, length), targets >= 0

    def groups(self, ratio: int, tail_rows: int) -> GroupRows:
        """Groups of `ratio` tokens by their last row; the tail ring keeps `tail_rows`."""
        batch, seq = self.batch, self.batch.seq_of_row
        first = batch.positions - (ratio - 1)
        targets = first.unsqueeze(1) + torch.arange(ratio, device=batch.device)
        members = self._rows_of(targets.clamp(min=0), seq, tail_rows)
        first = first.clamp(min=0)
        is_complete = batch.positions % ratio == ratio - 1
        entry = self.pages(ratio).entry_rows((first // ratio).unsqueeze(1)).squeeze(1)
        return GroupRows(members, first, is_complete, entry * is_complete)

    def selected_rows(self, ratio: int, pages: PagedRows, entries: Tensor) -> Tensor:
        """Rows, as `selected` counts them, of entries [R, M] of some rows; int32."""
        if self.staged.entries(ratio) is None:
            return pages.entry_rows(entries).to(torch.int32)
        return self.staged.rows(pages, entries).to(torch.int32)

    def pages(self, ratio: int) -> PagedRows:
        """The step's rows and their sequences' entries, for scoring; made once for each ratio."""
        batch = self.batch
        if ratio not in self._pages:
            place = batch.positions - batch.starts[batch.seq_of_row]
            self._pages[ratio] = PagedRows(
                block_tables=batch.block_tables,
                per_block=self.cache.layout.block_entries(ratio),
                seq=batch.seq_of_row.to(torch.int32),
                place=place.to(torch.int32),
                visible=((batch.positions + 1) // ratio).to(torch.int32),
                one_per_seq=batch.num_rows == batch.num_seqs,
            )
        return self._pages[ratio]

    def _rows_of(self, targets: Tensor, seq: Tensor, length: int) -> Tensor:
        """Rows of positions `targets` [R, D] of sequences seq [R], among kept and new rows."""
        batch, column = self.batch, seq.unsqueeze(1)
        offset = targets - batch.starts[column]
        new_rows = batch.num_seqs * length + batch.cu_q[column] + offset
        if length == 0:
            return new_rows
        return torch.where(offset >= 0, new_rows, column * length + targets % length)
