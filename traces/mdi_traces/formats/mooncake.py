"""Mooncake JSONL (kvcache-ai/Mooncake, FAST'25 release): lengths, times and prefix block ids.

`timestamp` is milliseconds from the trace's start, coarse, so that many requests share one.
`hash_ids` are one id per 512 prompt tokens, the last block possibly partial; they are kept as they
are, and no prefix hit is computed here: that depends on the cache being studied.
"""

from mdi_traces.columns import int_lists
from mdi_traces.formats.base import Format, Imported, Options, length_columns
from mdi_traces.formats.rows import read_jsonl

BLOCK_TOKENS = 512
_NS_PER_MS = 1_000_000


def _matches(keys: frozenset[str]) -> bool:
    return keys >= {"timestamp", "input_length", "output_length"} and "chat_id" not in keys


def _read(path: str, options: Options) -> Imported:
    rows = read_jsonl(path, options.limit)
    columns = length_columns(
        rows.times_ns("timestamp", _NS_PER_MS),
        rows.tokens("input_length"),
        rows.tokens("output_length"),
    )
    hashed = rows.has("hash_ids")
    if hashed:
        columns["hash_ids"] = int_lists(rows.int_lists("hash_ids"))
    return Imported(
        columns=columns,
        lines=rows.lines,
        licence="Apache-2.0 (Mooncake, Qin et al., FAST 2025)",
        hash_block_size=BLOCK_TOKENS if hashed else None,
    )


MOONCAKE = Format(
    name="mooncake",
    kind="jsonl",
    needs="timestamp (ms), input_length, output_length, optionally hash_ids",
    matches=_matches,
    read=_read,
)
