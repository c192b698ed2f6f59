"""What is printed where: results on standard output, everything about them on standard error.

With `--json` standard output holds exactly one JSON document.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

FILE_COLUMNS = 120  # width of tables that do not go to a terminal
PROGRESS_UPDATES = 500
INTERRUPTED = 130  # exit code of a search that Ctrl-C cut short and that shows what it has


def tell(message: str) -> None:
    """Print one line to standard error, where there is one."""
    with suppress(OSError):
        typer.echo(" ".join(message.splitlines()), err=True)


def show_table(*tables: "RenderableType") -> None:
    """Print rich tables (or strings, without markup) to standard output."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else FILE_COLUMNS
    console = Console(width=width, highlight=False, markup=False)
    for table in tables:
        console.print(table, soft_wrap=isinstance(table, str))


def facts_table(title: str, rows: Sequence[tuple[str, str]]) -> "RenderableType":
    """Return names and values under a title; long values wrap."""
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in rows:
        facts.add_row(Text(name), Text(value))
    grid = Table.grid()
    grid.add_row(Text(title, style="bold"))
    grid.add_row(facts)
    return grid


def show_json(document: dict[str, Any]) -> None:
    """Print the one JSON document of a `--json` run."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


@contextmanager
def progress(total: int, noun: str = "requests") -> Iterator[Callable[[int], None] | None]:
    """Show a bar of finished things while the block runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(noun), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        batch, held = max(total // PROGRESS_UPDATES, 1), 0

        def count_up(count: int) -> None:
            nonlocal held
            held += count
            if held >= batch:  # one update per request would cost as much as simulating it
                bar.update(task, advance=held)
                held = 0

        yield count_up
