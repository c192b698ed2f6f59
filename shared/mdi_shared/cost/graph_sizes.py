"""The shapes that steps are captured for, as CUDA graphs.

A step runs as the smallest graph that holds it. Both the executor, which captures them, and
cost models, which must know where time jumps, take the sizes from here.
"""

from bisect import bisect_left

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SIZE_STEP = 64  # between sizes beyond the last of these

# A prefill graph has one sequence more than it serves, which takes the rows left over, so the
# larger sizes hold a chunk of a power of two and 16 rows.
PREFILL_ROWS = (16, 32, 64, 144, 272, 528, 1040)
PREFILL_SEQS = (2, 4, 8, 16)
PREFILL_CONTEXTS = (8192, 32768, 131072)  # tokens


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes there are graphs for, ascending; the last one is max_num_seqs."""
    beyond = range(SIZES[-1] + SIZE_STEP, max_num_seqs, SIZE_STEP)
    return (*(size for size in (*SIZES, *beyond) if size < max_num_seqs), max_num_seqs)


def prefill_shape(rows: int, seqs: int, max_k: int) -> tuple[int, int, int] | None:
    """Return the rows, sequences and context, tokens, of the graph for a prefill step.

    None for a step that is too large for one: its launches take less time than its work.
    """
    sequences = _at_least(seqs + 1, PREFILL_SEQS)
    context = _at_least(max_k, PREFILL_CONTEXTS)
    if sequences is None or context is None:
        return None
    room = _at_least(rows + sequences - seqs, PREFILL_ROWS)
    return None if room is None else (room, sequences, context)


def _at_least(number: int, sizes: tuple[int, ...]) -> int | None:
    at = bisect_left(sizes, number)
    return None if at == len(sizes) else sizes[at]
