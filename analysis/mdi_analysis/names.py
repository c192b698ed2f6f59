"""What metrics are called on a page, and whether more of them is better.

Keys are those of the JSON documents; docs/metrics.md defines them.

Read next: `definitions.py` (the definitions), `compare.py` (a user).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MORE, LESS, NEITHER = 1, -1, 0  # what is better
ALIKE = 0.01  # a relative difference below this is neither better nor worse


class Shown(NamedTuple):
    """A metric for people; `better` is MORE, LESS or NEITHER."""

    label: str
    better: int


SHOWN: Mapping[str, Shown] = MappingProxyType({
    "ttft_ms": Shown("time to first token, ms", LESS),
    "ttft_engine_ms": Shown("the same from the scheduler's add, ms", LESS),
    "tpot_ms": Shown("time per output token, ms", LESS),
    "tpot_with_first_ms": Shown("time per token, the first included, ms", LESS),
    "e2e_ms": Shown("end to end, ms", LESS),
    "queue_ms": Shown("until first scheduled, ms", LESS),
    "itl_ms": Shown("gap between tokens, ms", LESS),
    "prefill": Shown("prefill step, ms", LESS),
    "decode": Shown("decode step, ms", LESS),
    "mixed": Shown("mixed step, ms", LESS),
    "gap_ms": Shown("device idle before a step, ms", LESS),
    "plan_ms": Shown("planning and layout, ms", LESS),
    "visible_ms": Shown("device's end to visible, ms", LESS),
    "turn_ms": Shown("step to step, ms", LESS),
    "span_s": Shown("run, s", NEITHER),
    "n_gpus": Shown("GPUs", NEITHER),
    "input_tokens": Shown("input tokens", NEITHER),
    "output_tokens": Shown("output tokens", NEITHER),
    "input_tok_s_gpu": Shown("input, tokens/s/GPU", MORE),
    "output_tok_s_gpu": Shown("output, tokens/s/GPU", MORE),
    "requests_s": Shown("completed requests/s", MORE),
    "kv_occupancy_mean": Shown("KV blocks in use, mean share", NEITHER),
    "preemptions": Shown("preemptions", LESS),
    "dropped_rows": Shown("rows thrown away", LESS),
    "barrier_wait_share": Shown("ranks waiting for each other, share", LESS),
    "vote_wait_share": Shown("first tokens waiting for a vote, share", LESS),
    "rank_imbalance": Shown("busiest rank over the mean", LESS),
    "goodput_s": Shown("goodput, requests/s", MORE),
    "goodput_share": Shown("goodput, share of requests", MORE),
})  # fmt: skip


def name_of(key: str, stat: str = "") -> str:
    """Return a metric's name for people, with a statistic such as p99 behind it."""
    label = SHOWN[key].label
    if not stat:
        return label
    words, comma, unit = label.rpartition(", ")
    shown = stat.upper() if stat.startswith("p") else stat
    return f"{words}, {shown}{comma}{unit}"


def verdict(key: str, relative: float | None) -> int:
    """Return 1 where a relative difference is better, -1 where it is worse, 0 where neither."""
    if relative is None or abs(relative) < ALIKE:
        return 0
    return SHOWN[key].better * (1 if relative > 0 else -1)
