"""Worked traces of the engine's rules (docs/rules.md, R6 to R25), row by row.

`strict_upstream` is on where a trace shows a rule we deviate from, or where the order of ties is
upstream's; the other traces hold in both modes and are run in both.
"""

import pytest

from mdi_shared.errors import DeadlockError, UpstreamCheckError
from tests.shared.script import play, play_group, request, toy

BOTH_MODES = pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])


def rows(turns):
    return [turn.row for turn in turns]


def test_2_2_data_parallel_votes():
    config = toy(
        num_blocks=100, prefill_attempt_interval=2, prefill_any_attempt_interval=5,
        strict_upstream=True,
    )  # fmt: skip
    rank0, rank1 = play_group(
        [config, config],
        [{1: [request("A", 3)], 8: [request("C", 3)]}, {7: [request("B", 3)]}],
        steps=10,
    )
    expected = [
        # step, decode_step, point, want r0, want r1, kind, batch r0, batch r1
        (1, 0, "all", True, False, "D", "", ""),
        (2, 1, "none", None, None, "D", "", ""),
        (3, 2, "all", True, False, "D", "", ""),
        (4, 3, "none", None, None, "D", "", ""),
        (5, 4, "all", True, False, "D", "", ""),
        (6, 5, "any", True, False, "P", "A", ""),
        (7, 0, "all", False, True, "D", "A", ""),
        (8, 1, "none", None, None, "D", "A", ""),
        (9, 2, "all", True, True, "P", "C", "B"),
        (10, 0, "all", False, False, "D", "A,C", "B"),
    ]
    for (step, decode_step, point, want0, want1, kind, batch0, batch1), turn0, turn1 in zip(
        expected, rank0, rank1, strict=True
    ):
        for turn, want, batch in ((turn0, want0, batch0), (turn1, want1, batch1)):
            plan = turn.plan
            names = ",".join(turn.names[item.seq_id] for item in plan.items)
            assert (plan.step, plan.decode_step, plan.vote) == (step, decode_step, point)
            assert want is None or plan.want is want
            assert (turn.row[0], names) == (kind, batch)


@BOTH_MODES
def test_2_3a_chunking(strict):
    turns = play(
        toy(max_num_batched_tokens=8, strict_upstream=strict),
        {1: [request("A", 5), request("B", 10), request("C", 3)]},
        steps=4,
    )
    assert rows(turns)[:3] == ["P (A,5,5) (B,3,3)", "P (B,7,10) (C,1,1)", "P (C,2,3)"]
    assert rows(turns)[3] == "D (B,1,11) (A,1,6) (C,1,4)"
    assert [t.emitted for t in turns[:3]] == [{"A": 1}, {"B": 1}, {"C": 1}]
    assert [t.waiting for t in turns[:3]] == ["B,C", "C", ""]
    assert [t.running for t in turns[:3]] == ["A", "A,B", "A,B,C"]
    assert turns[3].running == ("B,A,C" if strict else "A,B,C")  # ours keeps serving order
    assert turns[0].tables == {"A": [1, 2], "B": [3, 4, 5], "C": []}
    assert turns[0].free_after == 14
    assert not turns[0].plan.items[1].is_last_chunk


def test_2_3_lookahead_holds_back_what_can_get_longer():
    """B's 3 tokens beside A would be a chunk below 6: it waits; its end of 2 tokens does not."""
    options = {"max_num_batched_tokens": 8, "lookahead": 6}
    requests = {1: [request("A", 5), request("B", 10), request("C", 3)]}
    turns = play(toy(**options), requests, steps=4)
    assert rows(turns)[:2] == ["P (A,5,5)", "P (B,8,8)"]
    assert rows(turns)[2] == "P (B,2,10) (C,3,3)"
    short = play(toy(lookahead=60), {1: [request("A", 20)]}, steps=2)
    assert rows(short) == ["P (A,16,16)", "P (A,4,20)"]
    with pytest.raises(UpstreamCheckError, match="'A' has 5 tokens left to prefill"):
        play(toy(**options, strict_upstream=True), requests, steps=20)


@BOTH_MODES
def test_2_3b_checkpoints(strict):
    turns = play(
        toy(strict_upstream=strict),
        {1: [request("A", 10, chunk_checkpoints=(4, 8)), request("B", 3)]},
        steps=3,
    )
    assert rows(turns) == ["P (A,4,4)", "P (A,4,8)", "P (A,2,10) (B,3,3)"]


@BOTH_MODES
def test_2_3c_head_of_line_on_blocks(strict):
    turns = play(
        toy(num_blocks=6, max_num_batched_tokens=32, strict_upstream=strict),
        {1: [request("C", 7, max_tokens=4)], 2: [request("A", 16), request("B", 2)]},
        steps=7,
    )
    assert [t.row[0] for t in turns] == ["P", "D", "D", "D", "D", "D", "P"]
    assert all(t.plan.want for t in turns[1:])  # it wanted to, and could not
    assert rows(turns)[6] == "P (A,16,16) (B,2,2)"


@BOTH_MODES
def test_2_3d_context_parallel_padding(strict):
    turns = play(
        toy(context_parallel_size=2, max_num_batched_tokens=10, strict_upstream=strict),
        {1: [request("A", 5), request("B", 7)]},
        steps=2,
    )
    assert rows(turns) == ["P (A,5,5)", "P (B,7,7)"]
    assert [t.plan.num_batched_tokens for t in turns] == [8, 8]


@BOTH_MODES
def test_2_3e_sum_of_lengths(strict):
    turns = play(
        toy(prefill_max_sum_seqlen_k=10, max_model_len=10, strict_upstream=strict),
        {1: [request("A", 6), request("B", 5)]},
        steps=2,
    )
    assert rows(turns) == ["P (A,6,6)", "P (B,5,5)"]


@BOTH_MODES
def test_2_3f_whole_prompts_only(strict):
    turns = play(
        toy(
            chunked_prefill=False, max_num_batched_tokens=8, max_model_len=8,
            strict_upstream=strict,
        ),
        {1: [request("A", 5), request("B", 6)]},
        steps=2,
    )  # fmt: skip
    assert rows(turns) == ["P (A,5,5)", "P (B,6,6)"]


@BOTH_MODES
def test_2_3g_never_fits(strict):
    turns = play(
        toy(num_blocks=4, strict_upstream=strict),
        {1: [request("A", 13), request("B", 2)]},
        steps=1,
    )
    assert rows(turns) == ["P (B,2,2)"]
    assert turns[0].reasons == {"A": "prompt_length_exceeded"}


@BOTH_MODES
def test_2_3h_finished_sequences_keep_their_seats(strict):
    turns = play(
        toy(max_num_seqs=2, strict_upstream=strict),
        {1: [request(name, 3, max_tokens=1) for name in "ABC"]},
        steps=9,
    )
    assert rows(turns) == ["P (A,3,3) (B,3,3)", "D -", "P (C,3,3)", "D -"]
    assert turns[0].running == "A,B"
    assert turns[3].free_after == 19


TRACE_2_5A = [
    ("P (A,4,4)", {"A": 1}, "5/4/0", None, 4),
    ("P (B,4,4)", {"B": 1}, "5/4/0", "5/4/0", 3),
    ("D (B,1,5) (A,1,5)", {}, "5/4/1", "5/4/1", 1),
    ("D (A,1,6) (B,1,6)", {"A": 1, "B": 1}, "6/5/1", "6/5/1", 1),
    ("D (B,1,7) (A,1,7)", {"A": 1, "B": 1}, "7/6/1", "7/6/1", 1),
    ("D (A,1,8) (B,1,8)", {"A": 1, "B": 1}, "8/7/1", "8/7/1", 1),
    ("D (B,1,9)", {"B": 1}, "8/0/0", "9/8/1", 2),
    ("P (A,8,8)", {"A": 1, "B": 1}, "9/8/0", "10/9/0", 0),
    ("D (A,1,9)", {}, "9/8/1", "10/0/0", 2),
]


def _play_2_5(**options):
    return play(
        toy(num_blocks=6, **options),
        {1: [request("A", 4, max_tokens=8)], 2: [request("B", 4, max_tokens=8)]},
        steps=9,
    )


def test_2_5a_preemption_with_recompute():
    turns = _play_2_5(strict_upstream=True)
    got = [(t.row, t.emitted, t.state.get("A"), t.state.get("B"), t.free_after) for t in turns]
    assert got == TRACE_2_5A
    assert [t.waiting for t in turns[6:9]] == ["A", "", "B"]


def test_2_5a_same_events_with_fixed_tie_order():
    turns = _play_2_5()
    by_name = [
        (sorted(t.row.split()), t.emitted, t.state.get("A"), t.state.get("B"), t.free_after)
        for t in turns
    ]
    assert by_name == [(sorted(row.split()), *rest) for row, *rest in TRACE_2_5A]


@BOTH_MODES
def test_2_5b_preemption_with_stop(strict):
    turns = _play_2_5(strict_upstream=strict, stop_preempted_request=True)
    assert turns[6].row == "D (B,1,9)"
    assert [r.reason for r in turns[6].plan.ignored] == ["insufficient_system_resource"]
    assert turns[6].reasons == {"A": "insufficient_system_resource"}
    assert turns[6].emitted == {"B": 1}  # A's token in flight was dropped
    assert turns[6].free_after == 2


def test_2_5c_thrashing_at_a_full_pool():
    script = {1: [request("A", 5), request("B", 5)]}
    turns = play(toy(num_blocks=5, strict_upstream=True), script, steps=4)
    assert rows(turns) == ["P (A,5,5) (B,5,5)", "D (B,1,6)", "P (A,6,6)", "D (A,1,7)"]
    assert [len(t.plan.preempted) for t in turns] == [0, 1, 0, 1]
    # By default nobody is preempted while nobody needs a block.
    turns = play(toy(num_blocks=5), script, steps=3)
    assert rows(turns)[1:] == ["D (A,1,6) (B,1,6)", "D (A,1,7) (B,1,7)"]


@BOTH_MODES
def test_2_6_abort_in_flight(strict):
    turns = play(
        toy(num_blocks=8, strict_upstream=strict),
        {1: [request("A", 3), request("B", 4)], 4: ["A"]},
        steps=4,
    )
    assert turns[3].row == "D (B,1,7)"
    assert [turns[3].names[s] for s in turns[3].plan.finished] == ["A"]
    assert turns[3].emitted == {"B": 1}
    assert turns[3].reasons == {"A": "abort"}
    assert (turns[2].free_after, turns[3].free_after) == (3, 5)


@pytest.mark.parametrize(("strict", "free"), [(True, 3), (False, 6)])
def test_2_6_abort_between_chunks(strict, free):
    """Upstream loses the blocks of a half-prefilled request; ours come back."""
    turns = play(
        toy(num_blocks=8, max_num_batched_tokens=4, strict_upstream=strict),
        {1: [request("A", 10)], 2: ["A", request("B", 2)]},
        steps=2,
    )
    assert turns[0].tables["A"] == [1, 2, 3]
    assert turns[1].row == "P (B,2,2)"
    assert turns[1].tables["B"] == [4]
    assert [r.reason for r in turns[1].plan.ignored] == ["abort"]
    assert turns[1].free_after == free


def test_2_11a_deadlock_is_reported_with_its_holders():
    config = toy(
        num_blocks=14, max_num_batched_tokens=16, max_model_len=40, strict_upstream=True
    )  # fmt: skip
    script = {1: [request("A", 24), request("B", 22)]}
    turns = play(config, script, steps=5)
    assert [(t.row, t.free_after, t.waiting, t.running) for t in turns] == [
        ("P (A,16,16)", 7, "A,B", ""),
        ("P (A,8,24) (B,8,8)", 1, "B", "A"),
        ("D (A,1,25)", 0, "B", "A"),
        ("D -", 7, "A,B", ""),
        ("P (A,16,16)", 0, "A,B", ""),
    ]
    with pytest.raises(DeadlockError, match=r"A \(7 blocks\), B \(6 blocks\)"):
        play(config, script, steps=6)


def test_2_11a_does_not_deadlock_by_default():
    config = toy(num_blocks=14, max_num_batched_tokens=16, max_model_len=40)
    turns = play(config, {1: [request("A", 24), request("B", 22)]}, steps=500)
    assert turns[-1].free_after == 13
    assert sum(t.emitted.get("A", 0) for t in turns) == 16
    assert sum(t.emitted.get("B", 0) for t in turns) == 16


def test_2_11b_a_lone_request_deadlocks():
    config = toy(
        num_blocks=8, max_num_batched_tokens=24, max_model_len=40, strict_upstream=True
    )  # fmt: skip
    assert rows(play(config, {1: [request("A", 25, 2)]}, steps=1)) == ["P (A,24,24)"]
    with pytest.raises(DeadlockError, match=r"A \(7 blocks\)"):
        play(config, {1: [request("A", 25, 2)]}, steps=2)
    ours = toy(num_blocks=8, max_num_batched_tokens=24, max_model_len=40)
    assert rows(play(ours, {1: [request("A", 25, 2)]}, steps=2)) == ["P (A,24,24)", "P (A,1,25)"]


@BOTH_MODES
def test_4_4_asynchronous_timeline(strict):
    script = {1: [request("A", 6, max_tokens=3)]}
    turns = play(toy(strict_upstream=strict), script, steps=9)
    assert rows(turns) == ["P (A,6,6)", "D (A,1,7)", "D (A,1,8)", "D (A,1,9)", "D -"]
    assert [t.state.get("A") for t in turns] == ["7/6/0", "7/6/1", "8/7/1", "9/8/0", None]
    assert [t.tables.get("A") for t in turns] == [[1, 2], [1, 2], [1, 2], [1, 2, 3], None]
    assert [t.emitted.get("A") for t in turns] == [1, None, 1, 1, None]
    assert turns[3].reasons == {"A": "length"}
    assert turns[4].reports[-1].outcome.dropped == (0,)
    assert turns[4].free_after == 19


@BOTH_MODES
def test_4_4_without_zos(strict):
    turns = play(
        toy(enable_zos=False, strict_upstream=strict),
        {1: [request("A", 6, max_tokens=3)]},
        steps=9,
    )
    assert rows(turns) == ["P (A,6,6)", "D (A,1,7)", "D (A,1,8)", "D -"]
    assert [t.tables.get("A") for t in turns] == [[1, 2], [1, 2], [1, 2], None]
    assert turns[-1].free_after == 19


@BOTH_MODES
def test_4_5_speculative_trace(strict):
    turns = play(
        toy(num_draft_tokens=2, strict_upstream=strict),
        {1: [request("A", 6, max_tokens=9)]},
        steps=9,
        accepted={("A", 3): 2, ("A", 4): 1, ("A", 5): 2},
    )
    assert rows(turns) == [
        "P (A,6,6)", "D (A,3,9)", "D (A,3,12)", "D (A,3,13)", "D (A,3,16)", "D (A,3,18)", "D -",
    ]  # fmt: skip
    assert [t.state.get("A") for t in turns] == [
        "7/6/0", "7/6/3", "8/7/3", "11/10/3", "13/12/3", "15/14/0", None,
    ]  # fmt: skip
    assert [t.emitted.get("A", 0) for t in turns] == [1, 0, 1, 3, 2, 2, 0]
    assert [len(t.tables.get("A", [])) for t in turns] == [2, 3, 3, 4, 4, 5, 0]
    assert turns[5].reasons == {"A": "length"}
