"""The tables of one run, recorded or simulated, and their three files.

`Run` holds Arrow tables and shows them as pandas frames on demand; pandas is not imported before.
It computes nothing: metrics are the business of `mdi_analysis`, conservation laws of `check.py`.

Read next: `schema.py` (columns), `check.py` (is the run sound?), docs/trace-format.md.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mdi_shared.errors import TraceError
from mdi_traces.columns import ints
from mdi_traces.io import read_content, read_table, write_parquet
from mdi_traces.saving import RUN_ENDINGS, replacing_run, run_files, run_prefix
from mdi_traces.schema import ITEMS, REQUESTS, SCHEMAS, STEPS, Metadata
from mdi_traces.spans import TokenSpans, spans_of_items

if TYPE_CHECKING:
    import pandas as pd

_SAVED_MEANWHILE = 20  # times that a run may be saved anew while it is being read


class Run:
    """Steps, step items and requests of one run, with the metadata they share.

    Steps and items are tables, or functions that make or read them piece by piece, each time anew:
    what takes the pieces as they come needs no memory for all of them. `items` may be None (not
    recorded). `content` is the `content_hash` that a run was saved with. `spans` makes what items
    say of tokens without a row for each.
    """

    def __init__(
        self,
        steps: pa.Table | Callable[[], Iterable[pa.Table]],
        requests: pa.Table,
        metadata: Metadata,
        items: pa.Table | Callable[[], Iterable[pa.Table]] | None = None,
        content: str | None = None,
        spans: Callable[[], Iterable[TokenSpans]] | None = None,
    ) -> None:
        self.requests_table = requests
        self.metadata = metadata
        self.content = content
        self._steps = steps
        self._items = items
        self._spans = spans

    @cached_property
    def steps_table(self) -> pa.Table:
        """The step table, made now if it was not before."""
        return _whole(self._steps(), STEPS) if callable(self._steps) else self._steps

    @cached_property
    def items_table(self) -> pa.Table | None:
        """The item table, made or read now if it was not before; None when not recorded."""
        return _whole(self._items(), ITEMS) if callable(self._items) else self._items

    def step_pieces(self) -> Iterator[pa.Table]:
        """Yield the step table in pieces, in order of rank and step."""
        if callable(self._steps) and "steps_table" not in self.__dict__:
            yield from self._steps()
        else:
            yield self.steps_table

    def item_pieces(self) -> Iterator[pa.Table]:
        """Yield the item table in pieces, in order of rank and step; nothing when not recorded."""
        if callable(self._items) and "items_table" not in self.__dict__:
            yield from self._items()
        elif self.items_table is not None:
            yield self.items_table

    def token_spans(self) -> Iterator[TokenSpans]:
        """Yield in which steps sequences gave tokens, in order of time on each rank.

        Nothing when items were not recorded.
        """
        yield from spans_of_items(self.item_pieces()) if self._spans is None else self._spans()

    @property
    def has_items(self) -> bool:
        """Say whether items were recorded, without making or reading them."""
        return self._items is not None

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """Steps as a data frame; one row per rank and step."""
        return to_frame(self.steps_table)

    @cached_property
    def items(self) -> "pd.DataFrame | None":
        """Step items as a data frame, or None; one row per sequence and step."""
        return None if self.items_table is None else to_frame(self.items_table)

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """Requests as a data frame; integers that can be null are pandas' nullable integers."""
        return to_frame(self.requests_table)

    def save(self, prefix: str | os.PathLike[str], *, items: bool = True) -> list[Path]:
        """Write PREFIX.items.parquet, PREFIX.steps.parquet and PREFIX.requests.parquet.

        Returns the paths written. `items=False`, or a run without items, leaves the first out
        (and removes one of an earlier run of this name). An earlier run is replaced as a whole or
        stays. Pieces are written as they are made. Raises `SaveError`.
        """
        content = _Content(self.requests_table)
        pieces = {STEPS: content.passing(self.step_pieces()), ITEMS: self.item_pieces(),
                  REQUESTS: [self.requests_table]}  # fmt: skip
        if not (items and self.has_items):
            del pieces[ITEMS]
        with replacing_run(prefix) as place:
            for kind, tables in pieces.items():
                metadata = replace(self.metadata, table=kind)
                write_parquet(place(kind), tables, metadata, content=content.hash)
        base = run_prefix(prefix)
        return [Path(base + RUN_ENDINGS[kind]) for kind in RUN_ENDINGS if kind in pieces]

    def content_hash(self) -> str:
        """Return a hash by which the files of this run know each other; equal runs, equal hash.

        Runs of equal options have equal metadata: what happened when tells them apart.
        """
        content = _Content(self.requests_table)
        for _ in content.passing(self.step_pieces()):
            pass
        return content.hash()


class _Content:
    """Takes the hash of a run while its step table passes by."""

    def __init__(self, requests: pa.Table) -> None:
        self._requests = requests
        self._digest = hashlib.sha256()
        self._tokens: list[bytes] = []  # hashed behind all times, as files of any age have it

    def passing(self, pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for piece in pieces:
            self._digest.update(ints(piece["t_done"]).tobytes())
            self._tokens.append(ints(piece["n_tokens"]).tobytes())
            yield piece

    def hash(self) -> str:
        """Return the hash; all steps have passed."""
        digest = self._digest.copy()
        for tokens in self._tokens:
            digest.update(tokens)
        for name in ("arrival_ns", "prompt_len", "t_first_token", "t_finish"):
            digest.update(ints(self._requests[name], null=-1).tobytes())
        digest.update("\n".join(self._requests["req_id"].to_pylist()).encode())
        return digest.hexdigest()


def _whole(pieces: Iterable[pa.Table], kind: str) -> pa.Table:
    """Return one table of one chunk per column, which is read faster than several."""
    tables = list(pieces) or [SCHEMAS[kind].empty_table()]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run by its prefix or by any one of its files; items are read when first used.

    Raises `TraceError` when a file is missing, damaged, or of another run than the others.
    """
    for _ in range(_SAVED_MEANWHILE):
        files = _look(path)
        try:
            return _load(run_prefix(path), files)
        except TraceError:
            if files is not None and _look(path) == files:
                raise
    raise TraceError(str(path), "is saved anew all the time, so it cannot be read")


def _look(path: str | os.PathLike[str]) -> dict[str, tuple[Path, int]] | None:
    """Return path and identity of each file of a run; None when one moved between two looks."""
    try:
        return {kind: (file, file.stat().st_ino) for kind, file in run_files(path).items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TraceError(str(path), f"cannot be read: {error.strerror or error}") from error


def _load(base: str, files: Mapping[str, tuple[Path, int]] | None) -> Run:
    if files is None or REQUESTS not in files:
        raise TraceError(base + RUN_ENDINGS[REQUESTS],
                         "not found: no such run, or it was not written to the end")  # fmt: skip
    requests_path = files[REQUESTS][0]
    requests, metadata = read_table(requests_path, REQUESTS)
    content = read_content(requests_path)
    if STEPS not in files:
        raise TraceError(base + RUN_ENDINGS[STEPS], "not found")
    steps = _read_part(files[STEPS][0], STEPS, metadata, content)
    if ITEMS in files:
        _require_same(files[ITEMS][0], content)
        return Run(
            steps, requests, metadata, lambda: [_read_items(base, metadata, content)], content
        )
    return Run(steps, requests, metadata, None, content)


def _read_items(base: str, metadata: Metadata, content: str | None) -> pa.Table:
    """Read the items of a run that was loaded before; its files may have moved since."""
    path = run_files(base).get(ITEMS, Path(base + RUN_ENDINGS[ITEMS]))
    return _read_part(path, ITEMS, metadata, content)


def to_frame(table: pa.Table) -> "pd.DataFrame":
    """Return a table as a pandas frame whose nullable integers stay exact."""
    import pandas as pd

    nullable = {
        pa.int8(): pd.Int8Dtype(), pa.int16(): pd.Int16Dtype(), pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(), pa.uint64(): pd.UInt64Dtype(),
    }  # fmt: skip
    columns: dict[str, Any] = {
        field.name: table[field.name].to_pandas(
            types_mapper=nullable.get if field.nullable else None
        )
        for field in table.schema
    }
    return pd.DataFrame(columns, copy=False)  # most columns are the table's own memory


def _read_part(path: Path, kind: str, expected: Metadata, content: str | None) -> pa.Table:
    table, metadata = read_table(path, kind)
    if replace(metadata, table=expected.table) != expected:
        raise TraceError(str(path), "its metadata differs from that of the requests file: the "
                         "files belong to different runs")  # fmt: skip
    _require_same(path, content)
    return table


def _require_same(path: Path, content: str | None) -> None:
    if content is not None and read_content(path) not in (None, content):
        raise TraceError(str(path), "and the requests file belong to different runs: it was copied "
                         "there, or the run was saved anew since it was loaded")  # fmt: skip
