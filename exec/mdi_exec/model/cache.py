"""Attention state in device memory: paged blocks of compressed KV, one state slot per sequence.

A block covers 128 tokens of context and holds, for every KV-source layer, 128 / ratio compressed
entries and their index keys. A slot holds what does not grow: every layer's window ring, the
compressors' unfinished group, and Engram's last ids. Block 0 and slot 0 are never handed out:
padding and placeholder rows point there. Which sequence owns what is the scheduler's business.

A ring keeps position x at row x mod its length. Stale rows need no clearing: readers mask by
position. Read next: `model/step_context.py` (row numbers), `ops/row_pool.py` (storage),
`model/tails.py` (copies of slots).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mdi_exec.model.batch import BLOCK_TOKENS
from mdi_exec.model.config import ModelConfig, require
from mdi_exec.numerics import Numerics
from mdi_exec.ops.engram import BLOCKED
from mdi_exec.ops.row_pool import RowPool, entry_format, key_format, window_format


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """What one block and one slot hold, and how many bytes that takes (docs/model.md, "Where each
    state lives").

    `max_backtrack` rows are kept beyond the strict need, so that rejected drafts can be written
    over. `with_draft` adds the draft layers' window rings.

    With `num_tails` copies of slots, number 0 included, rings are two blocks long: then a slot
    still has all of its state at its last multiple of a block, wherever it is.
    `has_consumer_tails` is False under bounded replay, whose hits end before the consumer layers'
    first row.
    """

    config: ModelConfig
    numerics: Numerics = Numerics.QUANTISED
    max_backtrack: int = 0
    with_draft: bool = False
    num_tails: int = 0
    has_consumer_tails: bool = True

    def __post_init__(self) -> None:
        require(self.max_backtrack >= 0, "max_backtrack", self.max_backtrack, "must be at least 0")
        if self.num_tails:
            require(self.max_backtrack == 0, "max_backtrack", self.max_backtrack,
                    "must be 0 with prefix reuse")  # fmt: skip
            require(self.config.sliding_window <= BLOCK_TOKENS, "sliding_window",
                    self.config.sliding_window, f"must be at most {BLOCK_TOKENS} with prefix "
                    "reuse: a tail holds a block of positions")  # fmt: skip

    def with_drafts(self, count: int) -> "CacheLayout":
        """Return the layout for so many drafts a sequence: they and what is behind may go back."""
        return replace(self, max_backtrack=count + 1, with_draft=True) if count else self

    @property
    def num_window_layers(self) -> int:
        drafts = self.config.num_nextn_predict_layers if self.with_draft else 0
        return self.config.num_hidden_layers + drafts

    @property
    def window_rows(self) -> int:
        """Positions a window ring keeps."""
        if self.num_tails:
            return 2 * BLOCK_TOKENS
        return self.config.sliding_window + self.max_backtrack

    @property
    def history_rows(self) -> int:
        """Compressed token ids Engram keeps; 0 without Engram layers."""
        if not self.config.engram_layer_ids:
            return 0
        if self.num_tails:
            return 2 * BLOCK_TOKENS
        return self.config.engram_max_ngram_size - 1 + self.max_backtrack

    @property
    def ring_rows(self) -> tuple[int, ...]:
        """Positions that the rings of a slot keep: windows, unfinished pairs, Engram's ids."""
        return self.window_rows, 1 + self.max_backtrack, self.history_rows

    def ratio(self, source: int) -> int:
        return self.config.compress_ratios[source]

    def tail_rows(self, source: int) -> int:
        """Tokens of an unfinished group that a source's compressor keeps; 0 at ratio 1."""
        ratio = self.ratio(source)
        return ratio - 1 + self.max_backtrack if ratio > 1 else 0

    def block_entries(self, ratio: int) -> int:
        """Entries a block holds for a source of this ratio."""
        return BLOCK_TOKENS // ratio

    @property
    def bytes_per_block(self) -> int:
        config, numerics = self.config, self.numerics
        entry = entry_format(config.head_dim, numerics).bytes_per_row
        key = key_format(config.index_head_dim, numerics).bytes_per_row
        per_source = (self.block_entries(self.ratio(s)) for s in config.kv_source_layer_ids)
        return (entry + key) * sum(per_source)

    @property
    def bytes_per_slot(self) -> int:
        config = self.config
        row = window_format(config.head_dim, self.numerics).bytes_per_row
        rings = self.num_window_layers * self.window_rows * row
        tails = sum(self.tail_rows(s) for s in config.kv_source_layer_ids) * 2 * config.head_dim * 4
        return rings + tails + self.history_rows * 4

    @property
    def num_tail_layers(self) -> int:
        """Layers whose windows a tail holds."""
        config = self.config
        return self.num_window_layers if self.has_consumer_tails else config.n_prefill_layer

    @property
    def bytes_per_tail(self) -> int:
        """Half of the rings that a tail holds."""
        row = window_format(self.config.head_dim, self.numerics).bytes_per_row
        return (self.num_tail_layers * row + 4 * bool(self.history_rows)) * BLOCK_TOKENS


class DeviceCache:
    """The memory itself: `num_blocks` blocks and `num_slots` slots, both counting number 0.

    windows: one pool per layer, rows slot * window_rows + position mod window_rows, and `rings` the
    pool that has them all, one layer after another. entries, keys:
    one pool per KV source, rows block * entries per block + offset. tails: float32
    [num_slots * tail_rows, 2, head_dim], values and gates. engram_ids: int32
    [num_slots * history_rows].
    """

    def __init__(
        self, layout: CacheLayout, *, num_blocks: int, num_slots: int, device: torch.device | str
    ) -> None:
        require(num_blocks >= 2, "num_blocks", num_blocks, "must be at least 2 (0 is reserved)")
        require(num_slots >= 2, "num_slots", num_slots, "must be at least 2 (slot 0 is reserved)")
        config, numerics, on = layout.config, layout.numerics, torch.device(device)
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        window = window_format(config.head_dim, numerics)
        rows = num_slots * layout.window_rows
        self.rings = RowPool(window, layout.num_window_layers * rows, on)
        self.windows = [
            self.rings.part(slice(layer * rows, (layer + 1) * rows))
            for layer in range(layout.num_window_layers)
        ]
        entry = entry_format(config.head_dim, numerics)
        key = key_format(config.index_head_dim, numerics)
        self.entries: dict[int, RowPool] = {}
        self.keys: dict[int, RowPool] = {}
        self.tails: dict[int, Tensor] = {}
        for source in config.kv_source_layer_ids:
            num_entries = num_blocks * layout.block_entries(layout.ratio(source))
            self.entries[source] = RowPool(entry, num_entries, on)
            self.keys[source] = RowPool(key, num_entries, on)
            if layout.tail_rows(source):
                self.tails[source] = torch.zeros(
                    num_slots * layout.tail_rows(source), 2, config.head_dim, device=on
                )
        self.engram_ids = torch.full(
            (num_slots * layout.history_rows,), BLOCKED, dtype=torch.int32, device=on
        )

    def free(self) -> None:
        """Give up the memory; no step may use the cache any more."""
        self.windows.clear()
        self.rings = RowPool(self.rings.format, 0, self.rings.codes.device)
        for pools in (self.entries, self.keys, self.tails):
            pools.clear()
        self.engram_ids = self.engram_ids[:0].clone()
