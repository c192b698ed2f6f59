"""Rules at the value where they turn: one more, or one less, would be another rule."""

import pytest

from mdi_shared.errors import DeadlockError
from mdi_shared.scheduler import Scheduler
from tests.shared.script import ScriptedRank, play, request, toy

BOTH_MODES = pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])


def rows(turns):
    return [turn.row for turn in turns]


def test_the_end_of_a_prompt_may_be_shorter_than_the_lookahead():
    assert rows(play(toy(lookahead=4), {1: [request("A", 2)]}, steps=1)) == ["P (A,2,2)"]


def test_a_checkpoint_ends_a_chunk_that_has_room_for_more():
    config = toy(max_num_batched_tokens=400, num_blocks=200, max_model_len=400)
    turns = play(config, {1: [request("A", 300, chunk_checkpoints=(128,))]}, steps=2)
    assert rows(turns) == ["P (A,128,128)", "P (A,172,300)"]


@BOTH_MODES
@pytest.mark.parametrize(("second", "batch"), [(4, "P (A,6,6) (B,4,4)"), (5, "P (A,6,6)")])
def test_lengths_may_add_up_to_the_limit(second, batch, strict):
    config = toy(prefill_max_sum_seqlen_k=10, max_model_len=10, strict_upstream=strict)
    assert rows(play(config, {1: [request("A", 6), request("B", second)]}, steps=1)) == [batch]


@BOTH_MODES
@pytest.mark.parametrize(("prompt", "wants"), [(32, True), (36, False)])
def test_a_prefill_is_wanted_at_the_watermark_and_not_above(prompt, wants, strict):
    """8 of 10 blocks and block 0, which counts as used, are nine tenths of the pool."""
    config = toy(num_blocks=10, max_num_batched_tokens=40, strict_upstream=strict)
    scheduler = Scheduler(config)
    scheduler.submit(request("A", prompt))
    plan = scheduler.try_prefill(scheduler.ballot())
    assert plan.free_blocks == 9 - prompt // 4
    scheduler.submit(request("B", 2))
    assert scheduler.want_prefill() is wants


def test_of_equal_lengths_the_longer_output_comes_first_in_a_batch():
    """B is younger, and as long as A from step 3 on, thanks to a draft of step 2."""
    turns = play(
        toy(num_draft_tokens=1, enable_zos=False),
        {1: [request("A", 6), request("B", 5)]},
        steps=3,
        accepted={("B", 2): 1},
    )
    assert rows(turns)[1:] == ["D (A,2,8) (B,2,7)", "D (B,2,9) (A,2,9)"]


@pytest.mark.parametrize(
    ("cp", "budget", "prompt", "limit"), [(2, 90, 90, 88), (3, None, 131_071, 131_070)]
)
def test_a_whole_prompt_must_fit_into_what_context_parallelism_counts(cp, budget, prompt, limit):
    """One request is refused, the others are served; upstream waits there for ever."""
    options = {
        "chunked_prefill": False, "context_parallel_size": cp, "max_num_batched_tokens": budget,
        "max_model_len": budget or 131_072, "num_blocks": 80_000,
    }  # fmt: skip
    script = {1: [request("A", prompt, 2), request("B", limit, 2)]}
    turns = play(toy(**options), script, steps=20)
    assert turns[0].reasons == {"A": "prompt_length_exceeded"}
    assert turns[0].row == f"P (B,{limit},{limit})"
    assert turns[-1].reasons == {"B": "length"} or turns[2].reasons == {"B": "length"}
    with pytest.raises(DeadlockError, match="first waiting request cannot be admitted"):
        play(toy(**options, strict_upstream=True), script, steps=20)


def test_strict_mode_names_blocks_that_an_abort_has_lost():
    """A's chunk of 4 of 24 tokens holds 6 of 7 blocks; upstream never gets them back."""
    config = toy(num_blocks=8, max_num_batched_tokens=4, strict_upstream=True)
    script = {1: [request("A", 24)], 2: ["A", request("B", 9)]}
    with pytest.raises(DeadlockError) as caught:
        play(config, script, steps=20)
    assert str(caught.value).endswith(
        "blocks are held by: nobody; lost when these were aborted: A (6 blocks)"
    )


def test_strict_mode_does_not_spin_at_a_checkpoint_that_it_cannot_use():
    """Without chunking each checkpoint costs an attempt, and then A does not fit its limit."""
    options = {"chunked_prefill": False, "context_parallel_size": 2, "max_num_batched_tokens": 18,
               "max_model_len": 18, "strict_upstream": True}  # fmt: skip
    with pytest.raises(DeadlockError, match="first waiting request cannot be admitted"):
        play(toy(**options), {1: [request("A", 18, chunk_checkpoints=(2, 17))]}, steps=30)


def test_a_preempted_sequence_that_is_back_at_once_gets_one_block_at_a_time():
    """Its prefill step gives it the token that it missed, so it is due when it was before."""
    script = {2: [request("A", 7, max_tokens=5), request("B", 10, max_tokens=1),
                  request("C", 12, max_tokens=9)]}  # fmt: skip
    rank = ScriptedRank(toy(num_blocks=9, max_num_seqs=3, max_model_len=16, enable_zos=False),
                        script)  # fmt: skip
    rank.advance(100)
    assert rank.scheduler.num_preempted == 1
    for turn in rank.turns:
        owners = [seq_id for seq_id, _ in turn.plan.taken]
        assert len(owners) == len(set(owners))
