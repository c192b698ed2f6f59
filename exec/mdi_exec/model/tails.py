"""Tails on the device: copies of what a slot held at a cut, so that others can go on there.

A cut is a multiple of a block. The state there is the last 128 positions of every layer's window
ring and of Engram's ids; a compressor has no unfinished group at an even position. Rings of a cache
with tails are two blocks long, so those positions are one half of each.

Read next: `cache.py` (the slots), `mdi_shared/prefix/tails.py` (which tails are kept).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mdi_exec.model.batch import BLOCK_TOKENS
from mdi_exec.model.cache import DeviceCache
from mdi_shared.plan import TailCopy


class Tails:
    """The tails of one cache: `layout.num_tails`, number 0 included; none without prefix reuse."""

    def __init__(self, cache: DeviceCache) -> None:
        layout = cache.layout
        self._pairs: list[tuple[Tensor, Tensor]] = []  # rings [L, slots, 2, bytes], tails [L, n, …]
        if not layout.num_tails:
            return
        layers, slots = layout.num_window_layers, cache.num_slots
        stored = [(part.view(layers, slots, 2, -1), layout.num_tail_layers)
                  for part in (cache.rings.codes, cache.rings.scales) if part.shape[1]]  # fmt: skip
        if layout.history_rows:
            stored.append((cache.engram_ids.view(1, slots, 2, BLOCK_TOKENS), 1))
        for rings, kept in stored:
            tails = rings.new_zeros(kept, layout.num_tails, rings.shape[-1])
            self._pairs.append((rings[:kept], tails))

    @property
    def num_bytes(self) -> int:
        return sum(tails.numel() * tails.element_size() for _, tails in self._pairs)

    @torch.inference_mode()
    def copy(self, copies: Iterable[TailCopy]) -> None:
        """Make the copies of a plan, in order; on a GPU they are queued like a step's kernels."""
        for tail, slot, cut, to_slot in copies:
            half = (cut // BLOCK_TOKENS - 1) % 2
            for rings, tails in self._pairs:
                if to_slot:
                    rings[:, slot, half] = tails[:, tail]
                else:
                    tails[:, tail] = rings[:, slot, half]

    def free(self) -> None:
        """Give up the memory."""
        self._pairs.clear()
