"""Fairness, waits and slowdowns against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from mdi_analysis import Distribution, request_latencies
from mdi_analysis.fairness import (
    Fairness,
    by_size,
    fairness,
    jain_index,
    longest_wait_s,
    slowdowns,
)
from mdi_shared.request import NOT_ARRIVED

from .conftest import FakeRun, empty_run, steps_frame

S = 10**9
NAMES = ("client", "arrival_ns", "t_first_sched", "t_first_token", "t_last_token", "t_finish",
         "prompt_len", "cached_len", "output_len")  # fmt: skip


def served(*rows) -> FakeRun:
    """A run of requests; times in s, None where it did not get that far."""
    frame = pd.DataFrame(rows, columns=NAMES)
    for name in NAMES[1:6]:
        frame[name] = frame[name].astype("float64") * S
    for name in ("t_submit", "rank"):
        frame[name] = np.nan
    ended = frame["t_finish"].notna()
    frame["finish_reason"] = np.where(ended, "stop", None)
    frame["unfinished_reason"] = np.where(ended, None, "stopped early")
    frame["req_id"] = [str(row) for row in range(len(frame))]
    return FakeRun(steps_frame()[:0], None, frame)


# Two clients, ten prompt tokens and one of output each (12 weighted tokens), both waiting from the
# start. a is served at 0, 1 and 2 s, b only afterwards: all of it while b waits.
ONE_AFTER_THE_OTHER = served(
    ("a", 0, 0, 1, 1, 1, 10, 0, 1), ("a", 0, 1, 2, 2, 2, 10, 0, 1),
    ("a", 0, 2, 3, 3, 3, 10, 0, 1), ("b", 0, 3, 4, 4, 4, 10, 0, 1),
    ("a", 0, 4, 5, 5, 5, 10, 0, 1),
)  # fmt: skip


def test_service_while_both_wait():
    """b waits until 3 s, a until 4 s (its last one); in the common 3 s a gets 36 and b nothing."""
    found = fairness(ONE_AFTER_THE_OTHER)
    assert found == Fairness(2, jain=0.5, service_gap=36.0)


def test_taking_turns_is_even():
    run = served(
        ("a", 0, 0, 1, 1, 1, 10, 0, 1), ("b", 0, 1, 2, 2, 2, 10, 0, 1),
        ("a", 0, 2, 3, 3, 3, 10, 0, 1), ("b", 0, 3, 4, 4, 4, 10, 0, 1),
        ("a", 0, 4, 5, 5, 5, 10, 0, 1), ("b", 0, 5, 6, 6, 6, 10, 0, 1),
    )  # fmt: skip
    found = fairness(run)
    assert found.service_gap == pytest.approx(12)  # one request ahead, never more
    # Both wait until 4 s: two requests each.
    assert found.jain == pytest.approx(1)


def test_output_tokens_count_twice_and_cached_ones_not():
    """From 0 to 1 s prompt and first token of a: 4 - 1 + 2; from 1 to 3 s two tokens more: 4."""
    run = served(("a", 0, 0, 1, 3, 3, 4, 1, 3), ("a", 0, 9, 10, 10, 10, 4, 1, 1),
                 ("b", 0, 9, 10, 10, 10, 4, 0, 1))  # fmt: skip
    assert fairness(run).service_gap == pytest.approx(9)


def test_who_never_waits_with_another_is_not_compared():
    apart = served(("a", 0, 1, 2, 2, 2, 10, 0, 1), ("b", 5, 6, 7, 7, 7, 10, 0, 1))
    assert fairness(apart) == Fairness(2)
    assert fairness(served(("a", 0, 1, 2, 2, 2, 10, 0, 1))) == Fairness(1)
    assert fairness(served((None, 0, 1, 2, 2, 2, 10, 0, 1))) == Fairness(0)


def test_who_is_never_served_waits_until_the_end():
    starved = served(("a", 0, 0, 1, 4, 4, 10, 0, 4), ("a", 0, 3, 4, 4, 4, 10, 0, 1),
                     ("b", 0, None, None, None, None, 10, 0, 0))  # fmt: skip
    assert longest_wait_s(starved, request_latencies(starved)) == pytest.approx(4)
    # a is backlogged until 3 s and got 12 and two thirds of 6 by then; b nothing.
    assert fairness(starved).service_gap == pytest.approx(16)


def test_who_was_refused_waits_no_longer():
    """b is refused at 1 s; until then a was served 12, of which nothing waits for b."""
    run = served(("a", 0, 0, 1, 1, 1, 10, 0, 1), ("a", 0, 1, 2, 2, 2, 10, 0, 1),
                 ("b", 0, None, None, None, 1, 10, 0, 0))  # fmt: skip
    assert fairness(run).service_gap == pytest.approx(12)


def test_waits_of_those_that_came_and_were_not_refused():
    run = served(("a", 0, 0, 2, 2, 2, 10, 0, 1), ("a", 0, None, None, None, 9, 10, 0, 0),
                 ("a", 1, None, None, None, None, 10, 0, 0))  # fmt: skip
    requests = run.requests
    requests.loc[1, "finish_reason"] = "prompt_length_exceeded"
    requests.loc[2, "unfinished_reason"] = NOT_ARRIVED
    assert longest_wait_s(run, request_latencies(run)) == pytest.approx(2)
    nobody = empty_run()
    assert longest_wait_s(nobody, request_latencies(nobody)) is None


@pytest.mark.parametrize(
    ("rates", "index"), [([1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([2, 1], 0.9), ([3], None)]
)
def test_jain(rates, index):
    found = jain_index(np.array(rates, dtype=float))
    assert found == (None if index is None else pytest.approx(index))


def test_slowdown_by_size():
    run = served(*(("a", 0, 0, 1, 1, finish, 10, 0, 1) for finish in (1, 2, 3, 4)),
                 ("a", 0, 0, 1, 1, None, 10, 0, 1))  # fmt: skip
    alone = np.array([1_000.0, 1_000.0, 1_500.0, 2_000.0, 2_000.0])
    found = slowdowns(request_latencies(run), alone)
    np.testing.assert_allclose(found, [1, 2, 2, 2, np.nan])
    small, medium, large = by_size(found, alone)
    assert (small.n, small.mean) == (3, pytest.approx(5 / 3))  # at most the median, 1,500
    assert (medium.n, medium.mean) == (1, 2)  # up to P90, 2,000; the other did not end
    assert large == Distribution(0)
