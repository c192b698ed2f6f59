"""One step's rows as tensors: a ragged batch of prompt chunks and decode rows.

Built from plain ints, it knows positions and memory locations but nothing of layers. Row numbers
derived from it per layer kind live in `model/step_context.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_TOKENS = 128  # tokens of context a KV block covers

Ints = npt.NDArray[np.int64]


class BatchItem(NamedTuple):
    """One sequence's rows: `q` new tokens that end at context length `k`.

    `num_logits` counts the trailing rows whose logits are wanted: 1 for a prompt's last chunk, 0
    for an earlier one, q for decode rows. `prompt_len` is the full prompt (what bounded replay
    counts from); 0 means k.
    """

    q: int
    k: int
    slot: int
    block_table: Sequence[int]
    num_logits: int
    prompt_len: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """T rows of n sequences, in sequence order. Index tensors are int64 unless noted.

    token_ids int32 [T], positions [T], seq_of_row [T], starts [n] (first new position), cu_q [n+1]
    (first row), k_len [n], block_tables int32 [n, max_blocks] padded with block 0, slots [n],
    logit_rows [m], window_from [n] (first position a window may see), keep_from [n] (first
    position whose consumer-layer rows are computed; equal to 0 without bounded replay), is_image
    bool [T] or None. `host_*` are the same numbers on the host.
    """

    token_ids: Tensor
    positions: Tensor
    seq_of_row: Tensor
    starts: Tensor
    cu_q: Tensor
    k_len: Tensor
    block_tables: Tensor
    slots: Tensor
    logit_rows: Tensor
    window_from: Tensor
    is_image: Tensor | None
    host_starts: Ints
    host_k: Ints
    host_logits: Ints
    host_keep_from: Ints

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.host_k)

    @property
    def max_k(self) -> int:
        """Longest context of the batch, tokens."""
        return int(self.host_k.max())

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @classmethod
    def build(
        cls,
        items: Sequence[BatchItem],
        token_ids: Sequence[int] | Tensor,
        device: torch.device | str = "cpu",
        *,
        replay_keep_tokens: int = 0,
        is_image: Tensor | None = None,
    ) -> "Batch":
        """Lay out `items`, whose new tokens stand in `token_ids` one sequence after another.

        `replay_keep_tokens` > 0 turns bounded replay on (architecture spec, §9): consumer layers
        compute only the last that many positions of each prompt.
        """
        assert items, "a batch needs at least one sequence"
        columns = np.array([(i.q, i.k, i.slot, i.num_logits, i.prompt_len or i.k) for i in items],
                           dtype=np.int64)  # fmt: skip
        q, k, slots, logits, prompt = columns.T
        assert ((q >= 1) & (q <= k)).all(), f"each item needs 1 <= q <= k, got {items}"
        assert (logits <= q).all(), f"num_logits beyond the item's rows: {items}"
        keep_from = np.maximum(prompt - replay_keep_tokens, 0) if replay_keep_tokens else 0 * prompt
        tables = np.zeros((len(items), max(len(i.block_table) for i in items)), dtype=np.int32)
        for row, item in enumerate(items):
            assert len(item.block_table) * BLOCK_TOKENS >= item.k, f"block table too short: {item}"
            tables[row, : len(item.block_table)] = item.block_table
        ids = torch.as_tensor(token_ids, dtype=torch.int32, device=device)
        assert len(ids) == q.sum(), f"{len(ids)} token ids for {q.sum()} rows"
        return cls._lay_out(
            ids, _Columns(k - q, k, logits, keep_from, np.zeros_like(k)),
            torch.as_tensor(tables, device=device), torch.as_tensor(slots, device=device), is_image,
        )  # fmt: skip

    @classmethod
    def _lay_out(
        cls, token_ids: Tensor, columns: "_Columns", block_tables: Tensor, slots: Tensor,
        is_image: Tensor | None,
    ) -> "Batch":  # fmt: skip
        q = columns.k - columns.starts
        cu_q = np.concatenate(([0], np.cumsum(q)))
        seq = np.repeat(np.arange(len(q)), q)
        positions = np.arange(cu_q[-1]) - cu_q[seq] + columns.starts[seq]
        wanted = positions >= (columns.k - columns.logits)[seq]

        def place(values: Ints) -> Tensor:
            return torch.as_tensor(values, device=token_ids.device)

        return cls(
            token_ids=token_ids, positions=place(positions), seq_of_row=place(seq),
            starts=place(columns.starts), cu_q=place(cu_q), k_len=place(columns.k),
            block_tables=block_tables, slots=slots, logit_rows=place(np.flatnonzero(wanted)),
            window_from=place(columns.window_from), is_image=is_image, host_starts=columns.starts,
            host_k=columns.k, host_logits=columns.logits, host_keep_from=columns.keep_from,
        )  # fmt: skip

    def consumer_rows(self) -> tuple["Batch", Tensor]:
        """Cut to the rows bounded replay keeps: the smaller batch, and its rows' numbers here.

        Windows of the smaller batch do not reach behind the cut. A sequence with no row left stays
        with q = 0, and writes nothing.
        """
        starts = np.minimum(np.maximum(self.host_starts, self.host_keep_from), self.host_k)
        q = self.host_k - self.host_starts
        first = np.cumsum(q) - q
        kept_q = self.host_k - starts
        shift = first + starts - self.host_starts - (np.cumsum(kept_q) - kept_q)
        kept = np.arange(kept_q.sum()) + np.repeat(shift, kept_q)
        rows = torch.as_tensor(kept, device=self.device)
        columns = _Columns(starts, self.host_k, np.minimum(self.host_logits, kept_q),
                           self.host_keep_from, self.host_keep_from)  # fmt: skip
        is_image = None if self.is_image is None else self.is_image[rows]
        cut = Batch._lay_out(self.token_ids[rows], columns, self.block_tables, self.slots, is_image)
        return cut, rows

    def host_group_ends(self, ratio: int) -> Ints:
        """Row numbers at which a group of `ratio` tokens, anchored at position 0, is complete."""
        q = self.host_k - self.host_starts
        first = np.cumsum(q) - q
        positions = np.arange(q.sum()) + np.repeat(self.host_starts - first, q)
        ends: Ints = np.flatnonzero(positions % ratio == ratio - 1)
        return ends

    def host_tail_rows(self, length: int) -> Ints:
        """Row numbers of each sequence's last `length` new tokens (or all of its new ones)."""
        q = self.host_k - self.host_starts
        taken = np.minimum(q, length)
        ends = np.cumsum(q)
        rows: Ints = np.arange(taken.sum()) + np.repeat(ends - np.cumsum(taken), taken)
        return rows


class _Columns(NamedTuple):
    """Per-sequence numbers a layout is made of."""

    starts: Ints
    k: Ints
    logits: Ints
    keep_from: Ints
    window_from: Ints
