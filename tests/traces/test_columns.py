"""Columns built from buffers are the columns pyarrow itself would build."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdi_traces import columns as c

LABEL = pa.dictionary(pa.int32(), pa.string())
nullable_ints = st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=40)
nullable_texts = st.lists(st.none() | st.text(max_size=5), max_size=40)
cuts = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(nullable_ints, cuts, st.sampled_from([pa.int32(), pa.int64()]))
def test_numbers(values, cut, dtype):
    filled = np.array([v or 0 for v in values], dtype=np.int64)
    valid = np.array([v is not None for v in values], dtype=bool)
    array = c.numbers(filled, dtype, valid)
    array.validate(full=True)
    assert array.equals(pa.array(values, dtype))
    column = pa.chunked_array([array[cut[0] :], array[: cut[1]]])
    expected = values[cut[0] :] + values[: cut[1]]
    assert c.ints(column, null=-5).tolist() == [-5 if v is None else v for v in expected]
    assert c.valid_rows(column).tolist() == [v is not None for v in expected]


@given(nullable_texts, cuts)
def test_texts(values, cut):
    array = c.texts(values)
    array.validate(full=True)
    assert array.equals(pa.array(values, pa.string()))
    labels = c.texts(values, LABEL)
    assert labels.type == LABEL
    for each in (array, labels):
        column = pa.chunked_array([each[cut[0] :], each[: cut[1]]])
        index, names = c.codes(column)
        back = [names[i] if i >= 0 else None for i in index.tolist()]
        assert back == values[cut[0] :] + values[: cut[1]]


@given(st.lists(st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=20))
def test_int_lists(values):
    array = c.int_lists(values)
    array.validate(full=True)
    assert array.to_pylist() == values


@given(st.lists(st.booleans(), max_size=40), cuts)
def test_flags(values, cut):
    array = c.flags(np.array(values, dtype=bool))
    column = pa.chunked_array([array[cut[0] :], array[: cut[1]]])
    assert c.bools(column).tolist() == values[cut[0] :] + values[: cut[1]]


def test_floats_turn_null_into_nan():
    column = pa.chunked_array([pa.array([1.5, None], pa.float32())])
    assert c.floats(column).tolist() == pytest.approx([1.5, np.nan], nan_ok=True)
