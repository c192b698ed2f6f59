"""In which steps sequences gave tokens, in one entry for many steps.

What counts or times tokens needs no row for each of them: while a sequence runs, it gives one in
every decode step of its rank.

Read next: `tables.py` (spans of what was just recorded), `mdi_analysis/metrics.py` (a user).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mdi_traces.columns import Ints, codes, ints


class TokenSpans(NamedTuple):
    """Sequences that gave tokens in a step and in some decode steps right after it.

    Arrays of one length. Entry i: request `request[i]` gave `gave[i]` tokens in step `step[i]` of
    `rank[i]`, and at least one in each of the next `further[i]` decode steps of that rank, whatever
    prefill steps lie between. Requests are numbers of their own.
    """

    rank: Ints
    step: Ints
    request: Ints
    gave: Ints
    further: Ints


def spans_of_items(pieces: Iterable[pa.Table]) -> Iterator[TokenSpans]:
    """Yield an entry for every row of an item table that comes in pieces."""
    number: dict[str, int] = {}
    for piece in pieces:
        index, names = codes(piece["req_id"])
        known = np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64)
        rank, step, gave = (ints(piece[name]) for name in ("rank", "step", "emitted"))
        yield TokenSpans(rank, step, known[index], gave, np.zeros(len(piece), dtype=np.int64))
