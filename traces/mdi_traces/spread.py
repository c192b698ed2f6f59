"""Spreads what `recorder.py` collected over steps and items: stretches, stays and changes to rows.

All of it is numpy on whole columns. Items, one per sequence and step, are made in portions, so that
a long run never has all of them in memory. Steps that were launched and never processed (a run cut
off by its time limit) are left out.

Read next: `tables.py`, which makes tables of it.
"""

from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.work import StepWork
from mdi_shared.plan import DECODE, IDLE_DECODE, IDLE_MIXED, MIXED, STEP_KINDS
from mdi_traces.columns import Bools, Ints
from mdi_traces.decode_sums import decode_columns
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
        self.request_of = np.array([log.row for log in recorder.requests], dtype=np.int64)
        self.first, self.rows = 0, recorder.num_processed
        self.entries: dict[str, dict[str, Ints]] = {
            name: _fields(recorder.entries[name], names) for name, names in FIELDS.items()
        }
        self.columns = {
            name: np.array(values, dtype=np.int64) for name, values in recorder.columns.items()
        }
        measured = np.array(recorder.measured).reshape(-1, len(MEASURED_FIELDS))[: self.rows]
        nothing = np.broadcast_to((0.0, 0.0, float("nan")), (self.rows, len(MEASURED_FIELDS)))
        self.measured = measured if len(measured) else nothing
        rows = np.arange(self.rows)
        begins = self.entries["stretches"]["row"]
        self.stretch_of = np.searchsorted(begins, rows, side="right") - 1
        self.repetition = rows - begins[self.stretch_of]

    def part(self, first: int, stop: int) -> "RankSteps":
        """Return the same with no other step rows than these; its items are those of the whole."""
        self.decode_rows, self._decode_shift, self.stays  # noqa: B018 - made of the whole
        part = copy(self)
        for name in ("measured", "stretch_of", "repetition"):
            setattr(part, name, getattr(self, name)[first:stop])
        part.first, part.rows = first, stop - first
        return part

    def of_part(self, columns: dict[str, Ints]) -> dict[str, Ints]:
        """Cut columns with an entry per step to these rows."""
        return {name: values[self.first : self.first + self.rows]
                for name, values in columns.items()}  # fmt: skip

    def per_step(self, name: str, *, first_only: bool = False) -> Ints:
        """A field of stretches for each step; with `first_only`, 0 in repetitions."""
        values = self.entries["stretches"][name][self.stretch_of]
        return np.where(self.repetition == 0, values, 0) if first_only else values

    def numbers(self) -> Ints:
        """The engine's step numbers."""
        return self.per_step("step") + self.repetition

    def queue(self, name: str) -> Ints:
        """The length of a queue after each step; it is noted when it changes."""
        noted = self.entries["queues"]
        return noted[name][np.searchsorted(noted["row"], self.all_rows, side="right") - 1]

    def pool(self, name: str) -> Ints:
        """What was left of a pool after planning each step; noted when repetitions change it."""
        noted, stretches = self.entries["pools"], self.entries["stretches"]
        rows = np.concatenate((stretches["row"], noted["row"]))
        order = np.argsort(rows, kind="stable")
        at = np.searchsorted(rows[order], self.all_rows, side="right") - 1
        return np.concatenate((stretches[name], noted[name]))[order[at]]

    @property
    def all_rows(self) -> Ints:
        return self.first + np.arange(self.rows)

    def times(self) -> dict[str, Ints]:
        """When each step was launched, ran and was processed, ns; see `recorder.py`."""
        out = self.of_part({name: self.columns[name] for name in LANDING_FIELDS})
        first, begins = self.repetition == 0, self.per_step
        # The look at the world comes when a step has been processed, `keep` before the last one.
        looks = self.columns["t_done"][np.maximum(self.all_rows - 1 - self.keep, 0)]
        at_launch = (self.repetition == 1) & (begins("has_oldest") == 0)
        looks = np.where(at_launch, begins("t_launch"), looks)
        sched = np.where(first, begins("t_sched"), looks)
        device = out["t_dev_end"] - out["t_dev_start"]
        met, pred = sched.copy(), np.where(first, begins("pred_ns"), device)
        if len(self.columns["met_ns"]):
            later = np.flatnonzero(~first)
            # Each stretch has an entry less than steps; those before this part are skipped.
            skipped = self.first - int(
                np.searchsorted(self.entries["stretches"]["row"], self.first)
            )
            for column, name in ((met, "met_ns"), (pred, "pred_ns")):
                column[later] = self.columns[name][skipped : skipped + len(later)]
        planned = np.where(first, begins("t_planned"), met + begins("schedule_ns"))
        ends = self.columns["t_dev_end"]
        free = np.where(self.all_rows > 0, ends[self.all_rows - 1], out["t_dev_start"])
        return {
            **out, "t_sched": sched, "t_planned": planned, "pred_ns": pred, "device_free": free,
            "t_launch": np.where(first, begins("t_launch"), planned + begins("launch_ns")),
            "wait_ns": np.where(first, begins("wait_ns"), met - sched),
        }  # fmt: skip

    def counted(self, entry: str, weight: str | None = None) -> Ints:
        """How many entries each step has, or the sum of one of their fields."""
        rows, noted = self.entries[entry]["row"] - self.first, self.entries[entry]
        here = (rows >= 0) & (rows < self.rows)
        weights = None if weight is None else noted[weight][here]
        return np.bincount(rows[here], weights, minlength=self.rows).astype(np.int64)

    def is_kind(self, *kinds: str) -> Bools:
        return np.isin(self.per_step("kind"), [STEP_KINDS.index(kind) for kind in kinds])

    @cached_property
    def decode_rows(self) -> Ints:
        """The rows of steps in which whoever runs decodes, in order."""
        return np.flatnonzero(self.is_kind(DECODE, IDLE_DECODE, MIXED, IDLE_MIXED))

    @cached_property
    def _decode_shift(self) -> Ints:
        """What the context of each decode step's members exceeds their bases by."""
        return (self.per_step("shift") + self.repetition)[self.decode_rows]

    @cached_property
    def stays(self) -> dict[str, Ints]:
        """Stays in the order that members have inside a batch."""
        stays = self.entries["stays"]
        order = np.lexsort((stays["seq_id"], stays["tie"], stays["neg_base"]))
        stays = {name: values[order] for name, values in stays.items()}
        stop, last = stays["stop"], len(self.decode_rows)
        stays["stop"] = np.where(stop == NOT_YET, last, np.minimum(stop, last))
        return stays

    # ---- items ---------------------------------------------------------------------------------

    def portions(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows with about `PORTION` items each and so many rows at most."""
        ends = np.cumsum(self.per_step("n_items"))
        first = 0
        while first < self.rows:
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + PORTION, side="right"))
            stop = min(max(stop, first + 1), first + PORTION)
            yield self.first + first, self.first + stop
            first = stop

    def items(self, first: int, stop: int) -> Columns:
        """One entry per sequence and step, of steps `first` up to `stop`, a portion at most.

        `step_row` indexes the step table.
        """
        prompts = self.entries["prompts"]
        part = slice(*np.searchsorted(prompts["row"], (first, stop)))
        seq, k, ordinals = self._decode_items(*np.searchsorted(self.decode_rows, (first, stop)))
        rows = self.decode_rows[ordinals]
        step_row = np.concatenate((rows, prompts["row"][part]))  # in mixed steps prompts come last
        q = np.concatenate((self.per_step("rows_each")[rows], prompts["q"][part]))
        seq, k = (np.concatenate((values, prompts[name][part]))
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
        goes_on = (self.per_step("n_chunked") == 1)[step_row] & last_of_row(step_row)
        return {
            "step_row": step_row, "seq_id": seq, "q": q, "k": k, "is_last_chunk": ~goes_on,
            "dropped": dropped, "accepted": accepted,
            "emitted": np.where(goes_on | dropped, 0, 1 + accepted),
        }  # fmt: skip

    def _decode_items(self, first: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """Members of decode steps `first` up to `stop`: sequence, context length, and which step.

        They are in the order of members, and of steps inside a member.
        """
        stays = self.stays
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
        seen = (noted["row"] >= self.first) & (noted["row"] < self.first + self.rows)
        for name, column in out.items():
            column[noted["row"][seen] - self.first] = noted[name][seen]
        of_items = self.per_step("n_items")
        counted = self.is_kind(DECODE) & (self.per_step("rows_each") == 1)
        for first, stop in self.portions():
            here = slice(first - self.first, stop - self.first)
            rows = here.start + np.flatnonzero(counted[here])
            if not len(rows):
                continue
            _, k, ordinals = self._decode_items(*np.searchsorted(self.decode_rows, (first, stop)))
            steps = self.decode_rows[ordinals] - first
            order = _by_step(steps)
            keep = order[counted[here][steps[order]]]
            for name, values in decode_columns(self.shape, k[keep], of_items[rows]).items():
                out[name][rows] = values
        return out


def _by_step(steps: Ints) -> Ints:
    """The stable order of a portion's entries by step."""
    return np.argsort(steps.astype(np.uint16), kind="stable")


def last_of_row(rows: Ints) -> Bools:
    """True for the last entry of each run of equal rows."""
    last = np.ones(len(rows), dtype=bool)
    last[:-1] = rows[1:] != rows[:-1]
    return last


def _fields(flat: "array[int]", names: Sequence[str]) -> dict[str, Ints]:
    table = np.array(flat, dtype=np.int64).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}
