"""How results are shown: numbers with sensible digits for people, plain data for programs.

No metric is computed here.

Read next: `summary.py` and `compare.py`, which use it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "-"


def plain(value: object) -> Any:  # noqa: ANN401  (the union of JSON types is recursive)
    """Return dataclasses as dicts, tuples as lists, numpy scalars as Python's, NaN as None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, str | int | float), f"{value!r} is not plain data"
    return value


def number(value: float | None) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if value is None or math.isnan(value):
        return ABSENT
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    if digits > 6:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as percent with one decimal."""
    return ABSENT if value is None or math.isnan(value) else f"{value:.1%}"


def change(value: float | None) -> str:
    """Return a relative difference as signed percent with one decimal."""
    if value is None or math.isnan(value):
        return ABSENT
    return f"{round(value, 3) + 0.0:+.1%}"  # adding 0.0 turns -0.0 into 0.0


def counted(n: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as text, to be shown on a terminal or a page; the first `n_text` columns are names.

    `verdicts` say of each row whether its difference is better (1), worse (-1) or neither (0).
    """

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    n_text: int = 1
    verdicts: Sequence[int] = ()

    def rich(self) -> "Table":
        """Return the table for a rich console."""
        headers = self.headers or ("",) * max(map(len, self.rows), default=0)
        return make_table(self.title, headers, self.rows, n_text=self.n_text)


def make_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, n_text: int = 1
) -> "Table":
    """Return a rich table under its title; the first `n_text` columns are text, the rest numbers.

    The title stands above the table, not in it, so that a narrow table does not wrap it.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Text objects throughout: a name with brackets is not markup.
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_header=any(headers)
    )
    for index, header in enumerate(headers):
        table.add_column(Text(header), justify="left" if index < n_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    grid = Table.grid()
    grid.add_row(Text(title, style="bold"))
    if headers:
        grid.add_row(table)
    return grid


def paragraph(text: str) -> "Table":
    """Return a sentence that wraps, to stand between tables."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid()
    grid.add_row(Text(text, style="italic"))
    return grid


def stack(tables: Iterable["Table"]) -> "Table":
    """Return one table that shows the given ones below each other."""
    from rich.table import Table

    grid = Table.grid()
    for table in tables:
        grid.add_row(table)
    return grid
