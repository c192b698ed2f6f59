"""What a trace says of shared prefixes, as ids of the scheduler's blocks.

Traces name blocks of 512 or 16 tokens, or say by `cached_len` how much of a turn was known from the
turn before. Here both become `hash_ids` of blocks of the scheduler's size, where an id stands for
the block and all before it, and goes on into the output as far as a later turn tells it.

Read next: `mdi_shared/prefix/contents.py` (the user), `formats/` (where the ids come from).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from mdi_shared.errors import ConfigError
from mdi_shared.prefix.contents import GivenContents
from mdi_traces.columns import codes, int_lists, ints, numbers
from mdi_traces.requests import RequestTrace, put_column

GRAIN = "prefix_grain"  # in the metadata's config: tokens of a block that the trace itself named
Ids = list[int]


def with_prefix_ids(trace: RequestTrace, block_size: int) -> RequestTrace:
    """Return the trace with `hash_ids` of blocks of `block_size` tokens, and `cached_len` 0.

    A full block has an id where its content is known: a last, partial block of the trace is left
    out, for what a longer prompt has there it does not say. The output of a turn is taken to be in
    the next one's prompt if that begins with this one's. Without ids, turns of a session have in
    common what `cached_len` of the later one says; where it is 0 throughout, a turn is taken to
    begin with all of the turn before, if it is as long. Requests outside sessions share nothing.
    That another cache had those tokens is not granted: ours must.

    Raises `ConfigError` for block sizes that do not divide each other.
    """
    table, stated = trace.table, trace.metadata.hash_block_size
    if table["hash_ids"].null_count < len(table):
        if stated is None:
            raise ConfigError("hash_block_size", None, "prefix reuse must know how many tokens an "
                              "entry of hash_ids covers")  # fmt: skip
        if stated % block_size and block_size % stated:
            raise ConfigError("hash_block_size", stated, "the trace's blocks and those of "
                              f"block_size = {block_size} must divide one another")  # fmt: skip
        grain, found = max(stated, block_size), _from_ids(trace, stated, block_size)
        grain = int(trace.metadata.config.get(GRAIN, grain))
    else:
        grain, found = block_size, _from_sessions(trace, block_size)
    table = put_column(table, "hash_ids", int_lists(list(found)))
    table = put_column(table, "cached_len", numbers(np.zeros(len(table)), pa.int32()))
    config = {**trace.metadata.config, GRAIN: grain}
    return RequestTrace(table, replace(trace.metadata, hash_block_size=block_size, config=config))


def prefix_contents(trace: RequestTrace) -> list[GivenContents]:
    """Return what each request's blocks hold, of a trace that `with_prefix_ids` made."""
    grain = int(trace.metadata.config[GRAIN])
    lists = trace.table["hash_ids"].to_pylist()
    return [GivenContents(tuple(ids or ()), grain) for ids in lists]


class _Numbers:
    """Numbers chains of blocks: equal numbers, equal blocks from the first one on."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, object], int] = {}

    def after(self, before: int, content: object) -> int:
        return self._known.setdefault((before, content), len(self._known))


def _from_ids(trace: RequestTrace, stated: int, block_size: int) -> Iterator[Ids]:
    """Split or join the trace's ids."""
    known, parts = _Numbers(), max(stated // block_size, 1)
    joined = max(block_size // stated, 1)
    for ids in _known_ids(trace, stated):
        out: Ids = []
        for first in range(0, len(ids) - joined + 1, joined):
            content = tuple(ids[first : first + joined])
            for part in range(parts):
                out.append(known.after(out[-1] if out else -1, (content, part)))
        yield out


def _known_ids(trace: RequestTrace, stated: int) -> list[Ids]:
    """Return the ids of each request's full blocks, as far as they are known.

    Those of a turn go on in its output as the next turn of its session does.
    """
    lists: list[Ids] = [ids or [] for ids in trace.table["hash_ids"].to_pylist()]
    prompts, lengths = ints(trace.table["prompt_len"]).tolist(), _lengths(trace)
    sessions = codes(trace.table["session_id"])[0].tolist()
    following: dict[int, int] = {}
    for row in reversed(range(len(trace))):
        full = prompts[row] // stated
        if len(lists[row]) > -(-prompts[row] // stated):  # a record, which knows its outputs
            full = lengths[row] // stated
        lists[row] = lists[row][:full]
        if sessions[row] < 0:
            continue
        after = following.get(sessions[row])
        following[sessions[row]] = row
        if after is not None and lists[after][:full] == lists[row]:
            lists[row] = lists[after][: max(lengths[row] // stated, full)]
    return lists


def _lengths(trace: RequestTrace) -> list[int]:
    """Return how long each request gets: prompt and output."""
    lengths: list[int] = (
        ints(trace.table["prompt_len"]) + ints(trace.table["output_len"])
    ).tolist()
    return lengths


def _from_sessions(trace: RequestTrace, block_size: int) -> Iterator[Ids]:
    """Number blocks anew but for what a turn has in common with the one before."""
    known = _Numbers()
    cached, prompts = (ints(trace.table[name]).tolist() for name in ("cached_len", "prompt_len"))
    is_said = any(cached)
    last: dict[int, Ids] = {}
    ends: dict[int, int] = {}
    sessions = codes(trace.table["session_id"])[0].tolist()
    for row, (session, tokens) in enumerate(zip(sessions, _lengths(trace), strict=True)):
        before, end = (last.get(session, []), ends.get(session, 0)) if session >= 0 else ([], 0)
        common = cached[row] if is_said else end if end <= prompts[row] else 0
        out = before[: common // block_size]
        while len(out) < tokens // block_size:
            out.append(known.after(out[-1] if out else -1, row))
        if session >= 0:
            last[session], ends[session] = out, tokens
        yield out
