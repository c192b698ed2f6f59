"""The columns of a run as the laws want them: numpy arrays, joined by request and by step.

It decides nothing: `laws.py` does.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mdi_traces.columns import Bools, Ints, bools, codes, ints, valid_rows
from mdi_traces.run import Run
from mdi_traces.schema import ITEMS, STEPS

_PHASES = {"prefill": 0, "idle_prefill": 0, "decode": 1, "idle_decode": 1,
           "mixed": 2, "idle_mixed": 2}  # fmt: skip  # flush has none
_COMPLETED = ("stop", "length")
_MAX_STEPS = 2**40  # a rank and a step number share one sort key


class Broken(NamedTuple):
    """The first row of `table` that breaks a law, 0-based, and the values that do."""

    table: str
    row: int | None
    detail: str


class Untestable(Exception):
    """A law cannot be tested on this run; the message says why."""

    def __init__(self, table: str, why: str) -> None:
        super().__init__(why)
        self.table = table


class Tables:
    """Columns of a run as numpy arrays, each converted once, when a law first asks for it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.metadata.config
        self._columns: dict[tuple[str, str], Ints] = {}

    def table(self, table: str) -> pa.Table:
        """Return a table; raises `Untestable` when it was not recorded."""
        if table != ITEMS:
            return self.run.steps_table if table == STEPS else self.run.requests_table
        if self.run.items_table is None:
            raise Untestable(ITEMS, "no items were recorded")
        return self.run.items_table

    def ints(self, table: str, name: str) -> Ints:
        """Return an integer column; null is 0 (see `valid`)."""
        if (table, name) not in self._columns:
            self._columns[table, name] = ints(self.table(table)[name])
        return self._columns[table, name]

    def item_flags(self, name: str) -> Bools:
        """Return a boolean column of the items."""
        return bools(self.table(ITEMS)[name])

    def valid(self, name: str) -> Bools:
        """Say which requests have a value in a column."""
        return valid_rows(self.run.requests_table[name])

    @cached_property
    def phase(self) -> Ints:
        """0 for prefill steps, 1 for decode steps, 2 for mixed ones, -1 for a flush."""
        index, names = codes(self.run.steps_table["kind"])
        phases = np.array([_PHASES.get(name, -1) for name in names], dtype=np.int64)
        return phases[index] if len(index) else index

    @cached_property
    def completed(self) -> Bools:
        """Requests whose prompt was computed as a whole and whose output ended by itself."""
        index, names = codes(self.run.requests_table["finish_reason"])
        return np.isin(index, [names.index(name) for name in _COMPLETED if name in names])

    @cached_property
    def unfinished(self) -> Bools:
        """Requests without a finish reason."""
        return ~self.valid("finish_reason")

    def req_id(self, row: int) -> str:
        """Return the id of a request, for messages."""
        return repr(self.run.requests_table["req_id"][row].as_py())

    @cached_property
    def item_request(self) -> Ints:
        """Row of each item's request in the request table, -1 when it is not there."""
        index, names = codes(self.table(ITEMS)["req_id"])
        ids = self.run.requests_table["req_id"].to_pylist()
        row_of = {name: row for row, name in enumerate(ids)}
        rows = np.array([row_of.get(name, -1) for name in names], dtype=np.int64)
        return rows[index] if len(index) else index

    @cached_property
    def item_step(self) -> Ints:
        """Row of each item's step in the step table, -1 when it is not there."""
        keys = self.ints(STEPS, "rank") * _MAX_STEPS + self.ints(STEPS, "step")
        wanted = self.ints(ITEMS, "rank") * _MAX_STEPS + self.ints(ITEMS, "step")
        if len(keys) == 0:
            return np.full(len(wanted), -1, dtype=np.int64)
        order = np.argsort(keys, kind="stable")
        place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        return np.where(keys[order][place] == wanted, order[place], -1)

    @cached_property
    def prompt_items(self) -> Bools:
        """Items that run a prompt.

        In a mixed step, those that do not go on right behind a row that was to give a token.
        """
        known = self.item_step >= 0
        phase = np.full(len(known), -1)
        phase[known] = self.phase[self.item_step[known]]
        request, k, cached = self.item_request, self.ints(ITEMS, "k"), self.ints(ITEMS, "cached")
        order = np.lexsort((self.ints(ITEMS, "step"), request))
        goes_on = np.zeros(len(known), dtype=bool)
        goes_on[order[1:]] = (
            (request[order[1:]] == request[order[:-1]])
            & (cached[order[1:]] == k[order[:-1]])
            & self.item_flags("is_last_chunk")[order[:-1]]
        )
        prompts: Bools = (phase == 0) | ((phase == 2) & ~goes_on)
        return prompts

    def per_step(self, values: Ints) -> Ints:
        """Sum a value of the items over the rows of the step table."""
        return sums(self.item_step, values, len(self.run.steps_table))

    def per_request(self, values: Ints) -> Ints:
        """Sum a value of the items over the rows of the request table."""
        return sums(self.item_request, values, len(self.run.requests_table))

    def ranks(self) -> Iterator[tuple[int, Ints]]:
        """Yield each rank and its rows of the step table, in the table's order."""
        rank = self.ints(STEPS, "rank")
        for number in np.unique(rank).tolist():
            yield number, np.flatnonzero(rank == number)


def sums(groups: Ints, values: Ints, count: int) -> Ints:
    """Sum `values` by group number, 0 to `count` - 1; group -1 is left out."""
    known = groups >= 0
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, groups[known], values[known])
    return total
