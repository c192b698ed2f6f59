"""Arrow columns from plain values and back, by their buffers.

`pyarrow.array`, `to_numpy` and every compute call with a scalar import pandas on first use, which
takes longer than reading a trace; these few functions do without. This is not a general
converter: it knows the types of `schema.py` and no others.

Read next: `schema.py` (the types), `requests.py` (who uses them most).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def numbers(values: NDArray[Any], dtype: pa.DataType, valid: Bools | None = None) -> pa.Array:
    """Return an Arrow array of a number type; rows where `valid` is False are null."""
    raw = np.ascontiguousarray(values, dtype=dtype.to_pandas_dtype())
    return pa.Array.from_buffers(dtype, len(raw), [_mask(valid), pa.py_buffer(raw)])


def flags(values: Bools) -> pa.Array:
    """Return an Arrow array of booleans."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def texts(values: Sequence[str | None], dtype: pa.DataType | None = None) -> pa.Array:
    """Return an Arrow array of strings, dictionary-encoded when `dtype` says so."""
    encoded = [b"" if v is None else v.encode() for v in values]
    buffers = [_mask(_given(values)), _offsets(encoded), pa.py_buffer(b"".join(encoded))]
    array = pa.Array.from_buffers(pa.string(), len(values), buffers)
    return array if dtype is None or dtype == pa.string() else array.dictionary_encode()


def int_lists(values: Sequence[Sequence[int] | None]) -> pa.Array:
    """Return an Arrow array of lists of int64; None is null."""
    lists = [() if v is None else v for v in values]
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int64)
    return pa.Array.from_buffers(
        pa.list_(pa.int64()), len(values), [_mask(_given(values)), _offsets(lists)],
        children=[numbers(flat, pa.int64())],
    )  # fmt: skip


def raw(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a number column as it lies in memory; what stands where it is null is not defined."""
    array = _whole(column)
    values = np.frombuffer(_data(array), dtype=array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def ints(column: pa.ChunkedArray, null: int = 0) -> Ints:
    """Return an integer column as int64, with `null` where it is null."""
    values = raw(column).astype(np.int64)
    return values if column.null_count == 0 else np.where(valid_rows(column), values, null)


def floats(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return a float column as float64, with NaN where it is null."""
    values = raw(column).astype(np.float64)
    return values if column.null_count == 0 else np.where(valid_rows(column), values, np.nan)


def bools(column: pa.ChunkedArray) -> Bools:
    """Return a boolean column without nulls."""
    array = _whole(column)
    assert array.null_count == 0, "a boolean column of this schema holds no nulls"
    return _unpack(_data(array), array.offset, len(array))


def codes(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """Return a string column as indices (-1 where null) into its distinct values."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    array = _whole(encoded.unify_dictionaries())
    return ints(pa.chunked_array([array.indices]), null=-1), array.dictionary.to_pylist()


def valid_rows(column: pa.ChunkedArray) -> Bools:
    """Return True for each row that is not null."""
    array = _whole(column)
    mask = array.buffers()[0]
    if array.null_count == len(array):  # also a column of type null, which has no buffer
        return np.zeros(len(array), dtype=bool)
    if mask is None or array.null_count == 0:
        return np.ones(len(array), dtype=bool)
    return _unpack(mask, array.offset, len(array))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _data(array: pa.Array) -> pa.Buffer | bytes:
    data = array.buffers()[1]
    return b"" if data is None else data


def _given(values: Sequence[object]) -> Bools:
    return np.fromiter((v is not None for v in values), dtype=bool, count=len(values))


def _mask(valid: Bools | None) -> pa.Buffer | None:
    """Return the bits of a column with nulls; None stands for a column without."""
    return None if valid is None or bool(valid.all()) else _bits(valid)


def _bits(values: Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def _unpack(buffer: pa.Buffer | bytes, offset: int, length: int) -> Bools:
    bits = np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), bitorder="little")
    return bits[offset : offset + length].astype(bool)


def _offsets(values: Sequence[Sequence[Any] | bytes]) -> pa.Buffer:
    lengths = np.fromiter((len(v) for v in values), dtype=np.int64, count=len(values))
    ends = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    assert ends[-1] < 2**31, "one column holds more than 2 GiB"
    return pa.py_buffer(ends.astype(np.int32))
