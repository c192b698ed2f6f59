"""Block ids of any source as ids of the scheduler's blocks."""

import pytest

from mdi_shared.errors import ConfigError
from mdi_traces.columns import int_lists, ints, numbers, texts
from mdi_traces.prefixes import prefix_contents, with_prefix_ids
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata


def trace_of(prompts, outputs, *, ids=None, stated=None, sessions=None, cached=None):
    import numpy as np
    import pyarrow as pa

    count = len(prompts)
    columns = {
        "arrival_ns": numbers(np.arange(count), pa.int64()),
        "prompt_len": numbers(np.array(prompts), pa.int32()),
        "output_len": numbers(np.array(outputs), pa.int32()),
    }
    if ids is not None:
        columns["hash_ids"] = int_lists(ids)
    if sessions is not None:
        columns["session_id"] = texts(sessions)
        turns = [sessions[:row].count(name) for row, name in enumerate(sessions)]
        columns["turn"] = numbers(np.array(turns), pa.int32())
    if cached is not None:
        columns["cached_len"] = numbers(np.array(cached), pa.int32())
    metadata = Metadata(table="requests", source="import", hash_block_size=stated)
    return build_requests(columns, metadata)


def lists(trace, block_size=128):
    return with_prefix_ids(trace, block_size).table["hash_ids"].to_pylist()


def shared(one, other):
    """How many leading blocks two requests have in common."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_a_block_of_512_tokens_is_four_and_a_partial_one_none():
    trace = trace_of([1100, 1600], [10, 10], ids=[[7, 8, 9], [7, 8, 5, 6]], stated=512)
    one, other = lists(trace)
    assert (len(one), len(other)) == (8, 12)
    assert shared(one, other) == 8
    assert len(set(one)) == 8
    assert prefix_contents(with_prefix_ids(trace, 128))[0].grain == 512


def test_eight_blocks_of_16_tokens_are_one():
    ids = [list(range(20)), [*range(15), 99, *range(16, 20)]]
    one, other = lists(trace_of([320, 320], [1, 1], ids=ids, stated=16))
    assert (len(one), len(other)) == (2, 2)
    assert shared(one, other) == 1


def test_an_id_means_all_that_is_before_it():
    one, other = lists(trace_of([256, 256], [1, 1], ids=[[1, 2], [3, 2]], stated=128))
    assert not set(one) & set(other)


def test_the_output_of_a_turn_is_in_the_prompt_of_the_next():
    ids = [[1, 2, 3], [50], [1, 2, 4, 5, 6]]
    trace = trace_of([300, 128, 600], [220, 9, 5], ids=ids, stated=128, sessions=["a", "b", "a"])
    first, _, second = lists(trace)
    assert len(first) == 4, "520 tokens, of which the third block is known from the next turn"
    assert shared(first, second) == 4


def test_sessions_without_ids_share_what_a_turn_says_was_cached():
    trace = trace_of([300, 200, 600], [100, 60, 5], sessions=["a", "b", "a"], cached=[0, 0, 390])
    made = with_prefix_ids(trace, 128)
    first, other, second = made.table["hash_ids"].to_pylist()
    assert (len(first), len(other), len(second)) == (3, 2, 4)
    assert shared(first, second) == 3
    assert not set(other) & {*first, *second}
    assert ints(made.table["cached_len"]).tolist() == [0, 0, 0], "the cache must have it"


def test_a_turn_begins_with_the_turn_before_where_nothing_else_is_said():
    trace = trace_of([300, 400, 600, 200], [100, 1, 5, 9], sessions=["a", "a", "a", "a"])
    first, second, third, fourth = lists(trace)
    assert shared(first, second) == 3
    assert shared(second, third) == 3
    assert shared(third, fourth) == 0, "shorter than the turn before"


def test_what_was_made_once_stays():
    trace = trace_of([1100, 1600], [10, 10], ids=[[7, 8, 9], [7, 8, 5, 6]], stated=512)
    once = with_prefix_ids(trace, 128)
    again = with_prefix_ids(once, 128)
    assert again.table["hash_ids"].to_pylist() == once.table["hash_ids"].to_pylist()
    assert prefix_contents(again)[1].grain == 512


@pytest.mark.parametrize(("stated", "block_size"), [(None, 128), (100, 128), (96, 64)])
def test_blocks_that_do_not_divide_are_refused(stated, block_size):
    with pytest.raises(ConfigError, match="hash_block_size"):
        with_prefix_ids(trace_of([300], [1], ids=[[1, 2, 3]], stated=stated), block_size)
