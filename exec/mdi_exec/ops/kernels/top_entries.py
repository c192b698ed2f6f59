"""Exact top-k over rows of bfloat16 scores, and the block maxima that candidates are chosen by.

One block a row, by counting: the first 12 of a score's 16 bits in one histogram, the last 4 of the
scores that share the threshold's first 12 in another. That gives the k-th best score exactly; then
columns are emitted in order. Only integers are added, so the order of threads does not show. Read
next: `ops/top_entries.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import WARP
from mdi_exec.ops.top_entries import NONE, candidate_blocks_ref

THREADS = 512
WARPS = THREADS // WARP
BLOCKS_OF_SM = 2  # keeps a thread at 64 registers, so that one row's barriers hide behind another
VECTOR = 8  # bfloat16 scores of a 16-byte access
WORDS = VECTOR // 2
LOADS = 4  # vectors of one thread in flight while scores are counted
LOW_BITS = 4
LOW_BINS = 1 << LOW_BITS
HIGH_BINS = 1 << (16 - LOW_BITS)
BINS_OF_THREAD = HIGH_BINS // THREADS
EQUAL = 16  # shift: a word counts scores above the threshold, and in its upper half equal ones
MAXIMA_THREADS = 128
INFINITE_KEY = 0xFF80


def _key(words, i: int):
    """Return the rank of score i among all bfloat16 values, 0 .. 65535; both zeros are equal."""
    bits = (words >> (16 * (i % 2))) & 0xFFFF
    return T.if_then_else(bits > 0x8000, 0xFFFF - bits, bits | 0x8000)


@T.macro
def _count(scores, row, limit, shift: int, mask: int, prefix, histogram):
    """Count (key >> shift) & mask of the row's keys whose bits above LOW_BITS are `prefix`, if any.

    A negative prefix lets all keys pass.
    """
    thread = T.get_thread_binding()
    words = T.alloc_local((LOADS, WORDS), "int32")
    key = T.alloc_var("int32")
    for step in T.serial(T.ceildiv(limit, THREADS * LOADS * VECTOR)):
        for load in T.unroll(LOADS):
            vector = (step * LOADS + load) * THREADS + thread
            if vector * VECTOR < limit:
                for j in T.vectorized(WORDS):
                    words[load, j] = scores[row, vector, j]
        for load in T.unroll(LOADS):
            vector = (step * LOADS + load) * THREADS + thread
            for i in T.unroll(VECTOR):
                if vector * VECTOR + i < limit:
                    key = _key(words[load, i // 2], i)
                    if prefix < 0 or key >> LOW_BITS == prefix:
                        T.atomic_add(histogram[(key >> shift) & mask], 1)


@T.macro
def _find_high(high, k: int, in_warp, found):
    """Set found to the bin that holds the k-th best key, and the number of keys in bins above."""
    thread = T.get_thread_binding()
    own, upto, other = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    last = HIGH_BINS - 1 - thread * BINS_OF_THREAD
    own = 0
    for j in T.unroll(BINS_OF_THREAD):
        own = own + high[last - j]
    upto = own
    for step in T.unroll(5):
        other = T.shfl_up(upto, 1 << step)
        if thread % WARP >= 1 << step:
            upto = upto + other
    if thread % WARP == WARP - 1:
        in_warp[0, thread // WARP] = upto
    T.sync_threads()
    for w in T.unroll(WARPS):
        if w < thread // WARP:
            upto = upto + in_warp[0, w]
    upto = upto - own
    for j in T.unroll(BINS_OF_THREAD):
        own = high[last - j]
        if upto < k and k <= upto + own:
            found[0] = last - j
            found[1] = upto
        upto = upto + own
    T.sync_threads()


@T.macro
def _emit(scores, row, limit, threshold, wanted, in_warp, chosen):
    """Write the columns above the threshold and the first `wanted` at it, ascending."""
    thread = T.get_thread_binding()
    words, ahead = T.alloc_local((WORDS,), "int32"), T.alloc_local((WORDS,), "int32")
    key, own = T.alloc_var("int32"), T.alloc_var("int32")
    upto, other = T.alloc_var("int32"), T.alloc_var("int32")
    greater, equal = T.alloc_var("int32"), T.alloc_var("int32")
    above, ties = T.alloc_var("int32"), T.alloc_var("int32")
    above = 0
    ties = 0
    if thread * VECTOR < limit:
        for j in T.vectorized(WORDS):
            ahead[j] = scores[row, thread, j]
    for step in T.serial(T.ceildiv(limit, THREADS * VECTOR)):
        first = (step * THREADS + thread) * VECTOR
        for j in T.unroll(WORDS):
            words[j] = ahead[j]
        if first + THREADS * VECTOR < limit:
            for j in T.vectorized(WORDS):
                ahead[j] = scores[row, (step + 1) * THREADS + thread, j]
        own = 0
        for i in T.unroll(VECTOR):
            if first + i < limit:
                key = _key(words[i // 2], i)
                if key > threshold:
                    own = own + 1
                if key == threshold:
                    own = own + (1 << EQUAL)
        upto = own
        for s in T.unroll(5):
            other = T.shfl_up(upto, 1 << s)
            if thread % WARP >= 1 << s:
                upto = upto + other
        if thread % WARP == WARP - 1:
            in_warp[step % 2, thread // WARP] = upto
        T.sync_threads()
        upto = upto - own
        other = 0
        for w in T.unroll(WARPS):
            if w < thread // WARP:
                upto = upto + in_warp[step % 2, w]
            other = other + in_warp[step % 2, w]
        if own != 0:
            greater = above + (upto & 0xFFFF)
            equal = ties + (upto >> EQUAL)
            for i in T.unroll(VECTOR):
                if first + i < limit:
                    key = _key(words[i // 2], i)
                    if key > threshold:
                        chosen[row, greater + T.min(equal, wanted)] = first + i
                        greater = greater + 1
                    if key == threshold:
                        if equal < wanted:
                            chosen[row, greater + equal] = first + i
                        equal = equal + 1
        above = above + (other & 0xFFFF)
        ties = ties + (other >> EQUAL)


def top_visible_program(k: int):
    """Choose the k best of each row's first `visible` columns."""
    rows, vectors = T.dynamic("rows"), T.dynamic("vectors")

    @T.prim_func
    def main(
        scores: T.Tensor((rows, vectors, WORDS), "int32"),
        visible: T.Tensor((rows,), "int32"),
        chosen: T.Tensor((rows, k), "int32"),
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            T.annotate_min_blocks_per_sm(BLOCKS_OF_SM)
            thread = T.get_thread_binding()
            high = T.alloc_shared((HIGH_BINS,), "int32")
            low = T.alloc_shared((LOW_BINS,), "int32")
            in_warp = T.alloc_shared((2, WARPS), "int32")
            found = T.alloc_shared((2,), "int32")
            limit, prefix = T.alloc_var("int32"), T.alloc_var("int32")
            above, threshold = T.alloc_var("int32"), T.alloc_var("int32")
            wanted = T.alloc_var("int32")
            limit = T.min(visible[row], vectors * VECTOR)
            if limit <= k:
                for i in T.serial(T.ceildiv(k, THREADS)):
                    if i * THREADS + thread < k:
                        chosen[row, i * THREADS + thread] = T.if_then_else(
                            i * THREADS + thread < limit, i * THREADS + thread, NONE
                        )
            else:
                for i in T.unroll(BINS_OF_THREAD):
                    high[i * THREADS + thread] = 0
                if thread < LOW_BINS:
                    low[thread] = 0
                T.sync_threads()
                _count(scores, row, limit, LOW_BITS, HIGH_BINS - 1, -1, high)
                T.sync_threads()
                _find_high(high, k, in_warp, found)
                prefix = found[0]
                above = found[1]
                _count(scores, row, limit, 0, LOW_BINS - 1, prefix, low)
                T.sync_threads()
                for i in T.unroll(LOW_BINS):
                    if above < k and k <= above + low[LOW_BINS - 1 - i]:
                        threshold = prefix * LOW_BINS + LOW_BINS - 1 - i
                        wanted = k - above
                    above = above + low[LOW_BINS - 1 - i]
                _emit(scores, row, limit, threshold, wanted, in_warp, chosen)

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
    chosen = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    if scores.shape[0]:
        compiled(top_visible_program, k)(_vectors(scores), visible.to(torch.int32), chosen)
    return chosen


def block_maxima_program(block_size: int):
    """Find each visible block's best score; the newest block's becomes infinite.

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
                if (block + 1) * block_size >= limit:
                    best = INFINITE_KEY
                maxima[row, block] = T.cast(
                    T.if_then_else(best >= 0x8000, best & 0x7FFF, 0xFFFF - best), "int16"
                )

    return main


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, k: int) -> Tensor:
    """Launch `block_maxima_program`, then `top_visible_program` on its result.

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
    return top_visible(maxima, reachable, k)


SAMPLES = (
    Sample(top_visible_program, (512,)),
    Sample(top_visible_program, (2048,)),
    Sample(top_visible_program, (32,)),
    Sample(top_visible_program, (8,)),
    Sample(block_maxima_program, (8,)),
)
