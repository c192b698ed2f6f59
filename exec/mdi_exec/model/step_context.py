"""What the layers of one forward pass share: row numbers, rotations, and the last selection.

Every per-sequence state is read the same way: rows of the step follow the rows kept from before, so
"position x of this sequence" is one row number whether x is new or cached.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.batch import Batch
from mdi_exec.cache import DeviceCache
from mdi_exec.model.rope import RopeTables
from mdi_exec.ops.rope import Rotation


class RingRows(NamedTuple):
    """Rows of a slot ring in one step, for a ring of R positions.

    kept [n * R]: pool rows of the batch's sequences; new rows count from n * R on. written [m]:
    rows of the step that stay, and `target` [m] their pool rows.
    """

    kept: Tensor
    written: Tensor
    target: Tensor


class GroupRows(NamedTuple):
    """Compressed groups that this step completes, at one ratio r.

    last [G]: the row of each group's last token. members [G, r]: rows of its tokens among kept
    and new ones (see `RingRows`). first_position [G]. entry [G]: pool row of the new entry.
    """

    last: Tensor
    members: Tensor
    first_position: Tensor
    entry: Tensor


class StepContext:
    """Index tensors of one batch, made once per step; `selected` and `candidates` change by layer.

    selected [T, topk]: pool rows of the entries the last index source chose, -1 = none.
    candidates [T, C]: blocks of entries the candidate source kept, or None.
    """

    def __init__(self, batch: Batch, cache: DeviceCache, ropes: RopeTables) -> None:
        self.batch = batch
        self.cache = cache
        self.ropes = ropes
        self.selected: Tensor | None = None
        self.candidates: Tensor | None = None
        self._rotations = {r: ropes.rotation(batch.positions, r) for r in (0, 1)}
        window = cache.layout.config.sliding_window
        first = torch.maximum(
            batch.positions - (window - 1), batch.window_from[batch.seq_of_row]
        ).clamp(min=0)
        targets = first.unsqueeze(1) + torch.arange(window, device=batch.device)
        rows = self._rows_of(targets, batch.seq_of_row, cache.layout.window_rows)
        is_seen = targets <= batch.positions.unsqueeze(1)
        self.window_rows = rows.masked_fill(~is_seen, -1)
        self.window_ring = self.ring(cache.layout.window_rows)

    def rotation(self, ratio: int) -> Rotation:
        """Rotation of the rows' own positions in a layer of this ratio."""
        return self._rotations[min(ratio, 1)]

    def ring(self, length: int) -> RingRows:
        """Rows of a slot ring that keeps `length` positions per sequence."""
        batch = self.batch
        offsets = torch.arange(length, device=batch.device)
        kept = (batch.slots.unsqueeze(1) * length + offsets).flatten()
        written = torch.as_tensor(batch.host_tail_rows(length), device=batch.device)
        slots = batch.slots[batch.seq_of_row[written]]
        return RingRows(kept, written, slots * length + batch.positions[written] % length)

    def look_back(self, depth: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows of positions p, p-1, .. p-depth+1 of every row, [T, depth], and which exist.

        `length` is the ring's; it must keep at least depth - 1 positions.
        """
        batch = self.batch
        targets = batch.positions.unsqueeze(1) - torch.arange(depth, device=batch.device)
        return self._rows_of(targets, batch.seq_of_row, length), targets >= 0

    def groups(self, ratio: int, tail_rows: int) -> GroupRows:
        """Groups of `ratio` tokens completed in this step; the tail ring keeps `tail_rows`."""
        batch = self.batch
        last = torch.as_tensor(batch.host_group_ends(ratio), device=batch.device)
        seq, position = batch.seq_of_row[last], batch.positions[last]
        first = position - (ratio - 1)
        targets = first.unsqueeze(1) + torch.arange(ratio, device=batch.device)
        members = self._rows_of(targets, seq, tail_rows)
        entry = self.entry_rows(seq.unsqueeze(1), (first // ratio).unsqueeze(1), ratio)
        return GroupRows(last, members, first, entry.squeeze(1))

    def entry_rows(self, seq: Tensor, entries: Tensor, ratio: int) -> Tensor:
        """Pool rows of sequences' entries [..., M] (seq broadcasts); -1 stays -1."""
        per_block = self.cache.layout.block_entries(ratio)
        safe = entries.clamp(min=0)
        blocks = self.batch.block_tables[seq, safe // per_block].to(torch.int64)
        return (blocks * per_block + safe % per_block).masked_fill(entries < 0, -1)

    def visible(self, ratio: int) -> Tensor:
        """Entries each row may select from, [T]: the completed groups up to its position."""
        return (self.batch.positions + 1) // ratio

    def _rows_of(self, targets: Tensor, seq: Tensor, length: int) -> Tensor:
        """Rows of positions `targets` [R, D] of sequences seq [R], among kept and new rows."""
        batch, column = self.batch, seq.unsqueeze(1)
        offset = targets - batch.starts[column]
        new_rows = batch.num_seqs * length + batch.cu_q[column] + offset
        if length == 0:
            return new_rows
        return torch.where(offset >= 0, new_rows, column * length + targets % length)
