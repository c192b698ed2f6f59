"""Who goes next: prompts, those who decode, or both in one step."""

import pytest

from mdi_shared.chunking import CostTarget
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.work import DecodeWork, add_work, prefill_work, step_work
from mdi_shared.errors import ConfigError, PolicyError
from mdi_shared.plan import StepPlan
from mdi_shared.policies import Policy, policy_from_spec
from mdi_shared.run_description import RunDescription
from mdi_shared.scheduler import Scheduler
from tests.fuzz.schedules import RowCost
from tests.shared.script import ScriptedRank, play, request, run_together, toy


def played(spec, script, steps=40, **options):
    return play(toy(**options), script, steps, scheduling=policy_from_spec(spec))


def kinds(turns):
    return [turn.plan.kind for turn in turns]


def rows(turn):
    """Who has how many rows, in order."""
    return [(turn.names[item.seq_id], item.q, item.k) for item in turn.plan.items]


LATE = {1: [request("a", 3, 9)], 3: [request("b", 13, 4)]}  # while a decodes b comes


def test_a_mixed_step_has_who_decodes_and_fills_up_with_chunks():
    turns = played("mixed:budget=6", LATE, max_num_batched_tokens=16)
    assert [rows(turn) for turn in turns[:6]] == [
        [("a", 3, 3)], [("a", 1, 4)],
        [("a", 1, 5), ("b", 5, 5)], [("a", 1, 6), ("b", 5, 10)], [("a", 1, 7), ("b", 3, 13)],
        [("b", 1, 14), ("a", 1, 8)],
    ]  # fmt: skip
    assert kinds(turns)[:6] == ["mixed", "decode", "mixed", "mixed", "mixed", "decode"]
    assert [turn.plan.num_batched_tokens for turn in turns[:5]] == [3, 1, 6, 6, 4]
    assert [turn.plan.is_partial for turn in turns[:5]] == [False, False, True, True, False]
    assert all(turn.plan == StepPlan.from_json(turn.plan.to_json()) for turn in turns)


def test_the_others_take_turns():
    prefill_first = played("prefill_first", LATE, max_num_batched_tokens=5)
    assert kinds(prefill_first)[:6] == ["prefill", "decode", *["prefill"] * 3, "decode"]
    decode_first = played("decode_first", LATE, max_num_batched_tokens=5)
    assert kinds(decode_first)[:9] == ["prefill", *["decode"] * 8]
    assert [rows(turn) for turn in decode_first if turn.plan.is_prefill][1] == [("b", 5, 5)]
    votes = played("votes", LATE, max_num_batched_tokens=5, prefill_attempt_interval=3,
                   prefill_any_attempt_interval=100)  # fmt: skip
    assert kinds(votes)[:6] == ["prefill", *["decode"] * 3, "prefill", "prefill"]


def test_the_work_of_a_mixed_step_is_that_of_its_rows():
    turns = played("mixed:budget=6", LATE, max_num_batched_tokens=16)
    plan = turns[3].plan
    alone = DecodeWork(TINY, turns[1].plan.batch, plan.shift).at(0)
    own = add_work(alone._replace(is_prefill=True), prefill_work(TINY, plan.prompts))
    assert step_work(TINY, plan) == own


def test_nobody_is_admitted_in_a_step_that_preempts():
    script = {1: [request("a", 3, 12), request("b", 3, 12)], 4: [request("c", 4, 4)]}
    turns = played("mixed", script, num_blocks=6, max_model_len=16)
    preempting = [turn for turn in turns if turn.plan.preempted]
    assert preempting
    assert {turn.plan.kind for turn in preempting} == {"decode"}


def test_a_rank_without_prompts_takes_part_in_its_groups_mixed_steps():
    ranks = run_together(
        [ScriptedRank(toy(), script, num_ranks=3, scheduling=policy_from_spec("mixed:budget=6"))
         for script in (LATE, {1: [request("c", 2, 20)]}, {})], 8,
    )  # fmt: skip
    assert [kinds(rank.turns)[:6] for rank in ranks] == [
        ["mixed", "decode", "mixed", "mixed", "mixed", "decode"],
        ["mixed", "decode", "mixed", "mixed", "mixed", "decode"],
        ["idle_mixed", "idle_decode", "idle_mixed", "idle_mixed", "idle_mixed", "idle_decode"],
    ]
    assert [turn.plan.qs for turn in ranks[1].turns[2:5]] == [(1,)] * 3


def test_a_cost_target_counts_who_decodes():
    """Of the step's 1.5 ms each row takes 50 us, whoever's it is."""

    def first_chunk(running):
        target = CostTarget(TINY, RowCost(), 1_500_000, align=1, tail_min=0, min_chunk=1)
        script = {1: [request(f"r{i}", 1, 30) for i in range(running)], 3: [request("b", 40, 4)]}
        turns = play(toy(max_num_seqs=6, num_blocks=60), script, 3, policy=target,
                     scheduling=policy_from_spec("mixed"))  # fmt: skip
        return next(q for turn in turns for name, q, _ in rows(turn) if name == "b")

    assert first_chunk(0) > first_chunk(1) > first_chunk(3) > 1


class Patient(Policy):
    """Prompts wait until three of them can go together."""

    def __init__(self, answer=None):
        self.answer = answer

    def phase(self, view):
        return len(view.waiting) >= 3 if self.answer is None else self.answer


def test_a_policy_of_ones_own_is_asked_while_somebody_waits_and_somebody_decodes():
    script = {1: [request("a", 3, 12)], 3: [request("b", 3, 2)], 6: [request("c", 3, 2)],
              8: [request("d", 3, 2)]}  # fmt: skip
    turns = play(toy(), script, 40, scheduling=Patient())
    assert [rows(turn) for turn in turns if turn.plan.kind == "prefill"] == [
        [("a", 3, 3)], [("b", 3, 3), ("c", 3, 3), ("d", 3, 3)],
    ]  # fmt: skip
    with pytest.raises(PolicyError, match="policy Patient: phase returned 1, which is neither"):
        play(toy(), script, 40, scheduling=Patient(1))


class MixedByVotes(Policy):
    """Prompts go beside those who decode, where the engine's votes let them."""

    mixes = True
    budget = 6


def test_a_policy_may_mix_and_leave_the_phase_to_votes():
    turns = play(toy(prefill_attempt_interval=3, prefill_any_attempt_interval=100), LATE, 40,
                 scheduling=MixedByVotes())  # fmt: skip
    assert kinds(turns)[:8] == ["mixed", *["decode"] * 3, "mixed", "mixed", "mixed", "decode"]
    own = MixedByVotes()
    own.budget = 2.5
    with pytest.raises(ConfigError, match="policy = 'MixedByVotes': the budget of a mixed step"):
        Scheduler(toy(), scheduling=own)


@pytest.mark.parametrize(("options", "says"), [
    ({"strict_upstream": True}, "contradicts strict_upstream"),
    ({"num_draft_tokens": 2}, "mixed steps need num_draft_tokens = 0"),
    ({"context_parallel_size": 2}, "mixed steps need context_parallel_size = 1"),
    ({"chunked_prefill": False, "max_num_batched_tokens": 64}, "need chunked_prefill = true"),
    ({"max_num_batched_tokens": 8}, "mixed step, 9, must be an int from 0 to the token budget, 8"),
])  # fmt: skip
def test_what_leaves_mixed_steps_no_room_is_refused_where_it_is_given(options, says):
    config, spec = toy(**options), "phase=mixed:budget=9"
    for make in (lambda: Scheduler(config, scheduling=policy_from_spec(spec)),
                 lambda: RunDescription(scheduler=config, policy=spec)):  # fmt: skip
        with pytest.raises(ConfigError, match=says) as error:
            make()
        assert str(error.value).startswith(f"policy = '{spec}': ")
        assert "\n" not in str(error.value)
