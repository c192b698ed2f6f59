"""What the engine did with its time and memory: throughput, step kinds, KV blocks, waiting.

Everything here comes from the step table, plus token and request counts. Every definition is
written down in `definitions.py`.

Read next: `summary.py`, which puts everything together.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mdi_analysis.frames import (
    KINDS,
    NS_PER_MS,
    NS_PER_S,
    OWN_KINDS,
    Bools,
    Floats,
    Ints,
    RunLike,
    config_option,
    count_gpus,
    device_ns,
    floats,
    ints,
    is_kind,
    kind_codes,
    prompt_rows,
    ratio,
    span_ns,
)
from mdi_analysis.metrics import NEVER_ARRIVED, SLO, Distribution, meets_slo
from mdi_analysis.vote_waits import vote_wait_share
from mdi_shared.errors import ConfigError, TraceError


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens and requests per second over the whole span of the run, and what they count."""

    span_s: float
    n_gpus: int
    input_tokens: int
    output_tokens: int
    input_tok_s_gpu: float | None
    output_tok_s_gpu: float | None
    requests_s: float | None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that completed within an SLO; `goodput_share` is of all requests."""

    slo: SLO
    met: int
    goodput_s: float | None
    goodput_share: float | None


@dataclass(frozen=True, slots=True)
class KindUse:
    """Steps of one kind, their device time and their size."""

    count: int
    device_total_ms: float
    device_share: float | None
    device_ms: Distribution
    batch_size: Distribution
    tokens: Distribution


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Steps by kind, memory, and work lost; None where the run does not record it."""

    steps: int
    ranks: int
    by_kind: dict[str, KindUse]
    kv_occupancy_mean: float | None
    kv_occupancy_max: float | None
    preemptions: int
    recomputed_tokens: int
    dropped_rows: int
    barrier_wait_share: float | None
    vote_wait_share: float | None
    rank_imbalance: float | None


def throughput(run: RunLike, completed: int, n_gpus: int | None = None) -> Throughput:
    """Return token and request rates; `n_gpus` defaults to `count_gpus`.

    Recomputed tokens are no input. Raises `ConfigError` when `n_gpus` is below 1.
    """
    if n_gpus is None:
        n_gpus = count_gpus(run)
    elif n_gpus < 1:
        raise ConfigError("n_gpus", n_gpus, "must be at least 1, or None to count the ranks")
    start_ns, end_ns = span_ns(run) or (0.0, 0.0)
    span_s = (end_ns - start_ns) / NS_PER_S
    processed = _total(prompt_rows(run.steps))
    input_tokens = processed - _total(floats(run.requests, "requests", "n_recomputed_tokens"))
    # A request without a first token has produced nothing, whatever its target length says.
    started = ~np.isnan(floats(run.requests, "requests", "t_first_token"))
    output_tokens = _total(floats(run.requests, "requests", "output_len")[started])
    return Throughput(
        span_s, n_gpus, input_tokens, output_tokens,
        input_tok_s_gpu=ratio(input_tokens, span_s * n_gpus),
        output_tok_s_gpu=ratio(output_tokens, span_s * n_gpus),
        requests_s=ratio(completed, span_s),
    )  # fmt: skip


def goodput(run: RunLike, latencies: pd.DataFrame, slo: SLO) -> Goodput:
    """Return how many requests (rows of `request_latencies(run)`) completed within the SLO."""
    met = int(meets_slo(latencies, slo).sum())
    start_ns, end_ns = span_ns(run) or (0.0, 0.0)
    return Goodput(
        slo, met,
        goodput_s=ratio(met, (end_ns - start_ns) / NS_PER_S),
        goodput_share=ratio(met, int((latencies["outcome"] != NEVER_ARRIVED).sum())),
    )  # fmt: skip


def engine_use(run: RunLike) -> EngineUse:
    """Return what the step table says about kinds, memory, preemption and waiting."""
    steps = run.steps
    kinds, rank = kind_codes(steps), ints(steps, "steps", "rank")
    occupancy = kv_occupancy(run)
    return EngineUse(
        steps=len(steps),
        ranks=int(np.unique(rank).size),
        by_kind=_by_kind(steps, kinds),
        kv_occupancy_mean=_time_weighted_mean(occupancy, steps, rank),
        kv_occupancy_max=_maximum(occupancy),
        preemptions=_total(floats(steps, "steps", "n_preempted")),
        recomputed_tokens=_total(floats(run.requests, "requests", "n_recomputed_tokens")),
        dropped_rows=_total(floats(steps, "steps", "n_dropped")),
        barrier_wait_share=_wait_share(run, rank),
        vote_wait_share=vote_wait_share(run),
        rank_imbalance=_imbalance(device_ns(steps), rank, is_kind(kinds, *OWN_KINDS)),
    )


def kv_occupancy(run: RunLike) -> Floats:
    """Return the share of usable KV blocks in use after each step was scheduled.

    NaN when the metadata lacks num_blocks. Raises `TraceError` when more blocks are free than
    num_blocks allows.
    """
    free = floats(run.steps, "steps", "free_blocks")
    num_blocks = config_option(run, "num_blocks")
    if num_blocks is None:
        return np.full(free.size, np.nan)
    usable = num_blocks - 1  # block 0 is never handed out
    if usable < 1:
        raise TraceError("metadata", f"num_blocks = {num_blocks} must be at least 2")
    beyond = free > usable
    if beyond.any():
        raise TraceError("steps table", f"more free blocks than num_blocks - 1 = {usable}",
                         row=int(beyond.argmax()) + 1, column="free_blocks")  # fmt: skip
    return 1.0 - free / usable


def emitted_tokens(steps: pd.DataFrame) -> Floats:
    """Return the output tokens of every step, derived from its counters.

    A decode row emits one token and its accepted drafts, a prompt's last chunk one token, a
    dropped row none.
    """
    kinds = kind_codes(steps)
    n_seqs, chunked, dropped, accepted = (
        floats(steps, "steps", name) for name in ("n_seqs", "n_chunked", "n_dropped", "n_accepted")
    )
    emitted: Floats = n_seqs - dropped - chunked + accepted
    return np.where(is_kind(kinds, *OWN_KINDS), emitted, 0.0)


def _by_kind(steps: pd.DataFrame, kinds: Ints) -> dict[str, KindUse]:
    device_ms = device_ns(steps) / NS_PER_MS
    n_seqs, n_tokens = floats(steps, "steps", "n_seqs"), floats(steps, "steps", "n_tokens")
    whole_ms = float(np.nansum(device_ms))
    uses = {}
    for kind in KINDS:
        chosen = is_kind(kinds, kind)
        if not chosen.any():
            continue
        total_ms = float(np.nansum(device_ms[chosen]))
        uses[kind] = KindUse(
            count=int(chosen.sum()),
            device_total_ms=total_ms,
            device_share=ratio(total_ms, whole_ms),
            device_ms=Distribution.of(device_ms[chosen]),
            batch_size=Distribution.of(n_seqs[chosen]),
            tokens=Distribution.of(n_tokens[chosen]),
        )
    return uses


def _time_weighted_mean(values: Floats, steps: pd.DataFrame, rank: Ints) -> float | None:
    """Weight each step's value by the time until its rank schedules again (the last: is done)."""
    if not values.size or np.isnan(values).all():
        return None
    sched, done = floats(steps, "steps", "t_sched"), floats(steps, "steps", "t_done")
    order = np.lexsort((sched, rank))
    ends = np.append(sched[order][1:], done[order][-1:])
    last = np.append(np.diff(rank[order]) != 0, True)
    ends[last] = done[order][last]
    hold, values = ends - sched[order], values[order]
    known = ~np.isnan(values) & ~np.isnan(hold)
    weight = float(hold[known].sum())
    if weight <= 0:
        return float(np.nanmean(values))
    return float((values[known] * hold[known]).sum()) / weight


def _wait_share(run: RunLike, rank: Ints) -> float | None:
    wait_ms, span = floats(run.steps, "steps", "wait_ms"), span_ns(run)
    if span is None or not wait_ms.size or np.isnan(wait_ms).all():
        return None
    rank_ms = (span[1] - span[0]) / NS_PER_MS * int(np.unique(rank).size)
    return ratio(float(np.nansum(wait_ms)), rank_ms)


def _imbalance(device: Floats, rank: Ints, own: Bools) -> float | None:
    ranks, index = np.unique(rank, return_inverse=True)
    if not ranks.size:
        return None
    busy = np.bincount(index, weights=np.where(own, np.nan_to_num(device), 0.0))
    return ratio(float(busy.max()), float(busy.mean()))


def _maximum(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else None


def _total(values: Floats) -> int:
    return int(np.nansum(values))
