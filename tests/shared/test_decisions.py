"""What the core asks a scheduling policy, when, and what it does with a bad answer."""

from collections import Counter
from math import inf, nan

import pytest

from mdi_shared.errors import ConfigError, PolicyError
from mdi_shared.policies import Policy, policy_from_spec
from mdi_shared.scheduler import Scheduler
from tests.shared.script import STEP_NS, ScriptedRank, play, request, toy


class Watching(Policy):
    """Keeps what it was asked and told."""

    def __init__(self):
        self.asked = []
        self.prompt_tokens, self.output_tokens = Counter(), Counter()
        self.seen = []

    def look(self, view):
        self.seen.append(view.now_ns)

    def order(self, seq, view):
        self.asked.append(("order", seq.request.req_id))
        return 0

    def admit(self, seq, view):
        running = ",".join(other.request.req_id for other in view.running)
        self.asked.append(("admit", seq.request.req_id, running))
        return True

    def victim(self, seq, view):
        self.asked.append(("victim", seq.request.req_id))
        return super().victim(seq, view)

    def served(self, seq, prompt_tokens, output_tokens):
        self.prompt_tokens[seq.request.req_id] += prompt_tokens
        self.output_tokens[seq.request.req_id] += output_tokens


def rows(config, script, steps, policy):
    return [turn.row for turn in play(config, script, steps, scheduling=policy)]


def test_the_order_decides_who_is_first():
    config, script = toy(max_num_seqs=1), {1: [request("a", 9, 2), request("b", 3, 2)]}
    assert rows(config, script, 1, None) == ["P (a,9,9)"]
    assert rows(config, script, 1, policy_from_spec("shortest_prompt")) == ["P (b,3,3)"]


def test_who_holds_blocks_stays_first():
    """a's prompt takes two steps of 16 tokens; b, for which the policy cares more, waits."""
    config = toy()
    script = {1: [request("a", 20, 1)], 2: [request("b", 2, 1)]}
    shortest = policy_from_spec("shortest_prompt")
    assert rows(config, script, 2, shortest) == ["P (a,16,16)", "P (a,4,20) (b,2,2)"]


def test_admit_is_asked_of_the_first_that_fits_and_not_when_nothing_runs():
    watching = Watching()
    script = {1: [request("a", 4, 3), request("b", 4, 3)], 2: [request("c", 4, 3)]}
    play(toy(max_num_seqs=8), script, 3, scheduling=watching)
    admits = [asked for asked in watching.asked if asked[0] == "admit"]
    assert admits == [("admit", "b", "a"), ("admit", "c", "a,b")]


class Refusing(Policy):
    def admit(self, seq, view):
        return False


def test_a_policy_that_admits_nobody_serves_one_after_the_other():
    script = {1: [request("a", 4, 2), request("b", 4, 2)]}
    found = rows(toy(enable_zos=False), script, 20, Refusing())
    assert found == ["P (a,4,4)", "D (a,1,5)", "P (b,4,4)", "D (b,1,5)", "D -"]


def test_victims_are_asked_for_when_blocks_are_short_and_only_then():
    """Two sequences of 4 blocks of 4 each in a pool of 8: the first to need a ninth loses."""
    script = {1: [request("a", 15, 9), request("b", 15, 9)]}
    config = toy(num_blocks=9, max_num_batched_tokens=32, enable_zos=False)
    watching = Watching()
    rank = ScriptedRank(config, script, scheduling=watching)
    rank.advance(40)
    victims = [asked[1] for asked in watching.asked if asked[0] == "victim"]
    assert victims == ["a", "b"]
    preempted = [name for turn in rank.turns for s in turn.plan.preempted
                 for name in [rank.names[s]]]  # fmt: skip
    assert preempted == ["a"]  # of equal outputs the older, as without a policy
    other = ScriptedRank(config, script, scheduling=policy_from_spec("victim=newest"))
    other.advance(40)
    preempted = [other.names[s] for turn in other.turns for s in turn.plan.preempted]
    assert preempted == ["b"]


def test_it_is_told_every_token_once_also_of_those_recomputed():
    script = {1: [request("a", 15, 9), request("b", 15, 9)], 30: [request("last", 1, 1)]}
    watching = Watching()
    rank = ScriptedRank(toy(num_blocks=9, max_num_batched_tokens=32), script, scheduling=watching)
    rank.advance(80)
    assert rank.scheduler.num_preempted == 1
    assert watching.output_tokens["a"] == watching.output_tokens["b"] == 9
    planned = Counter()
    for turn in rank.turns:
        for item in turn.plan.items if turn.plan.is_prefill else ():
            planned[rank.names[item.seq_id]] += item.q
    assert watching.prompt_tokens == planned


def test_time_is_that_of_the_last_poll():
    watching = Watching()
    script = {1: [request("a", 4, 3)], 3: [request("b", 4, 3)]}
    play(toy(), script, 4, scheduling=watching)
    assert watching.seen == [0, 2 * STEP_NS]


def test_whoever_waits_too_long_comes_first_and_is_not_refused():
    class Last(Refusing):
        max_wait_s = 2 * STEP_NS / 1e9

        def order(self, seq, view):
            return -seq.seq_id

    script = {1: [request("a", 2, 9)], 2: [request("b", 2, 1, arrived_ns=STEP_NS),
                                           request("c", 2, 1, arrived_ns=STEP_NS)]}  # fmt: skip
    turns = play(toy(enable_zos=False), script, 4, scheduling=Last())
    assert [turn.row for turn in turns[:3]] == ["P (a,2,2)", "D (a,1,3)", "D (a,1,4)"]
    assert turns[3].row == "P (b,2,2) (c,2,2)"
    Last.max_wait_s = inf
    assert play(toy(enable_zos=False), script, 4, scheduling=Last())[3].row == "D (a,1,5)"


@pytest.mark.parametrize(("hook", "answer", "says"), [
    ("order", nan, "order for request 'a' returned nan: NaN compares with nothing"),
    ("order", (1, nan), "order for request 'a' returned (1, nan): NaN compares with nothing"),
    ("order", None, "order for request 'a' returned None: a key is a number, a text, or a tuple"),
    ("order", [1], "order for request 'a' returned [1]: a key is"),
    ("admit", 1, "admit for request 'b' returned 1, which is neither True nor False"),
    ("admit", None, "admit for request 'b' returned None"),
    ("victim", "mixed", "victim for request 'b' returned 'text', which does not compare with 0"),
    ("victim", "raises", "victim for request 'a' raised ValueError: no idea"),
    ("served", "raises", "served for request 'a' raised ValueError: no idea"),
    ("look", "raises", "look raised ValueError: no idea"),
])  # fmt: skip
def test_a_bad_answer_ends_in_a_line_that_names_policy_question_and_request(hook, answer, says):
    class Bad(Policy):
        pass

    def bad(self, seq, *others):
        if answer == "raises":
            raise ValueError("no\nidea")
        if answer == "mixed":
            return [0, "text"][seq.seq_id]
        return answer

    setattr(Bad, hook, bad)
    script = {1: [request("a", 15, 9), request("b", 15, 9)]}
    with pytest.raises(PolicyError) as error:
        play(toy(num_blocks=9, max_num_batched_tokens=32), script, 40, scheduling=Bad())
    assert str(error.value).startswith(f"policy Bad: {says}")
    assert "\n" not in str(error.value)


def test_strict_mode_has_no_policy_but_the_engines():
    with pytest.raises(ConfigError, match="contradicts strict_upstream"):
        Scheduler(toy(strict_upstream=True), scheduling=Policy())
