"""When sequences gave their tokens: from their stays and prompts, with no row per token.

Read next: `spread.py` (stays), `spans.py` (what a reader gets).
"""

from collections.abc import Iterator

import numpy as np

from mdi_traces.columns import Ints
from mdi_traces.recorder import NOT_YET
from mdi_traces.spans import TokenSpans
from mdi_traces.spread import RankSteps, last_of_row


def token_spans(rank: RankSteps) -> Iterator[TokenSpans]:
    """Yield who gave tokens in which steps: an entry per stay and per prompt (`spans.py`)."""
    numbers = rank.numbers()
    if (rank.per_step("rows_each") > 1).any():  # with drafts steps give unlike numbers
        for first, stop in rank.portions():
            items = rank.items(first, stop)
            yield _spans(rank, numbers[items["step_row"]], items["seq_id"], items["emitted"], 0)
        return
    stays, stops = rank.stays, _stops_without_dropped(rank)
    gave = stops > stays["first"]
    prompts = _finished_prompts(rank)
    rows = np.concatenate((rank.entries["prompts"]["row"][prompts],
                           rank.decode_rows[stays["first"][gave]]))  # fmt: skip
    seqs = np.concatenate((rank.entries["prompts"]["seq_id"][prompts], stays["seq_id"][gave]))
    further = np.concatenate((np.zeros(len(prompts), dtype=np.int64),
                              (stops - stays["first"] - 1)[gave]))  # fmt: skip
    order = np.argsort(rows, kind="stable")
    yield _spans(rank, numbers[rows[order]], seqs[order], 1, further[order])


def _spans(
    rank: RankSteps, steps: Ints, seqs: Ints, gave: Ints | int, further: Ints | int
) -> TokenSpans:
    same = np.zeros(len(steps), dtype=np.int64)
    requests = rank.request_of[seqs]
    return TokenSpans(same + rank.rank, steps, requests, same + gave, same + further)


def _stops_without_dropped(rank: RankSteps) -> Ints:
    """Where stays end but for the rows that were dropped, which are their last."""
    stays, dropped = rank.stays, rank.entries["dropped"]
    stops = stays["stop"].copy()
    key = (stays["seq_id"] << 40) | stays["first"]
    order = np.argsort(key)
    late = (dropped["seq_id"] << 40) | np.searchsorted(rank.decode_rows, dropped["row"])
    np.subtract.at(stops, order[np.searchsorted(key[order], late, side="right") - 1], 1)
    return stops


def _finished_prompts(rank: RankSteps) -> Ints:
    """The entries of prompts whose last chunk was processed: each gave a token."""
    rows = rank.entries["prompts"]["row"]
    seen = np.flatnonzero(rows < rank.rows)
    cut = rank.entries["stretches"]["n_chunked"][rank.stretch_of[rows[seen]]] == 1
    finished: Ints = seen[~(cut & last_of_row(rows)[seen])]
    return finished


def last_tokens(rank: RankSteps, seq_ids: list[int]) -> dict[int, int]:
    """When sequences got the last of their tokens, ns; those without one are left out."""
    done = rank.columns["t_done"]
    out: dict[int, int] = {}
    stays, stops = rank.stays, _stops_without_dropped(rank)
    prompts, chosen = _finished_prompts(rank), np.array(seq_ids, dtype=np.int64)
    wanted = np.isin(stays["seq_id"], chosen) & (stops > stays["first"])
    prompts = prompts[np.isin(rank.entries["prompts"]["seq_id"][prompts], chosen)]
    rows = np.concatenate((rank.decode_rows[stops[wanted] - 1],
                           rank.entries["prompts"]["row"][prompts]))  # fmt: skip
    seqs = np.concatenate((stays["seq_id"][wanted], rank.entries["prompts"]["seq_id"][prompts]))
    for seq, time_ns in zip(seqs.tolist(), done[rows].tolist(), strict=True):
        out[seq] = max(out.get(seq, NOT_YET), time_ns)
    return out
