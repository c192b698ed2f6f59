"""How many (query row, key) pairs a range of rows makes (docs/rules.md, R31).

Rows are query positions [start, stop) of one sequence in one layer; all results are exact. The
query at position p sees floor((p + 1) / ratio) compressed entries and its own window. Nothing here
knows layers or sequences; `work.py` sums over them.
"""


def floor_sum(n: int, ratio: int) -> int:
    """Return the sum of floor(t / ratio) over t = 1..n."""
    groups = n // ratio
    return groups * (n + 1) - ratio * (groups * (groups + 1) // 2)


def capped_sum(n: int, ratio: int, cap: int) -> int:
    """Return the sum of min(floor(t / ratio), cap) over t = 1..n."""
    below = min(n, ratio * cap)
    return floor_sum(below, ratio) + (n - below) * cap


def pairs(start: int, stop: int, ratio: int, cap: int = 0) -> int:
    """Return the pairs of the query positions [start, stop) with 1/ratio as many entries.

    A query at position p sees floor((p + 1) / ratio) entries, at most `cap` of them; 0 = no cap.
    """
    if cap == 0:
        return floor_sum(stop, ratio) - floor_sum(start, ratio)
    return capped_sum(stop, ratio, cap) - capped_sum(start, ratio, cap)


def candidate_pairs(start: int, stop: int, block_size: int, num_blocks: int) -> int:
    """Pairs of ratio-1 index scoring inside at most `num_blocks` candidate blocks (R31).

    The last, partly visible block counts whole.
    """
    shift = block_size - 1
    return block_size * pairs(start + shift, stop + shift, block_size, num_blocks)


def consumer_start(q: int, k: int, prompt_len: int, keep: int) -> int:
    """First query position the consumer layers run; they end at k (R31).

    Every chunk keeps at least one row. `keep` = 0 means bounded replay is off.
    """
    return k - q if keep == 0 else max(k - q, min(prompt_len - keep, k - 1))


def window_pairs(start: int, stop: int, window: int, valid_from: int = 0) -> int:
    """Pairs of the query positions [start, stop) with the keys of the window behind them.

    Keys before position `valid_from` are not there.
    """
    before, upto = max(start - valid_from, 0), max(stop - valid_from, 0)
    return capped_sum(upto, 1, window) - capped_sum(before, 1, window)
