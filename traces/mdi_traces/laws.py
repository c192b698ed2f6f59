"""Conservation laws of a run: tokens, blocks and times add up, whoever recorded them.

Each law is one function from the tables to the first row that breaks it. They judge neither speed
nor policy, and never look at how a step was planned.

Read next: `check.py` (who runs them), docs/rules.md, R5 and R35 (where they come from).
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from mdi_traces.columns import Bools, Ints
from mdi_traces.law_tables import Broken, Tables, Untestable
from mdi_traces.schema import ITEMS, REQUESTS, STEPS


def _first(table: str, bad: Bools, describe: Callable[[int], str]) -> Broken | None:
    if not bad.any():
        return None
    row = int(bad.argmax())
    return Broken(table, row, describe(row))


def _equal(
    t: Tables,
    table: str,
    left: tuple[str, Ints],
    right: tuple[str, Ints],
    where: Bools | None = None,
) -> Broken | None:
    """Find the first row where two named quantities differ, among the rows `where` is True."""
    (left_name, a), (right_name, b) = left, right

    def describe(row: int) -> str:
        of = f" of request {t.req_id(row)}" if table == REQUESTS else ""
        return f"{left_name}{of} is {a[row]}, but {right_name} is {b[row]}"

    return _first(table, a != b if where is None else (a != b) & where, describe)


def every_request_ends(t: Tables) -> Broken | None:
    """A request has a finish reason, or a reason why it has none, and not both."""
    reasons = t.valid("finish_reason").astype(int) + t.valid("unfinished_reason")
    return _first(REQUESTS, reasons != 1, lambda row: f"request {t.req_id(row)} has "
                  + ("both a finish_reason and an unfinished_reason" if reasons[row] else
                     "neither a finish_reason nor an unfinished_reason"))  # fmt: skip


def request_times_ascend(t: Tables) -> Broken | None:
    """arrival <= t_submit <= t_first_sched <= t_first_token <= t_last_token <= t_finish."""
    latest = t.ints(REQUESTS, "arrival_ns")
    for name in ("t_submit", "t_first_sched", "t_first_token", "t_last_token", "t_finish"):
        known, time = t.valid(name), t.ints(REQUESTS, name)
        early = known & (time < latest)
        if early.any():
            row = int(early.argmax())
            return Broken(REQUESTS, row, f"{name} = {time[row]} of request {t.req_id(row)} comes "
                          f"before what it follows, at {latest[row]}")  # fmt: skip
        latest = np.where(known, time, latest)
    missing = t.completed & ~(t.valid("t_first_token") & t.valid("t_finish"))
    return _first(REQUESTS, missing, lambda row: f"request {t.req_id(row)} finished without "
                  "t_first_token or t_finish")  # fmt: skip


def step_times_ascend(t: Tables) -> Broken | None:
    """t_sched <= t_launch <= t_dev_start <= t_dev_end <= t_done in every step."""
    names = ("t_sched", "t_launch", "t_dev_start", "t_dev_end", "t_done")
    for a, b in pairwise(names):
        before, after = t.ints(STEPS, a), t.ints(STEPS, b)
        if (after < before).any():
            row = int((after < before).argmax())
            return Broken(STEPS, row, f"{b} = {after[row]} is before {a} = {before[row]}")
    return None


def schedule_times_ascend(t: Tables) -> Broken | None:
    """A rank plans its steps one after the other."""
    sched = t.ints(STEPS, "t_sched")
    for rank, rows in t.ranks():
        falls = np.flatnonzero(np.diff(sched[rows]) < 0)
        if len(falls):
            row, previous = int(rows[falls[0] + 1]), int(rows[falls[0]])
            return Broken(STEPS, row, f"t_sched = {sched[row]} of rank {rank} is before that of "
                          f"its step before, {sched[previous]}")  # fmt: skip
    return None


def steps_have_no_gaps(t: Tables) -> Broken | None:
    """A rank's step numbers go up by one."""
    step = t.ints(STEPS, "step")
    for rank, rows in t.ranks():
        jumps = np.flatnonzero(np.diff(step[rows]) != 1)
        if len(jumps):
            row, previous = int(rows[jumps[0] + 1]), int(rows[jumps[0]])
            return Broken(STEPS, row, f"step {step[row]} of rank {rank} follows step "
                          f"{step[previous]}")  # fmt: skip
    return None


def ranks_agree_on_phase(t: Tables) -> Broken | None:
    """At one step number all ranks prefill, decode, or do both; a flush has no phase."""
    rows = np.flatnonzero(t.phase >= 0)
    step, phase = t.ints(STEPS, "step")[rows], t.phase[rows]
    numbers, place = np.unique(step, return_inverse=True)
    least, most = np.full(len(numbers), 2), np.zeros(len(numbers), dtype=np.int64)
    np.minimum.at(least, place, phase)
    np.maximum.at(most, place, phase)
    split = least < most
    if not split.any():
        return None
    row = int(rows[np.flatnonzero(split[place])].min())
    return Broken(STEPS, row, f"at step {t.ints(STEPS, 'step')[row]} ranks run steps of different "
                  "kinds")  # fmt: skip


def padding_only_adds(t: Tables) -> Broken | None:
    """The device runs at least the rows that were planned."""
    rows, padded = t.ints(STEPS, "n_tokens"), t.ints(STEPS, "n_tokens_padded")
    return _first(STEPS, padded < rows, lambda row: f"n_tokens_padded = {padded[row]} is less "
                  f"than n_tokens = {rows[row]}")  # fmt: skip


def memory_returns(t: Tables) -> Broken | None:
    """When nothing is unfinished, a rank ends with every block and slot it began with.

    The last step's own memory comes back after it is recorded, so a recorder notes what is free
    when the run is over, per rank, as `left_free` in the configuration.
    """
    if t.unfinished.any():
        raise Untestable(REQUESTS, f"{int(t.unfinished.sum())} requests are unfinished")
    left = t.config.get("left_free")
    names = ("free_blocks", "free_slots")
    if not isinstance(left, Mapping) or not all(left.get(name) for name in names):
        raise Untestable(STEPS, "the run's metadata does not say what was free at its end")
    for name, configured in zip(names, _pools(t.config), strict=True):
        free = t.ints(STEPS, name)
        for (rank, rows), end in zip(t.ranks(), left[name], strict=False):
            whole = configured or int(free[rows].max())
            if end != whole:
                return Broken(STEPS, int(rows[-1]), f"{name} of rank {rank} ends at {end}, but "
                              f"{whole} were free when nothing was held")  # fmt: skip
    return None


def _pools(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return blocks and slots that can be handed out, as far as the configuration says."""
    options = config.get("scheduler", config)
    names = ("num_blocks", "max_num_seqs", "state_slot_ratio")
    if not isinstance(options, Mapping) or not all(name in options for name in names):
        return None, None
    try:
        scheduler = SchedulerConfig.from_mapping(options)
    except ConfigError:  # recorded by a version with other options
        return None, None
    return scheduler.num_blocks - 1, scheduler.num_slots - 1


def items_belong(t: Tables) -> Broken | None:
    """Every item names a request and a step that are on record."""

    def describe(row: int) -> str:
        item = {name: t.table(ITEMS)[name][row].as_py() for name in ("req_id", "rank", "step")}
        return f"no request or step on record for {item}"

    return _first(ITEMS, (t.item_request < 0) | (t.item_step < 0), describe)


def items_are_consistent(t: Tables) -> Broken | None:
    """q >= 1, cached = k - q >= 0, and only a last chunk that was not dropped emits tokens."""
    q, k, cached = t.ints(ITEMS, "q"), t.ints(ITEMS, "k"), t.ints(ITEMS, "cached")
    bad = (q < 1) | (cached < 0) | (cached != k - q)
    broken = _first(ITEMS, bad, lambda row: f"q = {q[row]}, k = {k[row]}, cached = {cached[row]}")
    if broken:
        return broken
    emitted, dropped = t.ints(ITEMS, "emitted"), t.item_flags("dropped")
    silent = dropped | ~t.item_flags("is_last_chunk")
    return _first(ITEMS, (emitted < 0) | (silent & (emitted != 0)), lambda row: (
        f"emitted = {emitted[row]} in a row that "
        f"{'was dropped' if dropped[row] else 'is no last chunk'}"))  # fmt: skip


def step_rows_match_items(t: Tables) -> Broken | None:
    """n_tokens is the sum of q over the step's items, and n_seqs their number."""
    q = t.ints(ITEMS, "q")
    rows, seqs = t.ints(STEPS, "n_tokens"), t.ints(STEPS, "n_seqs")
    count = t.per_step(np.ones_like(q))
    return _equal(t, STEPS, ("n_tokens", rows), ("the sum of q", t.per_step(q))) or _equal(
        t, STEPS, ("n_seqs", seqs), ("the number of items", count)
    )


def prompt_tokens_are_computed(t: Tables) -> Broken | None:
    """Prefill rows of a completed request are its prompt's not cached or found, and recomputed."""
    q = t.ints(ITEMS, "q")
    if (t.completed & ~t.valid("n_recomputed_tokens")).any():
        raise Untestable(REQUESTS, "n_recomputed_tokens was not recorded")
    due = t.ints(REQUESTS, "prompt_len") - t.ints(REQUESTS, "cached_len")
    due = due - t.ints(REQUESTS, "hit_tokens") + t.ints(REQUESTS, "n_recomputed_tokens")
    computed = t.per_request(np.where(t.prompt_items, q, 0))
    return _equal(
        t, REQUESTS, ("the number of prefill rows", computed),
        ("prompt_len - cached_len - hit_tokens + n_recomputed_tokens", due), t.completed,
    )  # fmt: skip


def hits_are_known(t: Tables) -> Broken | None:
    """A prefix hit is at most what was known, and leaves a token of the prompt to compute."""
    hit, known, prompt = (t.ints(REQUESTS, n) for n in ("hit_tokens", "known_tokens", "prompt_len"))
    bad = (hit < 0) | (hit > known) | (known >= prompt)
    return _first(REQUESTS, bad, lambda row: f"hit_tokens = {hit[row]} and known_tokens = "
                  f"{known[row]} of request {t.req_id(row)} of {prompt[row]} tokens")  # fmt: skip


def output_tokens_are_emitted(t: Tables) -> Broken | None:
    """The tokens emitted over a request's items are its output_len."""
    emitted = t.per_request(t.ints(ITEMS, "emitted"))
    output = t.ints(REQUESTS, "output_len")
    return _equal(t, REQUESTS, ("output_len", output), ("the sum of emitted", emitted))


def content_is_unchanged(t: Tables) -> Broken | None:
    """A run read from files has the content hash that it was saved with."""
    saved = t.run.content
    if saved is None or saved == (found := t.run.content_hash()):
        return None
    return Broken(REQUESTS, None, f"its content hash is {found:.12}, it was saved with {saved:.12}")


Law = Callable[[Tables], Broken | None]
LAWS: Mapping[str, Law] = MappingProxyType({
    law.__name__: law
    for law in (
        every_request_ends, request_times_ascend, step_times_ascend, schedule_times_ascend,
        steps_have_no_gaps, ranks_agree_on_phase, padding_only_adds, memory_returns,
        items_belong, items_are_consistent, step_rows_match_items, prompt_tokens_are_computed,
        hits_are_known, output_tokens_are_emitted, content_is_unchanged,
    )
})  # fmt: skip
