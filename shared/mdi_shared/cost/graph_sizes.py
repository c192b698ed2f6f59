"""The batch sizes that decode steps are captured for, as CUDA graphs.

A step runs as the smallest graph that holds its rows. Both the executor, which captures them, and
cost models, which must know where time jumps, take the sizes from here.
"""

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SIZE_STEP = 64  # between sizes beyond the last of these


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes there are graphs for, ascending; the last one is max_num_seqs."""
    beyond = range(SIZES[-1] + SIZE_STEP, max_num_seqs, SIZE_STEP)
    return (*(size for size in (*SIZES, *beyond) if size < max_num_seqs), max_num_seqs)
