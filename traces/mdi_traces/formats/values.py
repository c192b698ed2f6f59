"""Columns as a file holds them, turned into the numbers, texts and lists of a trace.

A column is an Arrow column (text from CSV, any type from Parquet) or a list of JSON values. A
null, an empty CSV field and NaN, which is how data frames write a gap, are blanks. Numbers are
taken exactly: text and JSON by their digits, binary fractions by their shortest decimal. A value
that is not what is asked for raises `BadValue`; nothing is cast without its meaning.

Read next: `times.py`, `rows.py` (which says where a bad value is).
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_traces.columns import Bools, raw, valid_rows

Column: TypeAlias = Any  # pa.ChunkedArray | list[Any]; Arrow has no types of its own for mypy

_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_OTHER_TEXTS = ("large_string", "string_view", "binary", "large_binary", "binary_view")


class BadValue(Exception):
    """A value cannot be what its column must hold; `row` is 0-based, None for the whole column."""

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(row, problem)
        self.row = row
        self.problem = problem


def whole(column: Column, dtype: Any = np.int64) -> tuple[NDArray[Any], Bools]:  # noqa: ANN401
    """Return whole numbers as the integer type `dtype`, and which rows hold one.

    Whole floats, decimals and texts such as `5.0` count; booleans and times do not.
    """
    column = settled(column)
    found = _quick_whole(column)
    values, valid = _each(column, _whole_number) if found is None else found
    bounds = np.iinfo(dtype)
    bad = valid & ((values < int(bounds.min)) | (values > int(bounds.max)))
    if bad.any():
        row = int(bad.argmax())
        raise BadValue(row, f"{shown(values[row])} does not fit {bounds.dtype}")
    return np.where(valid, values, 0).astype(dtype), valid


def floats(column: Column) -> tuple[NDArray[np.float64], Bools]:
    """Return numbers that float32 can hold, and which rows hold one."""
    values, valid = _each(settled(column), _number)
    numbers = np.array([float(Decimal(value)) for value in values], dtype=np.float64)
    large = np.abs(numbers) > _LARGEST_FLOAT32
    if large.any():
        row = int(large.argmax())
        raise BadValue(row, f"{shown(values[row])} is too large")
    return numbers, valid


def texts(column: Column) -> list[str | None]:
    """Return texts; whole numbers count as their digits, as data frames turn ids into numbers."""
    found = list(objects(settled(column)))
    for row, value in enumerate(found):
        if value is None:
            continue
        if not isinstance(value, str):
            try:
                found[row] = str(_whole_number(row, value))
            except BadValue as error:
                raise BadValue(row, f"{shown(value)} is not a text") from error
        elif not value.isascii():
            _require_unicode(row, value)
    return found


def int_lists(column: Column) -> list[list[int] | None]:
    """Return lists of ids of 64 bits, from lists or from texts such as `1 2 3` and `[1, 2, 3]`.

    Unsigned ids above 2^63 - 1 become the negative ones of the same bits.
    """
    found: list[list[int] | None] = []
    lowest, highest = 0, 0
    for row, value in enumerate(objects(settled(column))):
        ids: Any = value
        if isinstance(value, str):
            ids = value.strip("[] \n").replace(",", " ").split()
        if ids is not None and not isinstance(ids, list):
            raise BadValue(row, f"{shown(value)} is not a list of whole numbers")
        if ids and set(map(type, ids)) != {int}:
            ids = [_list_item(row, item) for item in ids]
        if ids:
            lowest, highest = min(lowest, min(ids)), max(highest, max(ids))
            if lowest < -(2**63) or highest >= 2**64:
                raise BadValue(row, "holds a whole number of more than 64 bits")
            if lowest < 0 and highest >= 2**63:
                raise BadValue(row, "mixes ids below 0 with ids above 2^63 - 1")
        found.append(ids)
    return found if highest < 2**63 else [ids and _signed(ids) for ids in found]


def exact(value: object) -> int | Decimal | None:
    """Return a number without any rounding; None when the value is not a finite number."""
    if type(value) is int:
        return value
    if isinstance(value, Decimal):
        return value if value.is_finite() else None
    if type(value) is float:
        return exact(Decimal(repr(value)))
    return Decimal(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None


def shown(value: object) -> str:
    """Return a value for a message, on one line and of bounded length."""
    text = str(value) if isinstance(value, Decimal | np.generic) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def settled(column: Column) -> Column:
    """Return an Arrow column without dictionaries, extension types, large or binary texts."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    dtype = column.type
    if pa.types.is_dictionary(dtype):
        return settled(column.cast(dtype.value_type))
    if isinstance(dtype, pa.BaseExtensionType):
        return settled(column.cast(dtype.storage_type))
    if str(dtype) not in _OTHER_TEXTS:
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise BadValue(None, "is not UTF-8 text") from error


def objects(column: Column) -> Sequence[Any]:
    """Return plain values, None for blanks; times are refused, which `times.py` takes before."""
    if not isinstance(column, pa.ChunkedArray):
        return [None if value != value else value for value in column]
    if pa.types.is_temporal(column.type):
        raise BadValue(None, f"holds {column.type}, a time, which cannot stand here")
    if pa.types.is_floating(column.type):
        numbers = raw(column)
        some = valid_rows(column) & ~np.isnan(numbers)
        return [Decimal(str(v)) if ok else None for v, ok in zip(numbers, some, strict=True)]
    cells: list[Any] = column.to_pylist()
    return cells


def _quick_whole(column: Column) -> tuple[NDArray[Any], Bools] | None:
    """Return whole numbers where they can be told at once; None sends each through `exact`."""
    if not isinstance(column, pa.ChunkedArray):
        if not set(map(type, column)) <= {int, type(None)}:
            return None
        valid = np.fromiter((v is not None for v in column), dtype=bool, count=len(column))
        try:
            return np.array([v or 0 for v in column], dtype=np.int64), valid
        except OverflowError:
            return None
    if pa.types.is_string(column.type):
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:
            return None
    return (raw(column), valid_rows(column)) if pa.types.is_integer(column.type) else None


def _each(
    column: Column, convert: Callable[[int, object], int | Decimal]
) -> tuple[NDArray[Any], Bools]:
    cells = objects(column)
    valid = np.fromiter((cell is not None for cell in cells), dtype=bool, count=len(cells))
    values = np.zeros(len(cells), dtype=object)
    for row in np.flatnonzero(valid).tolist():
        values[row] = convert(row, cells[row])
    return values, valid


def _number(row: int, value: object) -> int | Decimal:
    number = exact(value)
    if number is None:
        raise BadValue(row, f"{shown(value)} is not a number")
    return number


def _whole_number(row: int, value: object) -> int:
    number = exact(value)
    if number is None or (isinstance(number, Decimal) and number != number.to_integral_value()):
        raise BadValue(row, f"{shown(value)} is not a whole number")
    if not -(2**64) < number < 2**64:  # before the digits of 1e999 are written out
        raise BadValue(row, f"{shown(value)} is too large")
    require_digits(row, value, number)
    return int(number)


def require_digits(row: int, value: object, number: int | Decimal) -> None:
    """Raise `BadValue` for a float so large that its last digits are not those once written."""
    if not isinstance(number, Decimal) or abs(number) < 2**53:
        return
    exponent = number.as_tuple().exponent
    if isinstance(exponent, int) and exponent > 0:
        raise BadValue(row, f"{shown(value)} has lost its last digits as a float: write it as a "
                       "whole number")  # fmt: skip


def _list_item(row: int, value: object) -> int:
    try:
        return _whole_number(row, value)
    except BadValue as error:
        raise BadValue(row, f"is not a list of whole numbers: {error.problem}") from error


def _signed(ids: list[int]) -> list[int]:
    return [number - 2**64 if number >= 2**63 else number for number in ids]


def _require_unicode(row: int, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadValue(row, f"{shown(text)} holds half a character") from error
