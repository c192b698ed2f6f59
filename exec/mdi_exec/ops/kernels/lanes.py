"""What kernels over vectors share: a thread handles chunks of 8 values, 16 bytes of bfloat16.

Consecutive threads take consecutive chunks, so a rounding group of 32 is 4 neighbouring lanes (one
of 16 is 2), and a group's maximum needs no shared memory. Sums run in one fixed order that depends
on the width only: a row's result never depends on its neighbours. Read next: `quantise.py`.
"""

import tilelang.language as T

CHUNK = 8
FLAT_THREADS = 256  # of kernels whose chunks are independent of one another
WARP = 32
SAMPLES = ()  # no kernel of its own


def require_multiple(width: int, of: int) -> None:
    """Raise `ValueError` unless a row's width is a multiple of `of` (a chunk, or a group)."""
    if width % of:
        raise ValueError(f"width {width} must be a multiple of {of}")


def row_threads(width: int) -> int:
    """Threads of a block that handles one row: at most 256, whole warps, no idle ones if possible.

    Raises `ValueError` for a width that is not a multiple of `CHUNK`.
    """
    require_multiple(width, CHUNK)
    chunks = width // CHUNK
    for threads in range(FLAT_THREADS, 0, -WARP):
        if chunks % threads == 0:
            return threads
    return min(FLAT_THREADS, -(-chunks // WARP) * WARP)


def row_chunks(width: int) -> int:
    """Chunks per thread of such a block; the last of them may lie beyond the row."""
    return -(-width // (CHUNK * row_threads(width)))


@T.macro
def group_max(values, amax, lanes):
    """Set amax[0] to the largest magnitude of `lanes` (2 or 4) neighbouring threads' values."""
    amax[0] = T.float32(0)
    for i in T.unroll(CHUNK):
        amax[0] = T.max(amax[0], T.abs(values[i]))
    amax[0] = T.max(amax[0], T.shfl_xor(amax[0], 1))
    if lanes == 4:
        amax[0] = T.max(amax[0], T.shfl_xor(amax[0], 2))


@T.macro
def block_sum(total, threads, thread):
    """Set total[0] to its sum over the block: butterflies within warps, then warps in order."""
    for step in T.unroll(5):
        total[0] = total[0] + T.shfl_xor(total[0], T.shift_right(16, step))
    if threads > WARP:
        warps = T.alloc_shared((threads // WARP,), "float32")
        if thread % WARP == 0:
            warps[thread // WARP] = total[0]
        T.sync_threads()
        total[0] = warps[0]
        for warp in T.unroll(1, threads // WARP):
            total[0] = total[0] + warps[warp]
