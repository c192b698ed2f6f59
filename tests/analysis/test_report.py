"""Numbers for people and for programs."""

import numpy as np
import pytest

from mdi_analysis.report import change, number, percent, plain


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (float("nan"), "-"), (0.0, "0"), (7, "7"), (12_345, "12,345"),
        (36_170.9, "36,171"), (123.4, "123"), (12.34, "12.3"), (1.2345, "1.23"),
        (0.012345, "0.0123"), (-0.5, "-0.500"), (1e-9, "1.00e-09"), (99.99, "100.0"),
    ],
)  # fmt: skip
def test_number(value, shown):
    assert number(value) == shown


def test_shares_and_changes():
    assert (percent(0.256), percent(None)) == ("25.6%", "-")
    assert (change(0.1), change(-0.1), change(None)) == ("+10.0%", "-10.0%", "-")


def test_plain_data():
    found = plain({"a": (np.float64("nan"), np.int64(3)), "b": [float("inf"), "x", None, True]})
    assert found == {"a": [None, 3], "b": [None, "x", None, True]}


def test_other_objects_are_refused():
    with pytest.raises(AssertionError, match="is not plain data"):
        plain({"a": object()})
