"""Times and durations of any unit as whole nanoseconds, exactly.

A number counts units from 0 on; an Arrow timestamp or duration brings its own unit; a text such
as `2023-11-16 18:17:03.97996` is a date, read as UTC whatever zone it is written in. Float64 is
used only where it cannot round: the nanoseconds since 1970 have more digits than it holds.
"""

import re
from decimal import Context, Decimal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_traces import columns as c
from mdi_traces.columns import Bools, Ints
from mdi_traces.formats.values import (
    BadValue,
    Column,
    exact,
    objects,
    require_digits,
    settled,
    shown,
    whole,
)
from mdi_traces.requests import LATEST_NS

_DATE = re.compile(r"\s*[0-9]{4}-[0-9]{2}-[0-9]{2}")
_LIKE = "is not a time like 2023-11-16 18:17:03.97996"
_EXACT = Context(prec=60)
_UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_QUICK_NS = 2.0**49  # below, a product of two float64 is off by an eighth of a nanosecond at most


def times(column: Column, unit_ns: int | None) -> tuple[Ints, Bools]:
    """Return times in ns, and which rows hold one.

    Numbers count `unit_ns` nanoseconds and must not be negative; None takes dates alone. Dates
    and timestamps count from 1970.
    """
    column = settled(column)
    if isinstance(column, pa.ChunkedArray) and _has_unit(column.type):
        return _stamps(column)
    if unit_ns is None or _holds_dates(column):
        return _stamps(_parsed_dates(column))
    if unit_ns == 1:
        return _whole_ns(column)
    values = np.zeros(len(column), dtype=np.int64)
    valid = np.zeros(len(column), dtype=bool)
    rest: Ints = np.arange(len(column))
    numbers = _as_float64(column)
    if numbers is not None:
        valid = ~np.isnan(numbers)
        values, told = _quick(numbers, unit_ns)
        rest = np.flatnonzero(valid & ~told)
        column = column.take(c.numbers(rest, pa.int64()))
    for row, cell in zip(rest.tolist(), objects(column), strict=True):
        if cell is not None:
            values[row], valid[row] = _nanoseconds(row, cell, unit_ns), True
    return values, valid


def _whole_ns(column: Column) -> tuple[Ints, Bools]:
    """Return numbers of nanoseconds, which have no fractions."""
    values, valid = whole(column)
    if (values < 0).any():
        row = int((values < 0).argmax())
        raise BadValue(row, f"{values[row]} must not be negative")
    return values, valid


def _quick(numbers: NDArray[np.float64], unit_ns: int) -> tuple[Ints, Bools]:
    """Return times that float64 cannot round: whole numbers, and fractions near 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        products = numbers * float(unit_ns)
        sound = (numbers >= 0) & (products < LATEST_NS)
        integral = sound & (numbers == np.trunc(numbers)) & (numbers < 2.0**53)
        near = sound & ~integral & (products < _QUICK_NS)
    values = np.zeros(len(numbers), dtype=np.int64)
    values[integral] = numbers[integral].astype(np.int64) * unit_ns
    values[near] = np.rint(products[near]).astype(np.int64)
    return values, integral | near


def _nanoseconds(row: int, value: object, unit_ns: int) -> int:
    number = exact(value)
    if number is None:
        raise BadValue(row, f"{shown(value)} is not a time")
    if number < 0:
        raise BadValue(row, f"{shown(value)} must not be negative")
    if number >= LATEST_NS // unit_ns:
        raise BadValue(row, f"{shown(value)} is too late to be a time")
    if isinstance(number, int):
        return number * unit_ns
    require_digits(row, value, number)
    return int(_EXACT.multiply(number, Decimal(unit_ns)).to_integral_value())


def _as_float64(column: Column) -> NDArray[np.float64] | None:
    """Return texts and doubles as float64, NaN where blank; None for what it might not hold."""
    if not isinstance(column, pa.ChunkedArray):
        return None
    if pa.types.is_float64(column.type):
        return c.floats(column)
    if not pa.types.is_string(column.type):
        return None
    try:
        numbers = c.floats(column.cast(pa.float64()))
    except pa.ArrowInvalid:
        return None
    return numbers if int(np.isnan(numbers).sum()) == column.null_count else None


def _has_unit(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(dtype) or pa.types.is_duration(dtype))


def _stamps(column: pa.ChunkedArray) -> tuple[Ints, Bools]:
    unit_ns = _UNIT_NS[column.type.unit]
    values, valid = c.ints(column.cast(pa.int64())), c.valid_rows(column)
    far = (values >= LATEST_NS // unit_ns) | (values <= -LATEST_NS // unit_ns)
    if far.any():
        raise BadValue(int(far.argmax()), "is too far from 1970 to be a time")
    return values * unit_ns, valid


def _holds_dates(column: Column) -> bool:
    """Say whether the first value is a text like 2024-05-10."""
    if isinstance(column, pa.ChunkedArray) and not pa.types.is_string(column.type):
        return False
    first = next((cell for cell in objects(column) if cell is not None), None)
    return isinstance(first, str) and _DATE.match(first) is not None


def _parsed_dates(column: Column) -> pa.ChunkedArray:
    """Parse all dates at once; the first says whether they have zones."""
    cells = objects(column)
    for row, cell in enumerate(cells):
        if cell is not None and not (isinstance(cell, str) and cell.isascii()):
            raise BadValue(row, f"{shown(cell)} {_LIKE}")
    zoned = _zoned(next((cell for cell in cells if cell is not None), ""))
    stamp = pa.timestamp("ns", tz="UTC" if zoned else None)
    try:
        return pa.chunked_array([c.texts(cells)]).cast(stamp)
    except pa.ArrowInvalid:
        for row, cell in enumerate(cells):
            if cell is not None:
                _require_date(row, cell, zoned, stamp)
        raise


def _zoned(text: str) -> bool:
    clock = text.strip()[10:]
    return clock.endswith("Z") or "+" in clock or "-" in clock


def _require_date(row: int, text: str, zoned: bool, stamp: pa.DataType) -> None:
    if _DATE.match(text) and _zoned(text) != zoned:
        here, first = ("no zone", "has one") if zoned else ("a zone", "has none")
        raise BadValue(row, f"{shown(text)} has {here}, but the first row {first}")
    try:
        pa.scalar(text).cast(stamp)
    except pa.ArrowInvalid as error:
        raise BadValue(row, f"{shown(text)} {_LIKE}") from error
