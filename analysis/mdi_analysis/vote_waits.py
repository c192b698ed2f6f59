"""How much of the time to first token goes by because no prefill may be attempted yet.

Between two votes a group decodes on, whoever waits. Where this is most of the latency, the interval
of the attempts is what to change, not the hardware.

Read next: `usage.py` (what else the steps tell), docs/tuning.md (choosing the interval).
"""

import numpy as np

from mdi_analysis.frames import (
    Bools,
    Floats,
    RunLike,
    config_option,
    floats,
    has_arrived,
    ints,
    is_kind,
    kind_codes,
    ratio,
    series,
)

WATERMARK = 0.9  # of the KV pool; above it no prefill is wanted


def vote_wait_share(run: RunLike) -> float | None:
    """Return the share of all times to first token spent in steps that only no vote kept from
    being a prefill; None when no request has one, or votes and ranks are not recorded.

    Such a step decodes or idles although there is a free seat and memory below the watermark. A
    vote that the other ranks' ballots decide counts, too.
    """
    requests = run.requests
    if not {"vote", "want"} <= set(run.steps.columns) or "rank" not in requests.columns:
        return None
    arrival, sched, first = (
        floats(requests, "requests", name)
        for name in ("arrival_ns", "t_first_sched", "t_first_token")
    )
    known = has_arrived(run) & ~np.isnan(first) & ~np.isnan(sched)
    ranks = floats(requests, "requests", "rank")
    steps_rank, begin = ints(run.steps, "steps", "rank"), floats(run.steps, "steps", "t_sched")
    end, held = floats(run.steps, "steps", "t_done"), _only_votes_hold(run)
    waited = 0.0
    for rank in np.unique(ranks[known]):
        own = np.flatnonzero(steps_rank == rank)
        own = own[np.argsort(begin[own], kind="stable")]
        begins = begin[own]
        ends = np.minimum(end[own], np.append(begins[1:], np.inf))
        spent = np.cumsum(np.where(held[own], ends - begins, 0.0))
        mine = known & (ranks == rank)
        at = np.stack([begins, ends], axis=1).ravel()
        sums = np.stack([np.append(0.0, spent[:-1]), spent], axis=1).ravel()
        before = np.interp(arrival[mine], at, sums)
        waited += float((np.interp(sched[mine], at, sums) - before).sum())
    return ratio(waited, float((first - arrival)[known].sum()))


def _only_votes_hold(run: RunLike) -> Bools:
    """Return which steps could have been a prefill but for the votes."""
    steps = run.steps
    room = np.ones(len(steps), dtype=bool)
    for name, most in (("num_blocks", WATERMARK), ("max_num_seqs", 1.0)):
        size = config_option(run, name)
        if size is not None and size > 0:
            room &= _used(run, name, size) <= most
    no_vote = (series(steps, "steps", "vote").astype(object) == "none").to_numpy()
    voted_down = series(steps, "steps", "want").to_numpy(dtype=bool)
    decodes = is_kind(kind_codes(steps), "decode", "idle_decode")
    held: Bools = decodes & room & (no_vote | voted_down)
    return held


def _used(run: RunLike, name: str, size: int) -> Floats:
    """Return the share of blocks in use, or of seats, one more than taken counting as too many."""
    if name == "num_blocks":
        return 1.0 - floats(run.steps, "steps", "free_blocks") / size
    return (floats(run.steps, "steps", "n_running") + 1) / size
