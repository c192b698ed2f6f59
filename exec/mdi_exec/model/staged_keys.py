"""Keys decoded once for all rows and layers of a step that use them.

Layers that share a KV source share its entries, and a step of many rows reads each entry many
times: decoding them for every query anew costs more than attention itself. What is staged are the
batch's entries, sequence after sequence, and behind them a layer's window keys. Results do not
depend on it (`ops/sparse_attention.py`), so it is free to depend on the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.ops.row_pool import RowPool
from mdi_exec.ops.sparse_attention import KEY_BLOCK, NO_COLUMN, can_stage

MIN_ROWS = 256  # of a step: fewer do not fill a GPU, and wait for the copies
MAX_ENTRIES = 2**20  # a GiB at width 512


def staged_entries(num_seqs: int, table_width: int, per_block: int) -> int:
    """Rows that the entries of so many sequences take: each as many as the longest may have."""
    return num_seqs * table_width * per_block


def is_worth_it(num_rows: int, num_seqs: int, entries: int, selected: int) -> bool:
    """Say whether to stage `entries`, of which each of a step's rows selects some."""
    if num_rows < MIN_ROWS or num_rows == num_seqs:
        return False
    return entries <= min(MAX_ENTRIES, num_rows * selected)


class Staged(NamedTuple):
    """A KV source's decoded entries [entries + window rows, d]; the window's are a layer's own."""

    source: int | None
    keys: Tensor
    entries: int


class StagedKeys:
    """The staged keys of one step; holds one KV source's at a time."""

    def __init__(self, batch: Batch, cache: DeviceCache, window_rows: Tensor) -> None:
        self.batch = batch
        self.cache = cache
        self.window_rows = window_rows
        self._staged: Staged | None = None
        self._lists: tuple[Tensor | None, Tensor] | None = None

    def entries(self, ratio: int) -> int | None:
        """Return how many entries of this ratio are staged, 0 at ratio 0; None = keys are not."""
        config, batch = self.cache.layout.config, self.batch
        per_block = self.cache.layout.block_entries(ratio) if ratio else 0
        count = staged_entries(batch.num_seqs, batch.block_tables.shape[1], per_block)
        if not is_worth_it(batch.num_rows, batch.num_seqs, count, config.index_topk):
            return None
        return count if can_stage(self._like()) else None

    def keys(self, source: int | None, entries: int, window: RowPool) -> Tensor:
        """Return decoded keys: `source`'s entries, decoded when it is new here, then the window."""
        rows = window.codes.shape[0]
        if self._staged is None or self._staged.source != source:
            self._staged = None  # before the next one takes its memory
            keys = torch.empty(
                entries + rows, window.format.width, dtype=self.cache.layout.numerics.dtype,
                device=self.batch.device,
            )  # fmt: skip
            if source is not None:
                self.cache.entries[source].gather(self._pool_rows(source), keys[:entries])
            self._staged = Staged(source, keys, entries)
        numbers = torch.arange(rows, device=self.batch.device)
        window.gather(numbers, self._staged.keys[entries:])
        return self._staged.keys

    def key_rows(self, selected: Tensor | None, entries: int) -> Tensor:
        """Return each row's keys, int32 [T, n]: its window's, then the selected entries."""
        if selected is None:
            return self.window_rows
        if self._lists is None or self._lists[0] is not selected:
            window = torch.where(self.window_rows < 0, self.window_rows, self.window_rows + entries)
            padding = window.new_full((window.shape[0], -window.shape[1] % KEY_BLOCK), NO_COLUMN)
            self._lists = selected, torch.cat((window, padding, selected), dim=1)
        return self._lists[1]

    def _pool_rows(self, source: int) -> Tensor:
        layout = self.cache.layout
        per_block = layout.block_entries(layout.ratio(source))
        offsets = torch.arange(per_block, device=self.batch.device)
        blocks = self.batch.block_tables.flatten().to(torch.int64)
        return (blocks.unsqueeze(1) * per_block + offsets).flatten()

    def _like(self) -> Tensor:
        """A tensor like the queries."""
        return torch.empty(0, dtype=self.cache.layout.numerics.dtype, device=self.batch.device)
