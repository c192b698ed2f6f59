"""Chosen columns to rows of the entries that stand there; a thread a column."""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.index_scores import Listed, PagedRows
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import FLAT_THREADS


def selected_rows_program(top_k, per_block, list_size, staged):
    """columns [rows, top_k] to rows out; blocks [rows, listed] are read if `list_size` > 0."""
    rows, seqs, width = T.dynamic("rows"), T.dynamic("seqs"), T.dynamic("width")
    listed = T.dynamic("listed")

    @T.prim_func
    def selected_rows_kernel(
        columns: T.Tensor((rows, top_k), "int32"),
        seq_of_row: T.Tensor((rows,), "int32"),
        block_tables: T.Tensor((seqs, width), "int32"),
        blocks: T.Tensor((rows, listed), "int32"),
        out: T.Tensor((rows, top_k), "int32"),
    ):
        with T.Kernel(T.ceildiv(rows * top_k, FLAT_THREADS), threads=FLAT_THREADS) as block:
            at = block * FLAT_THREADS + T.get_thread_binding()
            row, column = at // top_k, at % top_k
            entry, seq = T.alloc_var("int32"), T.alloc_var("int32")
            if row < rows:
                entry = columns[row, column]
                seq = seq_of_row[row]
                if entry >= 0:
                    if list_size > 0:
                        entry = blocks[row, entry // list_size] * list_size + entry % list_size
                    if staged:
                        entry = seq * width * per_block + entry
                    else:
                        entry = (
                            block_tables[seq, entry // per_block] * per_block + entry % per_block
                        )
                out[row, column] = entry

    return selected_rows_kernel


def selected_rows(columns: Tensor, pages: PagedRows, listed: Listed | None, staged: bool) -> Tensor:
    """Launch `selected_rows_program`; see `ops.index_scores.selected_rows`."""
    out = torch.empty_like(columns)
    if columns.numel():
        ids = columns if listed is None else listed.ids
        size = 0 if listed is None else listed.size
        run = compiled(selected_rows_program, columns.shape[1], pages.per_block, size, staged)
        run(columns, pages.seq, pages.block_tables, ids, out)
    return out


SAMPLES = (
    Sample(selected_rows_program, (512, 64, 0, False)),
    Sample(selected_rows_program, (512, 128, 8, False)),
    Sample(selected_rows_program, (512, 128, 8, True)),
)
