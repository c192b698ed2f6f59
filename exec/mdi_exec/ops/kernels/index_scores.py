"""Index scores of paged FP4 keys, fused with the ReLU and the weighted sum over heads.

Keys fill the 64-row side of the tensor core; a tile of queries with all their heads stays in shared
memory as the other side. The sum over heads is then a sum along a result row. Every score depends
on its query and its key alone. On sm_90a products are FP8's (`index_source.py`), elsewhere
bfloat16's.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.index_scores import Listed, PagedRows
from mdi_exec.ops.kernels.index_source import INDEX_SOURCE
from mdi_exec.ops.kernels.jit import Sample, by_hand, compiled, has_known_registers
from mdi_exec.ops.row_pool import RowPool

KEYS = 64  # of one warpgroup
WARPGROUPS = 2
BLOCKS_OF_SM = 2  # of two warpgroups: one block's queries are loaded while another multiplies
PORTABLE_WARPGROUPS = 4
QUERIES = 16  # of one sequence that share a block
PORTABLE_QUERIES = 4
WANTED_BLOCKS = 1024  # several for each multiprocessor; keys are split over blocks to get them
LINE = 128  # bytes of a query's head in shared memory
MAGNITUDES = 16  # scales at which there is a table of E2M1's


def _parameters(heads: int, width: int) -> tuple[Any, ...]:
    """Return types of a program's tensors, in order; one object must not stand for two."""
    rows, pool_rows, tiles = T.dynamic("rows"), T.dynamic("pool_rows"), T.dynamic("tiles")
    seqs, table_width = T.dynamic("seqs"), T.dynamic("table_width")
    return (
        T.Tensor((rows, heads, width), "bfloat16"),
        T.Tensor((rows, heads), "bfloat16"),
        T.Tensor((pool_rows, width // 2), "uint8"),
        T.Tensor((pool_rows, width // 32), "uint8"),
        T.Tensor((tiles,), "int32"),
        T.Tensor((tiles,), "int32"),
        T.Tensor((rows,), "int32"),
        T.Tensor((rows,), "int32"),
        T.Tensor((seqs, table_width), "int32"),
        T.Tensor((rows, T.dynamic("listed")), "int32"),
        T.Tensor((rows, T.dynamic("columns")), "bfloat16"),
    )


@by_hand("bounds", "barriers")
def index_scores_program(heads, width, queries, per_block, list_block):
    """scores [rows, columns]: of each row, its first `visible` columns; sm_90a.

    `list_block` > 0: the columns of a row are the entries of its listed blocks of that many.
    """
    shapes = _parameters(heads, width)
    sizes = (heads, width, queries, per_block, list_block, WARPGROUPS)

    @T.prim_func
    def kernel(
        q: shapes[0],
        head_weights: shapes[1],
        codes: shapes[2],
        scales: shapes[3],
        tile_start: shapes[4],
        tile_end: shapes[5],
        seq_of_row: shapes[6],
        visible: shapes[7],
        block_tables: shapes[8],
        blocks: shapes[9],
        scores: shapes[10],
        splits: T.int32,
    ):
        with T.Kernel(tile_start.shape[0], splits, threads=128 * WARPGROUPS) as (tile, split):
            T.annotate_min_blocks_per_sm(BLOCKS_OF_SM)
            T.import_source(INDEX_SOURCE)
            lines = T.alloc_shared((queries * heads * LINE,), "uint8")
            weights = T.alloc_shared((-(-queries // 4), 32, heads // 4), "bfloat16")
            magnitudes = T.alloc_shared((MAGNITUDES, 2), "uint32")
            start = T.alloc_var("int32", init=tile_start[tile])
            end = T.alloc_var("int32", init=tile_end[tile])
            if start < end:
                T.call_extern(
                    "handle", f"mdi::score_tile<{', '.join(map(str, sizes))}>",
                    T.address_of(q[start, 0, 0]), T.address_of(head_weights[start, 0]),
                    T.address_of(codes[0, 0]), T.address_of(scales[0, 0]),
                    T.address_of(block_tables[seq_of_row[start], 0]),
                    T.address_of(blocks[start, 0]), T.address_of(scores[start, 0]),
                    scores.shape[1], end - start, visible[end - 1], split, splits,
                    T.address_of(lines[0]), T.address_of(weights[0, 0, 0]),
                    T.address_of(magnitudes[0, 0]),
                )  # fmt: skip

    return kernel


@by_hand("bounds")
def portable_scores_program(heads, width, queries, per_block, list_block):
    """The same with bfloat16 products, for targets whose register order is not known here."""
    shapes = _parameters(heads, width)
    keys_per_step = KEYS * PORTABLE_WARPGROUPS

    @T.prim_func
    def kernel(
        q: shapes[0],
        head_weights: shapes[1],
        codes: shapes[2],
        scales: shapes[3],
        tile_start: shapes[4],
        tile_end: shapes[5],
        seq_of_row: shapes[6],
        visible: shapes[7],
        block_tables: shapes[8],
        blocks: shapes[9],
        scores: shapes[10],
        splits: T.int32,
    ):
        with T.Kernel(tile_start.shape[0], splits, threads=128 * PORTABLE_WARPGROUPS) as (
            tile,
            split,
        ):
            queries_shared = T.alloc_shared((queries * heads, width), "bfloat16")
            keys = T.alloc_fragment((keys_per_step, width), "bfloat16")
            dots = T.alloc_fragment((keys_per_step, queries * heads), "float32")
            by_query = T.reshape(dots, (keys_per_step, queries, heads))
            weights = T.alloc_fragment((queries, heads), "float32")
            sums = T.alloc_fragment((keys_per_step, queries), "float32")
            start = T.alloc_var("int32", init=tile_start[tile])
            end = T.alloc_var("int32", init=tile_end[tile])
            limit = T.alloc_var("int32", init=0)
            if start < end:
                limit = visible[end - 1]
                _load_queries(q, head_weights, start, end, queries_shared, weights)
                for step in T.serial(T.ceildiv(T.ceildiv(limit, keys_per_step) - split, splits)):
                    base = (step * splits + split) * keys_per_step
                    for i, j in T.Parallel(keys_per_step, width):
                        column = T.max(T.min(base + i, limit - 1), 0)
                        entry = (
                            blocks[start, column // list_block] * list_block + column % list_block
                            if list_block
                            else column
                        )
                        row = block_tables[seq_of_row[start], entry // per_block] * per_block
                        keys[i, j] = _decoded(codes, scales, row + entry % per_block, j)
                    T.gemm(
                        keys, queries_shared, dots, transpose_B=True, clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )  # fmt: skip
                    for i, n, h in T.Parallel(keys_per_step, queries, heads):
                        dot = T.cast(T.max(by_query[i, n, h], 0), "bfloat16")
                        by_query[i, n, h] = T.cast(dot, "float32") * weights[n, h]
                    T.reduce_sum(by_query, sums, dim=2)
                    for i, n in T.Parallel(keys_per_step, queries):
                        if start + n < end and base + i < limit:
                            scores[start + n, base + i] = T.cast(sums[i, n], "bfloat16")

    return kernel


@T.macro
def _load_queries(q, head_weights, start, end, queries_shared, weights):
    """Load a tile's queries and their head weights."""
    heads = q.shape[1]
    for i, j in T.Parallel(*queries_shared.shape):
        queries_shared[i, j] = q[T.min(start + i // heads, end - 1), i % heads, j]
    for i, h in T.Parallel(*weights.shape):
        weights[i, h] = T.cast(head_weights[T.min(start + i, end - 1), h], "float32")


def _decoded(codes, scales, row, column):
    """One value of a key."""
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
    scores = q.new_empty(num_rows, columns + columns % 2)  # a thread writes two at once
    if not num_rows:
        return scores[:, :columns]
    ids = pages.block_tables.new_empty(num_rows, 1) if listed is None else listed.ids
    limit = pages.visible if listed is None else listed.limit
    is_known = has_known_registers()
    queries = QUERIES if is_known else PORTABLE_QUERIES
    if pages.one_per_seq or listed is not None:
        queries = 1
    start, end = _tiles(pages, queries)
    step = KEYS * (WARPGROUPS if is_known else PORTABLE_WARPGROUPS)
    splits = min(-(-WANTED_BLOCKS // start.shape[0]), -(-columns // step))
    program = index_scores_program if is_known else portable_scores_program
    list_block = 0 if listed is None else listed.size
    run = compiled(program, heads, width, queries, pages.per_block, list_block)
    run(q, head_weights, keys.codes, keys.scales, start, end, pages.seq,
        limit, pages.block_tables, ids, scores, splits)  # fmt: skip
    return scores[:, :columns]


SAMPLES = tuple(
    Sample(program, (*shape, *tile), architectures)
    for program, queries, architectures in (
        (index_scores_program, QUERIES, ("sm_90a",)),
        (portable_scores_program, PORTABLE_QUERIES, ("sm_90a", "sm_100a")),
    )
    for shape in ((32, 128), (16, 32))
    for tile in ((queries, 64, 0), (1, 128, 8))
)
