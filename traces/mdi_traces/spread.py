"""Spreads what `recorder.py` collected over steps and items: stretches, stays and changes to rows.

All of it is numpy on whole columns. Items, one per sequence and step, are made in portions, so that
a long run never has all of them in memory. Steps that were launched and never processed (a run cut
off by its time limit) are left out.

Read next: `tables.py`, which makes tables of it.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdi_shared.cost.flops import coefficients
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.work import StepWork
from mdi_shared.plan import DECODE, IDLE_DECODE, IDLE_PREFILL, PREFILL, STEP_KINDS
from mdi_traces.columns import Bools, Ints
from mdi_traces.recorder import FIELDS, LANDING_FIELDS, MEASURED_FIELDS, NOT_YET, RankRecorder

PORTION = 1 << 16  # items, and steps, spread at a time
Columns = dict[str, NDArray[Any]]


class RankSteps:
    """One rank's record with names, spread over its processed steps when asked for."""

    def __init__(self, recorder: RankRecorder, shape: ModelShape, keep: int) -> None:
        self.rank = recorder.rank
        self.requests = recorder.requests
        self.shape = shape
        self.keep = keep  # decode steps in flight from one turn to the next
        self.rows = recorder.num_processed
        self.entries: dict[str, dict[str, Ints]] = {
            name: _fields(recorder.entries[name], names) for name, names in FIELDS.items()
        }
        self._columns = {
            name: np.array(values, dtype=np.int64) for name, values in recorder.columns.items()
        }
        measured = np.array(recorder.measured).reshape(-1, len(MEASURED_FIELDS))[: self.rows]
        nothing = (0.0, 0.0, float("nan"))
        self.measured = measured if len(measured) else np.tile(nothing, (self.rows, 1))
        rows = np.arange(self.rows)
        begins = self.entries["stretches"]["row"]
        self._stretch_of = np.searchsorted(begins, rows, side="right") - 1
        self.repetition = rows - begins[self._stretch_of]

    def per_step(self, name: str, *, first_only: bool = False) -> Ints:
        """A field of stretches for each step; with `first_only`, 0 in repetitions."""
        values = self.entries["stretches"][name][self._stretch_of]
        return np.where(self.repetition == 0, values, 0) if first_only else values

    def queue(self, name: str) -> Ints:
        """The length of a queue after each step; it is noted when it changes."""
        noted = self.entries["queues"]
        return noted[name][np.searchsorted(noted["row"], np.arange(self.rows), side="right") - 1]

    def pool(self, name: str) -> Ints:
        """What was left of a pool after planning each step; noted when repetitions change it."""
        noted, stretches = self.entries["pools"], self.entries["stretches"]
        rows = np.concatenate((stretches["row"], noted["row"]))
        order = np.argsort(rows, kind="stable")
        at = np.searchsorted(rows[order], np.arange(self.rows), side="right") - 1
        return np.concatenate((stretches[name], noted[name]))[order[at]]

    @cached_property
    def own(self) -> dict[str, Ints]:
        """What each step has of its own, ns: `LANDING_FIELDS`, and when it was launched."""
        out = {name: self._columns[name][: self.rows] for name in LANDING_FIELDS}
        first, begins = self.repetition == 0, self.per_step
        # The look at the world comes when a step has been processed, `keep` before the last one.
        looks = np.roll(out["t_done"], 1 + self.keep)
        at_launch = (self.repetition == 1) & (begins("has_oldest") == 0)
        looks = np.where(at_launch, begins("t_launch"), looks)
        sched = np.where(first, begins("t_sched"), looks)
        device = out["t_dev_end"] - out["t_dev_start"]
        met, pred = sched.copy(), np.where(first, begins("pred_ns"), device)
        if len(self._columns["met_ns"]):
            later = np.flatnonzero(~first)
            met[later] = self._columns["met_ns"][: len(later)]
            pred[later] = self._columns["pred_ns"][: len(later)]
        planned = np.where(first, begins("t_planned"), met + begins("schedule_ns"))
        return {
            **out, "t_sched": sched, "t_planned": planned, "pred_ns": pred,
            "t_launch": np.where(first, begins("t_launch"), planned + begins("launch_ns")),
            "wait_ns": np.where(first, begins("wait_ns"), met - sched),
        }  # fmt: skip

    def counted(self, entry: str, weight: str | None = None) -> Ints:
        """How many entries each step has, or the sum of one of their fields."""
        noted = self.entries[entry]
        weights = None if weight is None else noted[weight]
        return np.bincount(noted["row"], weights, minlength=self.rows).astype(np.int64)

    def is_kind(self, *kinds: str) -> Bools:
        return np.isin(self.per_step("kind"), [STEP_KINDS.index(kind) for kind in kinds])

    @cached_property
    def decode_rows(self) -> Ints:
        """The rows of decode steps, in order."""
        return np.flatnonzero(self.is_kind(DECODE, IDLE_DECODE))

    @cached_property
    def _decode_shift(self) -> Ints:
        """What the context of each decode step's members exceeds their bases by."""
        return (self.per_step("shift") + self.repetition)[self.decode_rows]

    @cached_property
    def _stays(self) -> dict[str, Ints]:
        """Stays in the order that members have inside a batch."""
        stays = self.entries["stays"]
        order = np.lexsort((stays["seq_id"], stays["tie"], stays["neg_base"]))
        stays = {name: values[order] for name, values in stays.items()}
        stop, last = stays["stop"], len(self.decode_rows)
        stays["stop"] = np.where(stop == NOT_YET, last, np.minimum(stop, last))
        return stays

    # ---- items ---------------------------------------------------------------------------------

    def portions(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of step rows with about `PORTION` items each and so many rows at most."""
        ends = np.cumsum(self.per_step("n_items"))
        first = 0
        while first < self.rows:
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + PORTION, side="right"))
            stop = min(max(stop, first + 1), first + PORTION)
            yield first, stop
            first = stop

    def items(self, first: int, stop: int) -> Columns:
        """One entry per sequence and step, of steps `first` up to `stop`, a portion at most.

        `step_row` indexes the step table.
        """
        prompts = self.entries["prompts"]
        part = slice(*np.searchsorted(prompts["row"], (first, stop)))
        seq, k, ordinals = self._decode_items(*np.searchsorted(self.decode_rows, (first, stop)))
        rows = self.decode_rows[ordinals]
        step_row = np.concatenate((prompts["row"][part], rows))
        q = np.concatenate((prompts["q"][part], self.per_step("rows_each")[rows]))
        seq, k = (np.concatenate((prompts[name][part], values))
                  for name, values in (("seq_id", seq), ("k", k)))  # fmt: skip
        order = _by_step(step_row - first)
        step_row, q, seq, k = (values[order] for values in (step_row, q, seq, k))
        key = (step_row << 32) | seq
        dropped = np.isin(key, self._marks("dropped", first, stop)[0])
        accepted = np.zeros(len(seq), dtype=np.int64)
        wanted, marks = self._marks("accepted", first, stop)
        if len(wanted):
            by_key = np.argsort(key)
            places = by_key[np.searchsorted(key, wanted, sorter=by_key)]
            accepted[places] = self.entries["accepted"]["drafts"][marks]
        goes_on = (self.per_step("n_chunked") == 1)[step_row] & _last_of_row(step_row)
        return {
            "step_row": step_row, "seq_id": seq, "q": q, "k": k, "is_last_chunk": ~goes_on,
            "dropped": dropped, "accepted": accepted,
            "emitted": np.where(goes_on | dropped, 0, 1 + accepted),
        }  # fmt: skip

    def _decode_items(self, first: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """Members of decode steps `first` up to `stop`: sequence, context length, and which step.

        They are in the order of members, and of steps inside a member.
        """
        stays = self._stays
        begin, end = np.maximum(stays["first"], first), np.minimum(stays["stop"], stop)
        here = np.flatnonzero(begin < end)
        begin, counts = begin[here], (end - begin)[here]
        offsets = np.cumsum(counts) - counts
        ordinals = np.arange(counts.sum()) + np.repeat(begin - offsets, counts)
        k = self._decode_shift[ordinals] - np.repeat(stays["neg_base"][here], counts)
        return np.repeat(stays["seq_id"][here], counts), k, ordinals

    def _marks(self, entry: str, first: int, stop: int) -> tuple[Ints, slice]:
        """The keys (row, sequence) of a portion's marks, and where they are."""
        noted = self.entries[entry]
        part = slice(*np.searchsorted(noted["row"], (first, stop)))
        return (noted["row"][part] << 32) | noted["seq_id"][part], part

    # ---- sums ----------------------------------------------------------------------------------

    def works(self) -> dict[str, Ints]:
        """The columns of `StepWork` for each step; all 0 where there was no sequence."""
        out = {name: np.zeros(self.rows, dtype=np.int64) for name in StepWork._fields}
        noted = self.entries["works"]
        seen = noted["row"] < self.rows
        for name, column in out.items():
            column[noted["row"][seen]] = noted[name][seen]
        is_prefill, of_items = self.is_kind(PREFILL, IDLE_PREFILL), self.per_step("n_items")
        counted = ~is_prefill & (of_items > 0) & (self.per_step("rows_each") == 1)
        for first, stop in self.portions():
            rows = first + np.flatnonzero(counted[first:stop])
            if not len(rows):
                continue
            _, k, ordinals = self._decode_items(*np.searchsorted(self.decode_rows, (first, stop)))
            steps = self.decode_rows[ordinals] - first
            order = _by_step(steps)
            keep = order[counted[first:stop][steps[order]]]
            for name, values in _decode_columns(self.shape, k[keep], of_items[rows]).items():
                out[name][rows] = values
        return out

    def last_tokens(self, seq_ids: list[int]) -> dict[int, int]:
        """When sequences got the last of their tokens, ns; those without one are left out."""
        done = self.own["t_done"]
        out: dict[int, int] = {}
        dropped = set(zip(*(self.entries["dropped"][name].tolist() for name in FIELDS["dropped"]),
                          strict=True))  # fmt: skip
        stays, prompts = self._stays, self.entries["prompts"]
        for stay in np.flatnonzero(np.isin(stays["seq_id"], seq_ids)):
            seq, ordinal = int(stays["seq_id"][stay]), int(stays["stop"][stay]) - 1
            while ordinal >= stays["first"][stay]:
                row = int(self.decode_rows[ordinal])
                if (row, seq) not in dropped:
                    out[seq] = max(out.get(seq, NOT_YET), int(done[row]))
                    break
                ordinal -= 1
        seen = prompts["row"] < self.rows
        goes_on = np.zeros(len(seen), dtype=bool)
        cut = self.per_step("n_chunked") == 1
        goes_on[seen] = cut[prompts["row"][seen]] & _last_of_row(prompts["row"])[seen]
        for place in np.flatnonzero(np.isin(prompts["seq_id"], seq_ids) & seen & ~goes_on):
            seq = int(prompts["seq_id"][place])
            out[seq] = max(out.get(seq, NOT_YET), int(done[prompts["row"][place]]))
        return out


def _decode_columns(shape: ModelShape, k: Ints, counts: Ints) -> dict[str, Ints]:
    """The work of decode steps of one row per sequence, whose contexts `k` stand step by step.

    The same numbers as `mdi_shared.cost.work.DecodeWork`.
    """
    starts = np.cumsum(counts) - counts

    def capped(values: Ints, cap: int) -> Ints:
        return np.add.reduceat(np.minimum(values, cap), starts)

    sum_k = np.add.reduceat(k, starts)
    block = shape.candidate_block_size
    blocks = capped((k + block - 1) // block, shape.candidate_topk_blocks)
    index_r2 = shape.num_index_r2_layers * np.add.reduceat(k // 2, starts)
    index_r1 = shape.num_index_r1_layers * sum_k + shape.num_candidate_layers * block * blocks
    core = shape.num_core_r2_layers * capped(k // 2, shape.index_topk)
    core += shape.num_core_r1_layers * capped(k, shape.index_topk)
    window = shape.num_hidden_layers * capped(k, shape.sliding_window)
    keys = (shape.num_kv_source_r2_layers + shape.num_kv_source_r1_layers) * counts
    c: Any = coefficients(shape)  # its sums are as good for arrays
    attn, total = c.flops(counts, counts, keys, core + window, index_r2 + index_r1)
    return {
        "n_seqs": counts, "rows": counts, "consumer_rows": counts, "logit_rows": counts,
        "sum_k": sum_k, "sum_qk": sum_k,
        "max_k": np.maximum.reduceat(k, starts), "min_k": np.minimum.reduceat(k, starts),
        "key_rows": keys, "idx_pairs_r2": index_r2, "idx_pairs_r1": index_r1,
        "core_pairs": core, "swa_pairs": window,
        "flops_attn": attn, "flops_total": total + c.logit_row * counts,
    }  # fmt: skip


def _by_step(steps: Ints) -> Ints:
    """The stable order of a portion's entries by step."""
    return np.argsort(steps.astype(np.uint16), kind="stable")


def _last_of_row(rows: Ints) -> Bools:
    """True for the last entry of each run of equal rows."""
    last = np.ones(len(rows), dtype=bool)
    last[:-1] = rows[1:] != rows[:-1]
    return last


def _fields(flat: "array[int]", names: Sequence[str]) -> dict[str, Ints]:
    table = np.array(flat, dtype=np.int64).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}
