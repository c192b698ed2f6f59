"""Index scores of paged FP4 keys, fused with the ReLU and the weighted sum over heads.

Keys fill the 64-row side of the tensor core, straight from global memory through registers; a tile
of queries with all their heads stays in shared memory as the other side. The sum over heads is then
a sum along a result row, most of it inside one thread. Scores are float32 inside and leave as
bfloat16. Every score depends on its query and its key alone.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.index_scores import Listed, PagedRows
from mdi_exec.ops.kernels.index_source import INDEX_SOURCE
from mdi_exec.ops.kernels.jit import Sample, by_hand, compiled, has_known_registers
from mdi_exec.ops.row_pool import RowPool

KEYS = 64  # of one warpgroup
WARPGROUPS = 4
QUERIES = 4  # of one sequence that share a block
WANTED_BLOCKS = 1024  # several for each multiprocessor; keys are split over blocks to get them


@dataclass(frozen=True, slots=True)
class Pages:
    """Where a tile's keys stand: blocks of sequence `seq`, of those the ones listed for `row`.

    Columns of the tile from `limit` on have no key.
    """

    block_tables: Any
    seq: Any
    per_block: int
    blocks: Any
    row: Any
    list_block: int
    limit: Any


@by_hand("bounds")
def index_scores_program(heads, width, queries, per_block, list_block, warpgroups, in_registers):
    """scores [rows, columns]: of each row, its first `visible` columns.

    `list_block` > 0: the columns of a row are the entries of its listed blocks of that many.
    """
    rows, pool_rows, tiles = T.dynamic("rows"), T.dynamic("pool_rows"), T.dynamic("tiles")
    seqs, table_width, columns = T.dynamic("seqs"), T.dynamic("table_width"), T.dynamic("columns")
    listed = T.dynamic("listed")
    words, keys_per_step = width // 32, KEYS * warpgroups

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, width), "bfloat16"),
        head_weights: T.Tensor((rows, heads), "bfloat16"),
        codes: T.Tensor((pool_rows, width // 2), "uint8"),
        scales: T.Tensor((pool_rows, words), "uint8"),
        tile_start: T.Tensor((tiles,), "int32"),
        tile_end: T.Tensor((tiles,), "int32"),
        seq_of_row: T.Tensor((rows,), "int32"),
        visible: T.Tensor((rows,), "int32"),
        block_tables: T.Tensor((seqs, table_width), "int32"),
        blocks: T.Tensor((rows, listed), "int32"),
        scores: T.Tensor((rows, columns), "bfloat16"),
        splits: T.int32,
    ):
        with T.Kernel(tiles, splits, threads=128 * warpgroups) as (tile, split):
            queries_shared = T.alloc_shared((queries * heads, width), "bfloat16")
            keys = T.alloc_fragment((keys_per_step, width), "bfloat16")
            dots = T.alloc_fragment((keys_per_step, queries * heads), "float32")
            by_query = T.reshape(dots, (keys_per_step, queries, heads))
            weights = T.alloc_fragment((queries, heads), "float32")
            sums = T.alloc_fragment((keys_per_step, queries), "float32")
            raw = T.alloc_local((2 * (words + 1),), "int32")
            found = T.alloc_local((1,), "int32")
            if in_registers:
                T.import_source(INDEX_SOURCE)
            tx = T.get_thread_binding()
            start = T.alloc_var("int32", init=tile_start[tile])
            end = T.alloc_var("int32", init=tile_end[tile])
            limit = T.alloc_var("int32", init=0)
            seq = T.alloc_var("int32", init=0)
            pages = Pages(block_tables, seq, per_block, blocks, start, list_block, limit)
            if start < end:
                limit = visible[end - 1]
                seq = seq_of_row[start]
                _load_queries(q, head_weights, start, queries_shared, weights)
                if in_registers:
                    _load_keys(codes, scales, pages, split * keys_per_step, tx, found, raw)
                for step in T.serial(T.ceildiv(T.ceildiv(limit, keys_per_step) - split, splits)):
                    base = (step * splits + split) * keys_per_step
                    if in_registers:
                        decode = f"mdi::decode_quarters<{width}>"
                        T.call_extern("handle", decode, T.address_of(raw[0]), keys.data)
                        _load_keys(
                            codes, scales, pages, base + splits * keys_per_step, tx, found, raw
                        )
                    else:
                        _decode_keys(codes, scales, pages, base, keys)
                    T.gemm(
                        keys, queries_shared, dots, transpose_B=True, clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )  # fmt: skip
                    for i, n, h in T.Parallel(keys_per_step, queries, heads):
                        by_query[i, n, h] = T.max(by_query[i, n, h], 0) * weights[n, h]
                    T.reduce_sum(by_query, sums, dim=2)
                    for i, n in T.Parallel(keys_per_step, queries):
                        if start + n < end and base + i < limit:
                            scores[start + n, base + i] = T.cast(sums[i, n], "bfloat16")

    return kernel


@T.macro
def _load_queries(q, head_weights, start, queries_shared, weights):
    """Load a tile's queries, in the keys' column order, and their head weights."""
    rows, heads, width = q.shape
    for i, j in T.Parallel(queries_shared.shape[0], width):
        queries_shared[i, j] = q[
            T.min(start + i // heads, rows - 1), i % heads, _key_column(width, j)
        ]
    for i, h in T.Parallel(weights.shape[0], heads):
        weights[i, h] = T.cast(head_weights[T.min(start + i, rows - 1), h], "float32")


@T.macro
def _load_keys(codes, scales, pages, base, tx, found, raw):
    """Load this thread's quarters of its two keys of the block that begins at column `base`."""
    width, words = codes.shape[1] * 2, scales.shape[1]
    for half in T.unroll(2):
        _find(pages, pages.seq, pages.row, base + tx // 32 * 16 + tx % 32 // 4 + half * 8,
              pages.limit, found)  # fmt: skip
        T.call_extern(
            "handle", f"mdi::load_quarter<{width}>", T.address_of(codes[found[0], 0]),
            T.address_of(scales[found[0], 0]), tx % 4, T.address_of(raw[half * (words + 1)]),
        )  # fmt: skip


@T.macro
def _find(pages, seq, row, column, limit, found):
    """Pool row of a column's entry; columns beyond the limit repeat the last one."""
    size, per_block = pages.list_block, pages.per_block
    safe = T.alloc_var("int32", init=T.max(T.min(column, limit - 1), 0))
    if size > 0:
        safe = pages.blocks[row, safe // size] * size + safe % size
    found[0] = pages.block_tables[seq, safe // per_block] * per_block + safe % per_block


@T.macro
def _decode_keys(codes, scales, pages, base, keys):
    """Load and decode a block of keys, for targets whose register order is not known here."""
    size, per_block = pages.list_block, pages.per_block
    for i, j in T.Parallel(*keys.shape):
        safe = T.max(T.min(base + i, pages.limit - 1), 0)
        entry = pages.blocks[pages.row, safe // size] * size + safe % size if size else safe
        row = pages.block_tables[pages.seq, entry // per_block] * per_block
        keys[i, j] = _decoded(codes, scales, row + entry % per_block, keys.shape[1], j)


def _key_column(width, j):
    """The key's own column that stands at operand column j (see `index_source.py`)."""
    step = j // 8  # of eight columns: four threads with a pair each
    return width // 4 * (j % 8 // 2) + step // 4 * 8 + step % 4 + j % 2 * 4


def _decoded(codes, scales, row, width, j):
    """One value of a key, for targets whose register order is not known here."""
    column = _key_column(width, j)
    code = T.cast(T.shift_right(codes[row, column // 2], T.cast(column % 2 * 4, "uint8")), "int32")
    bits = T.shift_left(T.bitwise_and(code, 8), 28) | T.shift_left(T.bitwise_and(code, 7), 22)
    scale = T.shift_left(T.cast(scales[row, column // 32], "int32"), 23)
    lift = T.reinterpret(T.int32(253 << 23), "float32")
    value = T.reinterpret(bits, "float32") * lift * T.reinterpret(scale, "float32")
    return T.cast(value, "bfloat16")


def _tiles(pages: PagedRows, queries: int) -> tuple[Tensor, Tensor]:
    """Cut rows into tiles of one sequence's `queries` rows at most: start and end of each.

    There are as many tiles as may be needed; those that are not have start beyond end.
    """
    num_rows, device = pages.seq.shape[0], pages.seq.device
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    if queries == 1:
        return rows, rows + 1
    is_first = pages.place % queries == 0
    tile = is_first.cumsum(0) - is_first[0].to(torch.int64)  # a part may begin inside a tile
    most = num_rows // queries + 2 + 2 * pages.block_tables.shape[0]
    start = rows.new_full((most,), num_rows).scatter_reduce(0, tile, rows, "amin")
    return start, rows.new_zeros(most).scatter_reduce(0, tile, rows + 1, "amax")


def score_entries(
    q: Tensor, head_weights: Tensor, keys: RowPool, pages: PagedRows, columns: int,
    listed: Listed | None,
) -> Tensor:  # fmt: skip
    num_rows, heads, width = q.shape
    scores = torch.empty(num_rows, columns, dtype=q.dtype, device=q.device)
    if not num_rows:
        return scores
    queries = 1 if pages.one_per_seq or listed is not None else QUERIES
    start, end = _tiles(pages, queries)
    ids = pages.block_tables.new_empty(num_rows, 1) if listed is None else listed.ids
    limit = pages.visible if listed is None else listed.limit
    splits = min(-(-WANTED_BLOCKS // start.shape[0]), -(-columns // (KEYS * WARPGROUPS)))
    run = compiled(
        index_scores_program, heads, width, queries, pages.per_block,
        0 if listed is None else listed.size, WARPGROUPS, has_known_registers(),
    )  # fmt: skip
    run(q, head_weights, keys.codes, keys.scales, start, end, pages.seq,
        limit, pages.block_tables, ids, scores, splits)  # fmt: skip
    return scores


SAMPLES = (
    Sample(index_scores_program, (32, 128, 4, 64, 0, 4, True)),
    Sample(index_scores_program, (32, 128, 1, 128, 8, 4, True)),
    Sample(index_scores_program, (32, 128, 4, 128, 0, 4, False)),
    Sample(index_scores_program, (32, 128, 1, 128, 8, 4, False)),
    Sample(index_scores_program, (16, 32, 4, 64, 0, 4, True)),
    Sample(index_scores_program, (16, 32, 1, 128, 8, 4, True)),
)
