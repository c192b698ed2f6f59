"""A running request gives way to a more urgent one that waits, if its policy says so."""

import pytest

from mdi_shared.errors import ConfigError, PolicyError
from mdi_shared.policies import Policy, policy_from_spec
from mdi_shared.request import Hints
from mdi_shared.scheduler import Scheduler
from tests.shared.script import ScriptedRank, play, request, toy

# Blocks of 4: of 10 that can be handed out, a and b take 4 each.
FULL = {"num_blocks": 11, "max_num_batched_tokens": 40, "enable_zos": False}


def urgent(name, prompt_len, max_tokens, priority):
    return request(name, prompt_len, max_tokens, hints=Hints(priority=priority))


def rows(script, steps, spec, **options):
    return [turn.row for turn in play(toy(**options), script, steps, scheduling=spec)]


def policy(spec):
    return policy_from_spec(spec)


def test_the_least_urgent_gives_way_and_is_computed_again_with_its_output():
    script = {1: [urgent("a", 14, 6, 0), urgent("b", 14, 6, 1)], 3: [urgent("c", 12, 2, 2)]}
    rank = ScriptedRank(toy(**FULL), script, scheduling=policy("priority:evict=1"))
    rank.advance(6)
    assert [turn.row for turn in rank.turns] == [
        "P (b,14,14) (a,14,14)", "D (a,1,15) (b,1,15)",
        "P (c,12,12)",  # a's four blocks are free for c's three
        "D (b,1,16) (c,1,13)", "D (b,1,17)",
        "P (a,16,16)",  # its prompt and both tokens it had
    ]  # fmt: skip
    assert [turn.plan.preempted for turn in rank.turns] == [(), (), (0,), (), (), ()]
    assert [turn.plan.left for turn in rank.turns][3] == (0,)
    assert rank.turns[2].waiting == "a"
    plain = rows(script, 6, policy("priority"), **FULL)
    assert plain[2:] == [f"D (a,1,{k}) (b,1,{k})" for k in (16, 17, 18, 19)]


def test_a_step_in_flight_is_dropped():
    script = {1: [urgent("a", 14, 6, 0), urgent("b", 14, 6, 1)], 3: [urgent("c", 12, 2, 2)]}
    options = {**FULL, "enable_zos": True}
    turns = play(toy(**options), script, 3, scheduling=policy("priority:evict=1"))
    assert turns[2].row == "P (c,12,12)"
    # Step 2's row of a was in flight: of its two tokens one is lost.
    assert turns[2].emitted == {"b": 1, "c": 1}
    assert turns[2].state["a"] == "15/0/0"


def test_nobody_leaves_unless_the_one_that_waits_gets_on():
    """c needs six blocks; without a, which is less urgent, there are five."""
    script = {1: [urgent("a", 10, 6, 0), urgent("b", 18, 6, 3)], 3: [urgent("c", 22, 2, 2)]}
    assert rows(script, 3, policy("priority:evict=1"), **FULL)[2] == "D (b,1,20) (a,1,12)"
    script[3] = [urgent("c", 18, 2, 2)]
    assert rows(script, 3, policy("priority:evict=1"), **FULL)[2] == "P (c,18,18)"


def test_as_often_as_the_policy_says():
    script = {
        1: [urgent("a", 14, 9, 0), urgent("b", 14, 9, 9)],
        **{step: [urgent(f"c{step}", 12, 1, 2)] for step in (3, 7, 11, 15)},
    }
    for most in (0, 1, 2, 3):
        rank = ScriptedRank(toy(**FULL), script, scheduling=policy(f"priority:evict={most}"))
        rank.advance(40)
        evicted = [s for turn in rank.turns if turn.plan.is_prefill for s in turn.plan.preempted]
        assert evicted == [0] * most


def test_a_seat_is_enough_to_leave_for():
    script = {1: [urgent("a", 2, 9, 0), urgent("b", 2, 9, 1)], 3: [urgent("c", 2, 9, 2)]}
    options = {"max_num_seqs": 2, "enable_zos": False}
    turns = play(toy(**options), script, 4, scheduling=policy("priority:evict=1"))
    assert [turn.row for turn in turns[2:]] == ["P (c,2,2)", "D (b,1,4) (c,1,3)"]


def test_above_the_watermark_the_pool_must_come_below_it():
    """Blocks for c are free, but 19 of 20 are in use: nobody is let in unless somebody leaves."""
    script = {1: [urgent("a", 38, 9, 0), urgent("b", 32, 9, 3)], 3: [urgent("c", 3, 2, 2)]}
    options = {"max_num_batched_tokens": 80, "enable_zos": False}
    assert rows(script, 3, policy("priority"), **options)[2] == "D (a,1,40) (b,1,34)"
    turns = play(toy(**options), script, 3, scheduling=policy("priority:evict=1"))
    assert (turns[2].row, turns[2].plan.preempted) == ("P (c,3,3)", (0,))
    script[3] = [urgent("c", 3, 2, 0)]  # no more urgent than a
    turns = play(toy(**options), script, 3, scheduling=policy("priority:evict=1"))
    assert (turns[2].row, turns[2].plan.preempted) == ("D (a,1,40) (b,1,34)", ())
    assert turns[2].plan.want, "it may ask above the watermark"


def hinted(name, prompt_len, max_tokens, predicted):
    hints = Hints(predicted_len=predicted)
    return request(name, prompt_len, max_tokens, hints=hints)


@pytest.mark.parametrize(
    ("spec", "leaves"),
    [
        ("srpt:evict=1", "a"),  # a has 18 tokens left, b 4, c 2
        ("limited_srpt:evict=1,limit=0.05", ""),  # both are past a twentieth of theirs
        ("mlfq:evict=1,quantum=4", ""),  # a and b, like c, joined at the level of their prompt
        ("mlfq:evict=1,quantum=15", "a"),  # two tokens have used up a's and b's quantum
        ("las:evict=1,quantum=15", "a"),
        ("qoe:evict=1,ttft_s=0,read_per_s=1", "a"),  # c has nothing yet; the readers of a are ahead
    ],
)
def test_who_leaves_under_which_policy(spec, leaves):
    script = {1: [hinted("a", 14, 20, 20), hinted("b", 14, 9, 6)], 3: [hinted("c", 12, 9, 2)]}
    turns = play(toy(**FULL), script, 3, scheduling=policy(spec))
    found = "".join(turns[2].names[seq_id] for seq_id in turns[2].plan.preempted)
    assert found == leaves


class Asked(Policy):
    evict = 1

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def makes_way(self, seq, waiter, view):
        self.asked.append((seq.request.req_id, waiter.request.req_id))
        return self.answer


def test_it_is_asked_in_the_order_of_victims_until_there_is_room():
    script = {1: [request("a", 14, 6), request("b", 14, 6)], 3: [request("c", 12, 2)]}
    no, yes = Asked(answer=False), Asked(answer=True)
    assert rows(script, 3, no, **FULL)[2] == "D (a,1,16) (b,1,16)"
    assert no.asked == [("a", "c"), ("b", "c")]
    assert rows(script, 3, yes, **FULL)[2] == "P (c,12,12)"
    assert yes.asked == [("a", "c")]
    never = Asked(answer=True)
    never.evict = 0
    assert rows(script, 3, never, **FULL)[2] == "D (a,1,16) (b,1,16)"
    assert never.asked == []


def test_who_is_overdue_stays():
    script = {1: [urgent("a", 14, 6, 0), urgent("b", 14, 6, 0)], 3: [urgent("c", 12, 2, 2)]}
    spec = policy("priority:evict=1+max_wait_s=0.02")
    assert rows(script, 3, spec, **FULL)[2] == "D (a,1,16) (b,1,16)"


def test_what_contradicts_it_is_one_line():
    script = {1: [request("a", 14, 6), request("b", 14, 6)], 3: [request("c", 12, 2)]}
    with pytest.raises(PolicyError, match="makes_way for request 'a' returned None, which is nei"):
        play(toy(**FULL), script, 3, scheduling=Asked(answer=None))
    with pytest.raises(ConfigError, match="evicts running requests, which stop_preempted_request"):
        Scheduler(toy(stop_preempted_request=True), scheduling=policy("srpt:evict=1"))
    with pytest.raises(ConfigError, match="a mixed step has chosen who decodes by then"):
        Scheduler(toy(), scheduling=policy("phase=mixed+order=srpt:evict=1"))
    with pytest.raises(ConfigError, match="evict is for the policy that answers order"):
        policy("fcfs+victim=srpt:evict=1")
    wrong = Asked(answer=True)
    wrong.evict = 0.5
    with pytest.raises(ConfigError, match=r"policy Asked: evict = 0.5: must be an int, at least"):
        Scheduler(toy(), scheduling=wrong)
