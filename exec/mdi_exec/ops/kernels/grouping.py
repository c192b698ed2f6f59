"""Sorting rows by expert, and cutting them into tiles; small, and bound by latency.

Rows are counted in integers, so the order of atomic additions does not show. Read next:
`ops/routing.py`, `routing.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import WARP
from mdi_exec.ops.routing import NO_EXPERT, RowGroups, max_tiles

GROUP_WARPS = 8
GROUP_THREADS = GROUP_WARPS * WARP
LOADS = 8  # loads of one lane in flight while rows are grouped
STEP = WARP * LOADS  # rows a warp takes at a time
FEW_TOKENS = 64
VECTOR = 8  # bfloat16 values of a 16-byte access


@T.macro
def _read_ids(experts, first, ids):
    """Read LOADS rows' experts from `first` on, a warp's lanes side by side; none is NO_EXPERT."""
    for i in T.unroll(LOADS):
        ids[i] = NO_EXPERT
        if first + i * WARP < experts.shape[0]:
            ids[i] = experts[first + i * WARP]


@T.macro
def _count_rows(experts, first, steps, expert, histogram, own):
    """Add this thread's rows to the histogram; own[0] counts the expert's among them."""
    ids = T.alloc_local((LOADS,), "int32")
    own[0] = 0
    for s in T.serial(steps):
        _read_ids(experts, first + s * STEP, ids)
        for i in T.unroll(LOADS):
            if ids[i] >= 0:
                T.atomic_add(histogram[ids[i]], 1)
            own[0] = own[0] + T.if_then_else(ids[i] == expert, 1, 0)


@T.macro
def _count_before(histogram, expert, tile: int, own, shared, rows, tiles):
    """Set rows[0] and tiles[0] to those of lower experts, and own[0] to the lower warps' rows."""
    thread = T.get_thread_binding()
    rows[0] = 0
    tiles[0] = 0
    for i in T.serial(T.ceildiv(histogram.shape[0], GROUP_THREADS)):
        if i * GROUP_THREADS + thread < expert:
            rows[0] = rows[0] + histogram[i * GROUP_THREADS + thread]
            tiles[0] = tiles[0] + (histogram[i * GROUP_THREADS + thread] + (tile - 1)) // tile
    own[0] = T.warp_reduce_sum(own[0])
    rows[0] = T.warp_reduce_sum(rows[0])
    tiles[0] = T.warp_reduce_sum(tiles[0])
    if thread % WARP == 0:
        shared[0, thread // WARP] = own[0]
        shared[1, thread // WARP] = rows[0]
        shared[2, thread // WARP] = tiles[0]
    T.sync_threads()
    own[0] = 0
    rows[0] = 0
    tiles[0] = 0
    for w in T.unroll(GROUP_WARPS):
        own[0] = own[0] + T.if_then_else(w < thread // WARP, shared[0, w], 0)
        rows[0] = rows[0] + shared[1, w]
        tiles[0] = tiles[0] + shared[2, w]


@T.macro
def _place_rows(experts, first, steps, expert, at, order, position):
    """Write the expert's rows from sorted row at[0] on, as this warp comes across them."""
    lane = T.get_thread_binding() % WARP
    ids = T.alloc_local((LOADS,), "int32")
    mine, rank = T.alloc_var("uint32"), T.alloc_var("int32")
    for s in T.serial(steps):
        _read_ids(experts, first + s * STEP, ids)
        for i in T.unroll(LOADS):
            mine = T.cast(T.ballot(ids[i] == expert), "uint32")
            if ids[i] == expert:
                rank = T.cast(T.popcount(mine & ((T.uint32(1) << lane) - T.uint32(1))), "int32")
                rank = rank + at[0]
                order[rank] = first + s * STEP + i * WARP
                position[first + s * STEP + i * WARP] = rank
            at[0] = at[0] + T.cast(T.popcount(mine), "int32")


@T.macro
def _cut_tiles(expert, count, row, tile: int, tile_expert, tile_start, first):
    """Write an expert's tiles from number first[0] on, and advance it; `tile` 0 fills the rest."""
    thread = T.get_thread_binding()
    for i in T.serial(T.ceildiv(count, GROUP_THREADS)):
        if i * GROUP_THREADS + thread < count:
            tile_expert[first[0] + i * GROUP_THREADS + thread] = expert
            tile_start[first[0] + i * GROUP_THREADS + thread] = (
                row + (i * GROUP_THREADS + thread) * tile
            )
    first[0] = first[0] + count


@T.macro
def _copy_tokens(x, order, first, count, k: int, out):
    """Copy the tokens of `count` sorted rows from `first` on; the block has placed them."""
    thread, vectors = T.get_thread_binding(), x.shape[1] // VECTOR
    for r in T.serial(count):
        token = order[first + r] // k
        for i in T.unroll(-(-vectors // GROUP_THREADS)):
            if i * GROUP_THREADS + thread < vectors:
                for j in T.vectorized(VECTOR):
                    out[first + r, (i * GROUP_THREADS + thread) * VECTOR + j] = x[
                        token, (i * GROUP_THREADS + thread) * VECTOR + j
                    ]


def group_rows_program(num_experts: int, tile: int, width: int, k: int):
    """Give each expert a block, which reads all rows, counts them and places its own.

    A warp owns a stretch of rows, so that ranks inside a stretch need no barrier. Rows are k of
    each token, whose `width` values are copied, too; 0 = there are none.
    """
    assert width % VECTOR == 0, f"rows of {width} values do not consist of 16-byte vectors"
    tokens, num_values = T.dynamic("tokens"), max(width, VECTOR)
    num_rows, num_tiles = T.dynamic("num_rows"), T.dynamic("num_tiles")

    @T.prim_func
    def main(
        experts: T.Tensor((num_rows,), "int32"),
        order: T.Tensor((num_rows,), "int32"),
        position: T.Tensor((num_rows,), "int32"),
        counts: T.Tensor((num_experts,), "int32"),
        offsets: T.Tensor((num_experts + 1,), "int32"),
        tile_expert: T.Tensor((num_tiles,), "int32"),
        tile_start: T.Tensor((num_tiles,), "int32"),
        queue: T.Tensor((2,), "int32"),
        x: T.Tensor((tokens, num_values), "bfloat16"),
        out: T.Tensor((num_rows if width else tokens, num_values), "bfloat16"),
    ):
        with T.Kernel(num_experts, threads=GROUP_THREADS) as expert:
            thread = T.get_thread_binding()
            histogram = T.alloc_shared((num_experts,), "int32")
            shared = T.alloc_shared((3, GROUP_WARPS), "int32")
            at, tiles = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
            before, count = T.alloc_local((1,), "int32"), T.alloc_var("int32")
            steps = T.ceildiv(num_rows, GROUP_WARPS * STEP)
            first = thread // WARP * steps * STEP + thread % WARP
            for i in T.serial(T.ceildiv(num_experts, GROUP_THREADS)):
                if i * GROUP_THREADS + thread < num_experts:
                    histogram[i * GROUP_THREADS + thread] = 0
            T.sync_threads()
            _count_rows(experts, first, steps, expert, histogram, at)
            T.sync_threads()
            _count_before(histogram, expert, tile, at, shared, before, tiles)
            at[0] = at[0] + before[0]
            _place_rows(experts, first, steps, expert, at, order, position)
            count = histogram[expert]
            if thread == 0:
                counts[expert] = count
                offsets[expert] = before[0]
            if width > 0:
                T.sync_threads()
                _copy_tokens(x, order, before[0], count, k, out)
            count = (count + (tile - 1)) // tile
            _cut_tiles(expert, count, before[0], tile, tile_expert, tile_start, tiles)
            if expert == num_experts - 1:
                if thread == 0:
                    offsets[num_experts] = num_rows
                    queue[0] = 0
                    queue[1] = 0
                _cut_tiles(NO_EXPERT, num_tiles - tiles[0], 0, 0, tile_expert, tile_start, tiles)

    return main


def _grouped(
    experts: Tensor, num_experts: int, tile: int, x: Tensor, out: Tensor, width: int
) -> RowGroups:
    """Launch `group_rows_program`."""
    flat = experts.flatten().to(torch.int32)
    num_rows = flat.shape[0]
    num_tiles = max_tiles(num_rows, num_experts, tile)

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=flat.device)

    groups = RowGroups(
        empty(num_rows), empty(num_rows), empty(num_experts), empty(num_experts + 1),
        empty(num_tiles), empty(num_tiles), empty(2),
    )  # fmt: skip
    if not num_rows:
        for tensor in (groups.counts, groups.offsets, groups.queue):
            tensor.zero_()
        return groups
    run = compiled(group_rows_program, num_experts, tile, width, experts.shape[1] if width else 1)
    run(flat, *groups, x, out)
    return groups


def group_rows(experts: Tensor, num_experts: int, tile: int) -> RowGroups:
    """See `ops.routing.group_rows`."""
    nothing = torch.empty(1, VECTOR, dtype=torch.bfloat16, device=experts.device)
    return _grouped(experts, num_experts, tile, nothing, nothing, 0)


def group_tokens(
    x: Tensor, experts: Tensor, num_experts: int, tile: int
) -> tuple[RowGroups, Tensor]:
    """See `ops.routing.group_tokens`. An expert's block copies its few tokens, not thousands."""
    if len(x) > FEW_TOKENS:
        groups = group_rows(experts, num_experts, tile)
        return groups, x[groups.order // experts.shape[1]]
    rows = x.new_empty(experts.numel(), x.shape[1])
    return _grouped(experts, num_experts, tile, x.contiguous(), rows, x.shape[1]), rows


SAMPLES = (
    Sample(group_rows_program, (384, 64, 5120, 6)),
    Sample(group_rows_program, (384, 64, 0, 1)),
    Sample(group_rows_program, (16, 16, 128, 3)),
)
