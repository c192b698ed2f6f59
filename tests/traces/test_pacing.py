"""Other times for a trace, and how long there is to wait."""

import pytest

from mdi_shared.errors import ConfigError
from mdi_traces.distributions import Burst, Constant
from mdi_traces.pacing import due_note, require_bearable_waits, retime, unused_note
from mdi_traces.requests import validate_requests

from .conftest import trace_of

S = 10**9


@pytest.fixture
def sessions():
    """Two sessions; the second turn of each waits."""
    return trace_of(
        req_id=["a0", "b0", "a1", "b1"], arrival_ns=[0, 2 * S, 3 * S, 9 * S],
        prompt_len=[1] * 4, output_len=[1] * 4, session_id=["a", "b", "a", "b"],
        turn=[0, 0, 1, 1], think_ns=[None, None, S, S], t_finish=[1] * 4,
    )  # fmt: skip


def times(trace) -> dict[str, int]:
    table = trace.table
    return dict(zip(table["req_id"].to_pylist(), table["arrival_ns"].to_pylist(), strict=True))


def test_a_process_draws_new_times_and_says_so(sessions):
    made = retime(sessions, process=Constant(0.1), seed=3)
    assert times(made) == {"a0": 0, "a1": 3 * S, "b0": 10 * S, "b1": 17 * S}
    assert made.table["req_id"].to_pylist() == ["a0", "a1", "b0", "b1"]
    assert made.metadata.notes[-1] == (
        "recorded arrival times replaced by Constant(rate=0.1), seed 3"
    )
    assert made.table["t_finish"].null_count == 4, "outputs belong to the recorded times"
    assert made.table["think_ns"].null_count == 2
    validate_requests(made.table, "made")
    validate_requests(retime(sessions, process=Burst()).table, "burst")
    assert times(sessions)["b0"] == 2 * S, "the original is unchanged"


def test_a_rate_keeps_the_pattern(sessions):
    open_loop = sessions.to_open_loop()
    made = retime(open_loop, rate=1.0)
    assert times(made) == {"a0": 0, "b0": 2 * S // 3, "a1": S, "b1": 3 * S} | {"b0": 666_666_667}
    assert made.metadata.notes[-1] == "recorded arrival times scaled to 1 requests per second"
    assert times(retime(sessions, rate=0.25))["b0"] == 4 * S, "one gap between the two first turns"


def test_what_cannot_be_retimed(sessions):
    for options in ({}, {"rate": 1.0, "process": Burst()}):
        with pytest.raises(ConfigError, match="give an arrival process or a rate"):
            retime(sessions, **options)
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be a finite number above 0"):
            retime(sessions, rate=rate)
    with pytest.raises(ConfigError, match="puts a request beyond"):
        retime(sessions, rate=1e-12)
    at_once = trace_of(arrival_ns=[5, 5], prompt_len=[1, 1], output_len=[1, 1])
    with pytest.raises(ConfigError, match="are all the same and cannot be scaled"):
        retime(at_once, rate=1.0)


def test_absurd_waits_are_refused(sessions):
    require_bearable_waits(sessions)
    with pytest.raises(ConfigError, match=r"trace = '2 s': is the longest time in which nothing"):
        require_bearable_waits(sessions, longest_s=1.0)
    late = trace_of(arrival_ns=[1_756_300_000 * S], prompt_len=[1], output_len=[1])
    with pytest.raises(ConfigError, match=r"trace = '55\.7 years'.* at most 24\.0 hours"):
        require_bearable_waits(late)
    thinks = trace_of(arrival_ns=[0, 1], prompt_len=[1, 1], output_len=[1, 1],
                      session_id=["s", "s"], turn=[0, 1], think_ns=[None, 10**6 * S])  # fmt: skip
    with pytest.raises(ConfigError, match=r"trace = '11\.6 days'"):
        require_bearable_waits(thinks)


def test_notes_say_when_requests_are_due_and_what_is_not_used(sessions):
    assert due_note(sessions) == "first request due after 0 s, last 9 s"
    assert unused_note(sessions) is None
    marked = trace_of(arrival_ns=[0], prompt_len=[1], output_len=[1], priority=[1], hash_ids=[[1]])
    assert unused_note(marked) == (
        "priority and hash_ids of the trace: kept, but nothing in this run uses them"
    )
