"""Rows of one or several files, taken column by column, with every bad value located.

A format says only which field is what; it does not know whether a file is CSV, JSON or Parquet.
Nothing is filled in: what is blank where a value is required, or of another kind, is a
`TraceError` naming file, row (the line of a text file) and field.

Read next: `mooncake.py` (a format), `__init__.py` (which format is it?), `containers.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from mdi_shared.errors import TraceError
from mdi_traces.columns import Bools, Ints
from mdi_traces.formats import values
from mdi_traces.formats.containers import Part
from mdi_traces.formats.times import times
from mdi_traces.formats.values import BadValue, Column, shown

NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000

_T = TypeVar("_T")
Array = tuple[NDArray[Any], Bools]  # values, and which rows hold one


class Rows:
    """The rows of `parts` one after another; `file` names them together."""

    def __init__(self, file: str, parts: Sequence[Part]) -> None:
        self.file = file
        self.parts = parts
        self.names = frozenset(name for part in parts for name in part.names)
        self._starts = np.cumsum([0, *(len(part.lines) for part in parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def has(self, name: str) -> bool:
        """Say whether some file has this field."""
        return name in self.names

    def tokens(self, name: str, minimum: int = 1) -> Ints:
        """Return a field of lengths between `minimum` and the largest int32, tokens."""
        lengths = self.required(name, self.arrays(name, values.whole))
        self.refuse(lengths < minimum, name, lengths, f"must be at least {minimum} token")
        self.refuse(lengths >= 2**31, name, lengths, "is too large for a length")
        return lengths

    def times_ns(self, name: str, unit_ns: int | None) -> Ints:
        """Return a field of times in ns; see `times.py`."""
        return self.required(name, self.some_times_ns(name, unit_ns))

    def some_times_ns(self, name: str, unit_ns: int | None) -> Array:
        """Return a field of times in ns, and which rows hold one."""
        return self.arrays(name, lambda column: times(column, unit_ns))

    def texts(self, name: str) -> list[str]:
        """Return a field of texts."""
        found = self.some_texts(name)
        self.required(name, (np.empty(0), np.array([text is not None for text in found])))
        return [text or "" for text in found]

    def some_texts(self, name: str) -> list[str | None]:
        """Return a field of texts, None where it is blank."""
        return self.lists(name, values.texts)

    def some_int_lists(self, name: str) -> list[list[int] | None]:
        """Return a field of lists of whole numbers, None where it is blank."""
        return self.lists(name, values.int_lists)

    def object_lists(self, name: str) -> list[list[dict[str, Any]]]:
        """Return a field of lists of objects."""
        found = self.lists(name, lambda column: list(values.objects(column)))
        for row, cell in enumerate(found):
            if not isinstance(cell, list) or not all(isinstance(item, dict) for item in cell):
                self.fail(row, name, "must be a list of objects")
        return found

    def arrays(self, name: str, convert: Callable[[Column], Array]) -> Array:
        """Convert a field into an array, and say which rows hold a value."""
        found = list(self._converted(name, convert))
        return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])

    def lists(self, name: str, convert: Callable[[Column], list[Any]]) -> list[Any]:
        """Convert a field into a list."""
        return [cell for part in self._converted(name, convert) for cell in part]

    def required(self, name: str, found: Array) -> NDArray[Any]:
        """Return the values; raises `TraceError` where there is none."""
        array, valid = found
        if not self.has(name):
            raise TraceError(self.file, "the column is missing", column=name)
        if not valid.all():
            row = int(valid.argmin())
            self.fail(row, name, self._part(row)[0].blank)
        return array

    def refuse(
        self, bad: Bools, name: str, cells: Sequence[Any] | NDArray[Any], problem: str
    ) -> None:
        """Raise `TraceError` for the first row where `bad` is True."""
        if bad.any():
            row = int(bad.argmax())
            self.fail(row, name, f"{shown(cells[row])} {problem}")

    def fail(self, row: int, name: str, problem: str) -> NoReturn:
        """Raise `TraceError` for a 0-based row and a field."""
        file, line = self.place(row)
        raise TraceError(file, problem, row=line, column=name)

    def place(self, row: int) -> tuple[str, int]:
        """Return the file that a 0-based row came from and its row, or line, there."""
        part, inside = self._part(row)
        return part.file, int(part.lines[inside])

    def _part(self, row: int) -> tuple[Part, int]:
        index = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.parts[index], row - int(self._starts[index])

    def _converted(self, name: str, convert: Callable[[Column], _T]) -> Iterator[_T]:
        """Convert a field file by file; in a file without it every row is blank."""
        for start, part in zip(self._starts.tolist(), self.parts, strict=False):
            blank: Column = [None] * len(part.lines)
            try:
                yield convert(part.column(name) if name in part.names else blank)
            except BadValue as error:
                if error.row is None:
                    raise TraceError(part.file, error.problem, column=name) from error
                self.fail(start + error.row, name, error.problem)
