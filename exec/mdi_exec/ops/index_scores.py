"""How much each compressed entry matters to a query: the indexer's scores.

`I_j = sum over heads of relu(q_h . k_j) * w_h`. On bfloat16 inputs the reference rounds at each
step, as the released one does; kernels round dot products and the result, and sum over heads in
float32. Float32 inputs round nowhere (docs/model.md, 4).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.row_pool import RowPool

# By how much of both vectors' lengths a dot product may be off before it is rounded: FP8 tensor
# cores keep 13 bits below the leading one of a sum. Vectors whose groups have much the same scales
# give exact ones.
DOT_ERROR = 2.0**-12
# Sums kept in float32 select a few other entries than rounded ones do.
TOPK_MIN_OVERLAP = 0.97
TOPK_MEAN_OVERLAP = 0.998


class PagedRows(NamedTuple):
    """Query rows of a step, and where the entries of their sequences stand.

    Entry e of sequence s is pool row block_tables[s, e // per_block] * per_block + e % per_block.
    block_tables int32 [n, W]. Per row, int32 [T]: its sequence `seq` (rows of one sequence are
    neighbours), `place`, its number among its sequence's rows here, and how many entries it may
    see. `one_per_seq`: every sequence has one row at most.
    """

    block_tables: Tensor
    per_block: int
    seq: Tensor
    place: Tensor
    visible: Tensor
    one_per_seq: bool

    def part(self, rows: slice) -> "PagedRows":
        """Return some of the rows; places need not start at 0 in a part."""
        return self._replace(seq=self.seq[rows], place=self.place[rows], visible=self.visible[rows])

    def entry_rows(self, entries: Tensor) -> Tensor:
        """Pool rows, int64 like entries [T, M]; -1 stays -1."""
        safe = entries.clamp(min=0)
        seq = self.seq.to(torch.int64).unsqueeze(1)
        blocks = self.block_tables[seq, safe // self.per_block].to(torch.int64)
        return (blocks * self.per_block + safe % self.per_block).masked_fill(entries < 0, -1)

    def staged_rows(self, entries: Tensor) -> Tensor:
        """Rows, int64 like entries [T, M], where every sequence has its whole table's entries, one
        sequence after another; -1 stays -1."""
        per_seq = self.block_tables.shape[1] * self.per_block
        start = self.seq.to(torch.int64).unsqueeze(1) * per_seq
        return (entries + start).masked_fill(entries < 0, -1)


class Listed(NamedTuple):
    """Scored columns that are entries of listed blocks: ids int32 [T, C], ascending, -1 last.

    limit int32 [T]: valid columns of each row (`step_rows.listed_columns`).
    """

    ids: Tensor
    size: int
    limit: Tensor

    def entries(self, columns: Tensor) -> Tensor:
        """The entries, int64, that stand at `columns` [T, M] of each row; -1 stays -1."""
        safe = columns.clamp(min=0).to(torch.int64)
        found = self.ids.gather(1, safe // self.size).to(torch.int64) * self.size
        return (found + safe % self.size).masked_fill(columns < 0, -1)


def score_entries_ref(
    q: Tensor, head_weights: Tensor, keys: RowPool, pages: PagedRows, columns: int,
    listed: Listed | None,
) -> Tensor:  # fmt: skip
    numbers = torch.arange(columns, device=q.device).expand(q.shape[0], -1)
    limit = pages.visible if listed is None else listed.limit
    is_valid = numbers < limit.unsqueeze(1)
    entries = numbers if listed is None else listed.entries(numbers)
    gathered = keys.gather(pages.entry_rows(entries.masked_fill(~is_valid, -1)))
    dots = torch.bmm(q.to(torch.float32), gathered.to(torch.float32).transpose(1, 2)).to(q.dtype)
    return (torch.relu(dots) * head_weights.unsqueeze(-1)).sum(dim=1)


def score_entries(
    q: Tensor, head_weights: Tensor, keys: RowPool, pages: PagedRows, columns: int,
    listed: Listed | None = None,
) -> Tensor:  # fmt: skip
    """Score each row's entries: [T, columns], dtype of q.

    q [T, H, d] and head_weights [T, H] in the activation dtype. Column j of a row is its entry j,
    or with `listed` entry j of its listed blocks. Columns from the row's number of visible ones on
    mean nothing and may hold anything.
    """
    run = select(q, ref=score_entries_ref, kernel="index_scores.score_entries")
    return run(q, head_weights, keys, pages, columns, listed)


def selected_rows_ref(
    columns: Tensor, pages: PagedRows, listed: Listed | None, staged: bool
) -> Tensor:
    entries = columns.to(torch.int64) if listed is None else listed.entries(columns)
    rows = pages.staged_rows(entries) if staged else pages.entry_rows(entries)
    return rows.to(torch.int32)


def selected_rows(
    columns: Tensor, pages: PagedRows, listed: Listed | None, *, staged: bool
) -> Tensor:
    """Turn chosen columns int32 [T, M] into rows of their entries: of the pool, or if `staged` of
    decoded keys (`model.staged_keys`). int32 [T, M]; -1 stays -1."""
    run = select(columns, ref=selected_rows_ref, kernel="selected_rows.selected_rows",
                 dtypes=(torch.int32,))  # fmt: skip
    return run(columns, pages, listed, staged)
