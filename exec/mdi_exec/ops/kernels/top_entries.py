"""Exact top-k over rows of bfloat16 scores, and the block maxima that candidates are chosen by.

One block a row, which reads it once and keeps it in registers (`top_source.py`). Read next:
`ops/top_entries.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.top_source import TOP_SOURCE
from mdi_exec.ops.top_entries import NONE, candidate_blocks_ref

THREADS = 512
WARPS = 16
BLOCKS_OF_SM = 2  # keeps a thread at 64 registers, so that one row's barriers hide behind another
VECTOR = 8  # bfloat16 scores of a 16-byte access
WORDS = VECTOR // 2
MAXIMA_THREADS = 128
LARGEST_KEY = 0xFF7F  # of finite numbers


def _key(words, i: int):
    """Return the rank of score i among all bfloat16 values, 0 .. 65535; both zeros are equal."""
    bits = (words >> (16 * (i % 2))) & 0xFFFF
    return T.if_then_else(bits > 0x8000, 0xFFFF - bits, bits | 0x8000)


def top_visible_program(k: int, keeps_last: bool):
    """Choose the k best of each row's first `visible` columns, the last of them always if asked."""
    rows, vectors = T.dynamic("rows"), T.dynamic("vectors")
    carried = -(-k // VECTOR) * VECTOR

    @T.prim_func
    def main(
        scores: T.Tensor((rows, vectors, WORDS), "int32"),
        visible: T.Tensor((rows,), "int32"),
        chosen: T.Tensor((rows, k), "int32"),
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            T.annotate_min_blocks_per_sm(BLOCKS_OF_SM)
            T.import_source(TOP_SOURCE)
            values = T.alloc_shared((2, carried), "uint16")
            columns = T.alloc_shared((2, carried), "int32")
            counts = T.alloc_shared((2, WARPS), "int32")
            T.call_extern(
                "handle", f"mdi::select_row<{k}, {int(keeps_last)}>",
                T.address_of(scores[row, 0, 0]), T.min(visible[row], vectors * VECTOR),
                T.address_of(chosen[row, 0]), T.address_of(columns[0, 0]),
                T.address_of(values[0, 0]), T.address_of(counts[0, 0]),
            )  # fmt: skip

    return main


def _vectors(scores: Tensor) -> Tensor:
    """View rows as int32 [T, V, 4], whatever lies between them included; odd layouts are copied."""
    rows, pitch = scores.shape[0], scores.stride(0)
    end = scores.storage_offset() + rows * pitch
    is_aligned = pitch % VECTOR == 0 and scores.data_ptr() % 16 == 0
    has_room = end * scores.element_size() <= scores.untyped_storage().nbytes()
    if scores.stride(1) == 1 and pitch >= scores.shape[1] and is_aligned and has_room:
        whole = scores.as_strided((rows, pitch), (pitch, 1))
    else:
        whole = torch.nn.functional.pad(scores, (0, -scores.shape[1] % VECTOR)).contiguous()
    return torch.unflatten(whole.view(torch.int32), 1, (-1, WORDS))


def top_visible(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Launch `top_visible_program`; see `ops.top_entries.top_visible`."""
    return _chosen(scores, visible, k, keeps_last=False)


def _chosen(scores: Tensor, visible: Tensor, k: int, *, keeps_last: bool) -> Tensor:
    chosen = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    if scores.shape[0]:
        program = compiled(top_visible_program, k, keeps_last)
        program(_vectors(scores), visible.to(torch.int32), chosen)
    return chosen


def block_maxima_program(block_size: int):
    """Find each visible block's best score; infinite ones become the largest finite number.

    A thread reads one block of entries; `reachable` receives each row's number of visible blocks.
    """
    assert block_size % VECTOR == 0, f"blocks of {block_size} scores are not 16-byte vectors"
    rows, vectors, blocks_of_row = (
        T.dynamic("rows"),
        T.dynamic("vectors"),
        T.dynamic("blocks_of_row"),
    )

    @T.prim_func
    def main(
        scores: T.Tensor((rows, vectors, WORDS), "int32"),
        visible: T.Tensor((rows,), "int32"),
        maxima: T.Tensor((rows, blocks_of_row), "int16"),
        reachable: T.Tensor((rows,), "int32"),
    ):
        with T.Kernel(rows, T.ceildiv(blocks_of_row, MAXIMA_THREADS), threads=MAXIMA_THREADS) as (
            row,
            part,
        ):
            thread = T.get_thread_binding()
            words = T.alloc_local((WORDS,), "int32")
            best, limit, key = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            block = part * MAXIMA_THREADS + thread
            limit = T.min(visible[row], vectors * VECTOR)
            if block == 0:
                reachable[row] = T.ceildiv(limit, block_size)
            if block * block_size < limit:
                best = 0
                for v in T.unroll(block_size // VECTOR):
                    first = block * block_size + v * VECTOR
                    if first < limit:
                        for j in T.vectorized(WORDS):
                            words[j] = scores[row, first // VECTOR, j]
                        for i in T.unroll(VECTOR):
                            if first + i < limit:
                                key = _key(words[i // 2], i)
                                best = T.max(best, key)
                best = T.min(best, LARGEST_KEY)
                maxima[row, block] = T.cast(
                    T.if_then_else(best >= 0x8000, best & 0x7FFF, 0xFFFF - best), "int16"
                )

    return main


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, k: int) -> Tensor:
    """Launch `block_maxima_program`, then `top_visible_program` on its result; the newest block is
    the last.

    Where no more than k blocks exist, all that a row sees are chosen: nothing is launched.
    """
    if block_size % VECTOR:
        return candidate_blocks_ref(scores, visible, block_size, k)
    num_rows, width = scores.shape
    num_blocks = -(-width // block_size)
    if num_blocks <= k:
        ids = torch.arange(num_blocks, dtype=torch.int32, device=scores.device)
        begins = ids * block_size
        return torch.where(begins < visible.unsqueeze(1), ids, NONE)
    columns = -(-num_blocks // VECTOR) * VECTOR
    maxima = torch.empty((num_rows, columns), dtype=torch.bfloat16, device=scores.device)
    reachable = torch.empty(num_rows, dtype=torch.int32, device=scores.device)
    if num_rows:
        program = compiled(block_maxima_program, block_size)
        program(_vectors(scores), visible.to(torch.int32), maxima.view(torch.int16), reachable)
    return _chosen(maxima, reachable, k, keeps_last=True)


SAMPLES = (
    Sample(top_visible_program, (512, False)),
    Sample(top_visible_program, (2048, True)),
    Sample(top_visible_program, (32, False)),
    Sample(top_visible_program, (8, True)),
    Sample(block_maxima_program, (8,)),
)
