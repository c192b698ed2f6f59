"""Scheduling policies by worked examples: each rule on a handful of requests."""

import math

import pytest

from mdi_shared.errors import ConfigError
from mdi_shared.policies import POLICIES, Policy, View, new_policy, policy_from_spec
from mdi_shared.policies.admission import peak_tokens
from mdi_shared.policies.prediction import normal, sigma_of_tau
from mdi_shared.policies.registry import AXES, answers, names_of
from mdi_shared.request import Hints, Request, Sequence, State
from tests.layout.policy_table import DOC, put

S = 1_000_000_000


def seq(name="r", prompt=10, out=0, *, most=100, arrived_s=0, cached=0, seq_id=0, **hints):
    """A sequence with `out` tokens put out, `cached` of its tokens computed."""
    request = Request(req_id=name, prompt_len=prompt, max_tokens=most,
                      arrived_ns=int(arrived_s * S), hints=Hints(**hints))  # fmt: skip
    made = Sequence(seq_id, request, eos_token_id=1, max_model_len=10_000)
    made.base, made.prefilled = prompt + out, cached
    return made


def view(now_s=0, *, waiting=(), running=(), num_blocks=100, block_size=1, free=None):
    return View(block_size, num_blocks, int(now_s * S), num_blocks if free is None else free,
                list(waiting), list(running))  # fmt: skip


def ordered(spec, seqs, now_s=0):
    """Names by the policy's order."""
    policy, at = policy_from_spec(spec), view(now_s, waiting=seqs)
    policy.look(at)
    return " ".join(s.request.req_id for s in sorted(seqs, key=lambda s: policy.order(s, at)))


def gives_way(spec, seqs, now_s=0):
    """Names by the policy's victims, first victim first."""
    policy, at = policy_from_spec(spec), view(now_s, running=seqs)
    keys = [(policy.victim(s, at), s) for s in seqs]
    return " ".join(s.request.req_id for _, s in sorted(keys, key=lambda k: k[0], reverse=True))


def admits(spec, newcomer, running, **options):
    return policy_from_spec(spec).admit(newcomer, view(running=running, **options))


# ---- order -------------------------------------------------------------------------------------


def test_orders_by_arrival_and_class():
    a, b, c = seq("a", arrived_s=0), seq("b", arrived_s=1), seq("c", arrived_s=2)
    assert ordered("fcfs", [a, b, c]) == "a b c"
    assert ordered("lcfs", [a, b, c]) == "c b a"
    assert ordered("random:seed=1", [a, b, c]) == ordered("random:seed=1", [c, b, a])
    many = [seq(str(i)) for i in range(20)]
    assert ordered("random", many) not in (ordered("fcfs", many), ordered("random:seed=1", many))


def test_priority_and_its_aging():
    old, urgent = seq("old", priority=0, arrived_s=0), seq("urgent", priority=2, arrived_s=10)
    assert ordered("priority", [old, urgent], now_s=31) == "urgent old"
    # 31 s of waiting are 3.1 classes of 10 s, 21 s are 2.1 on top of 2.
    assert ordered("priority:aging_s=10", [old, urgent], now_s=31) == "urgent old"
    assert ordered("priority:aging_s=4", [old, urgent], now_s=31) == "old urgent"
    assert gives_way("priority", [urgent, old]) == "old urgent"


def test_shortest_prompt_counts_what_is_left_to_compute():
    cached, short = seq("cached", 100, cached=95), seq("short", 20)
    again = seq("again", 4, out=30)  # preempted: all 34 tokens are to be computed again
    assert ordered("shortest_prompt", [again, short, cached]) == "cached short again"


def test_shortest_prompt_with_aging_in_two_forms():
    long, short = seq("long", 32_768, arrived_s=0), seq("short", 10, arrived_s=5)
    # 0.5 / (1 + p / 32,768) + 0.5 wait / 5: 0.25 + 0.5 for the long one, 0.4998 for the other.
    assert ordered("sjf_aging", [short, long], now_s=5) == "long short"
    assert ordered("sjf_aging:wait=0", [long, short], now_s=5) == "short long"
    # 32,768 - 5 rate against 10.
    assert ordered("sjf_decay:rate=6551", [long, short], now_s=5) == "short long"
    assert ordered("sjf_decay:rate=6552", [short, long], now_s=5) == "long short"


def test_two_lanes():
    first, second = seq("first", 3_000, arrived_s=0), seq("second", 3_000, arrived_s=4)
    short = seq("short", 100, arrived_s=5)
    lanes = "two_lanes:threshold=2048,bound_s=10"
    assert ordered(lanes, [first, second, short], now_s=10) == "short first second"
    assert ordered(lanes, [first, second, short], now_s=11) == "first short second"


def test_orders_by_predicted_output():
    a = seq("a", 10, predicted_len=50)
    b = seq("b", 640, predicted_len=30)
    begun = seq("begun", 10, 45, predicted_len=60)
    assert ordered("sjf", [a, b, begun]) == "b a begun"
    # Left over: 50 + 10/64, 30 + 640/64, 15 + 55/64.
    assert ordered("srpt", [a, b, begun]) == "begun b a"
    assert ordered("srpt:ratio=10", [a, b, begun]) == "begun a b"
    assert gives_way("srpt", [begun, b, a]) == "a b begun"
    # `begun` has put out 75 % of 60: with C = 0.7 it is spared.
    assert gives_way("longest_remaining", [begun, b, a]) == "a b begun"
    far = seq("far", 10, 80, predicted_len=100, most=200)  # 20 left, 80 % done
    near = seq("near", 10, 2, predicted_len=20)  # 18 left
    assert gives_way("srpt", [near, far]) == "far near"
    assert gives_way("limited_srpt:limit=0.8", [near, far]) == "near far"
    assert gives_way("limited_srpt:limit=0.81", [near, far]) == "far near"


def test_a_prediction_is_deterministic_and_as_noisy_as_stated():
    policy = policy_from_spec("sjf:sigma=0.5")._order
    at = [policy.predicted(seq(str(i), predicted_len=1_000, most=10**9)) for i in range(2_000)]
    assert at[7] == policy.predicted(seq("7", predicted_len=1_000, most=10**9))
    at.sort()
    assert 950 < at[1_000] < 1_050  # exp(0)
    assert 1_000 * 1.55 < at[1_682] < 1_000 * 1.75  # exp(0.5), one sigma
    assert policy_from_spec("sjf")._order.predicted(seq(predicted_len=7)) == 7
    assert policy_from_spec("sjf")._order.predicted(seq(most=70)) == 70  # nobody has said
    assert policy_from_spec("sjf")._order.predicted(seq(most=70, predicted_len=99)) == 70
    draws = [normal(str(i)) for i in range(2_000)]
    assert abs(sum(draws) / 2_000) < 0.1
    assert abs(sum(x * x for x in draws) / 2_000 - 1) < 0.1


def test_a_rank_correlation_is_noise_of_a_size():
    def tau_of_sigma(sigma, spread):
        return 2 / math.pi * math.asin(spread / math.hypot(spread, sigma))

    assert sigma_of_tau(1.0, 0.8) == 0
    assert abs(sigma_of_tau(0.5, 1.0) - 1.0) < 1e-12  # rho = sin(45 degrees)
    assert abs(tau_of_sigma(sigma_of_tau(0.3, 1.7), 1.7) - 0.3) < 1e-12
    by_tau, by_sigma = (policy_from_spec(s)._order for s in ("sjf:tau=0.5", "sjf:sigma=1.0"))
    one = seq("one", predicted_len=500, most=10**6)
    assert abs(by_tau.predicted(one) - by_sigma.predicted(one)) <= 1


def test_skip_join_mlfq():
    spec = "mlfq:quantum=16,ratio=2,levels=4,promote_s=60"
    level = policy_from_spec(spec)._order.level
    at = view(0)
    assert [level(seq(prompt=p), at) for p in (1, 16, 17, 33, 64, 65, 500)] == [0, 0, 1, 2, 2, 3, 3]
    # A prompt of 10 joins level 0 and has used its 16 tokens with 6 outputs, level 1 with 38.
    levels = [level(seq(prompt=10, out=out), at) for out in (6, 7, 38, 39, 102, 103)]
    assert levels == [0, 1, 1, 2, 2, 3]
    assert level(seq(prompt=500), view(61)) == 0
    assert ordered(spec, [seq("long", 40), seq("short", 4, arrived_s=1)], now_s=2) == "short long"
    assert gives_way(spec, [seq("long", 40), seq("short", 4, 9)]) == "long short"


def test_least_attained_service_counts_whole_programs():
    policy = policy_from_spec("las:quantum=100,ratio=2")
    a, b = seq("a", program="p"), seq("b", program="q", arrived_s=1)
    later = seq("later", program="p", arrived_s=2)
    keys = lambda: [policy.order(s, view()) for s in (a, later, b)]  # noqa: E731
    assert keys() == [(0, 0), (0, 2 * S), (0, S)]
    policy.served(a, 90, 0)
    policy.served(a, 0, 10)
    assert keys() == [(1, 0), (1, 2 * S), (0, S)]
    policy.served(b, 400, 0)
    assert keys() == [(1, 0), (1, 2 * S), (3, S)]  # levels end at 100, 200, 400
    assert policy.victim(b, view()) > policy.victim(a, view())


def test_a_request_without_a_program_is_forgotten_when_it_ends():
    policy = policy_from_spec("las")
    alone = seq("alone")
    policy.served(alone, 5_000, 0)
    assert policy.order(alone, view())[0] > 0
    alone.become(State.ABORTED)
    policy.served(alone, 0, 1)
    assert not policy._order.attained


def test_deadlines():
    late, soon = seq("late", arrived_s=0, deadline_ns=5 * S), seq("soon", arrived_s=1)
    assert ordered("edf:ttft_s=2", [late, soon]) == "soon late"
    assert ordered("edf:ttft_s=5", [late, soon]) == "late soon"
    # LARS: a prompt of 100,000 takes 10 s at 100 us a token and may take 0.5 + 4 * 10 s; after 5 s
    # its slack is 40.5 - 5 - 10 of 40.5 = 0.63; a short one with 0.1 s left of 0.54 goes first.
    long, short = seq("long", 100_000, arrived_s=0), seq("short", 100, arrived_s=4.56)
    assert ordered("lars", [long, short], now_s=5) == "short long"
    assert ordered("lars", [long, seq("short", 100, arrived_s=36)], now_s=36) == "long short"


def test_quality_of_experience_per_token():
    at_ease, reader = seq("at_ease", 100, arrived_s=9), seq("reader", 100, arrived_s=0)
    spec = "qoe:ttft_s=1,read_per_s=5,serve_per_s=20,horizon_s=1"
    gain = policy_from_spec(spec)._order.gain
    # After 10 s and the horizon a reader should have 50 tokens; one second brings 20 of them.
    assert gain(reader, view(10)) == pytest.approx(0.4 / 100)
    assert gain(seq("far", 100, out=50), view(10)) == 0
    assert ordered(spec, [at_ease, reader], now_s=10) == "at_ease reader"  # all of 5 tokens
    assert ordered(spec, [reader, seq("new", 100, arrived_s=10)], now_s=10) == "reader new"
    spared = seq("spared", 1_000)
    spared.num_preempted = 1
    assert gives_way(spec, [spared, reader], now_s=10) == "reader spared"


# ---- fairness ----------------------------------------------------------------------------------


def test_virtual_token_counter():
    policy = policy_from_spec("vtc:prompt=1,output=2")
    a, b = seq("a", client="alice"), seq("b", client="bob", arrived_s=1)
    both = view(waiting=[a, b])
    policy.look(both)
    policy.served(a, 10, 0)
    policy.served(a, 0, 5)
    policy.served(b, 12, 0)
    assert policy._order.counters == {"alice": 20.0, "bob": 12.0}
    assert policy.order(b, both) < policy.order(a, both)


def test_a_client_that_comes_back_is_lifted():
    policy = policy_from_spec("vtc")
    a, b = seq("a", client="alice"), seq("b", client="bob")
    policy.look(view(waiting=[a]))
    policy.served(a, 500, 0)
    policy.look(view(waiting=[a]))
    policy.look(view(waiting=[a, b]))  # bob was away: he has earned nothing by it
    assert policy._order.counters == {"alice": 500.0, "bob": 500.0}


def test_weights_and_prediction():
    policy = policy_from_spec("vtc:weights=alice:4/b:ob:1")
    policy.served(seq(client="alice"), 100, 0)
    policy.served(seq(client="b:ob"), 100, 0)
    assert policy._order.counters == {"alice": 25.0, "b:ob": 100.0}
    ahead = policy_from_spec("vtc:predict=1")
    one = seq("one", client="c", predicted_len=30)
    ahead.served(one, 10, 0)
    assert ahead._order.counters["c"] == 10 + 2 * 30
    ahead.served(one, 0, 20)
    assert ahead._order.counters["c"] == 70
    one.become(State.ABORTED)
    ahead.served(one, 0, 0)
    assert ahead._order.counters["c"] == 10 + 2 * 20


# ---- admission ---------------------------------------------------------------------------------


def test_the_peak_of_memory():
    # Two requests: at the end of the first (1 step) both hold 1 more, then only the long one.
    assert peak_tokens([(10, 1), (5, 20)]) == 25
    assert peak_tokens([(10, 1), (5, 3)]) == 17
    assert peak_tokens([]) == 0
    for rows in ([(3, 4), (7, 2), (1, 9)], [(2, 2), (2, 2), (5, 1)], [(1, 5)]):
        by_step = [sum(held + step for held, left in rows if left >= step) for step in range(1, 10)]
        assert peak_tokens(rows) == max(by_step)


def test_watermark_and_conservative():
    newcomer = seq(prompt=10, most=20)
    assert admits("watermark:share=0.9", newcomer, [], num_blocks=100, free=20)
    assert not admits("watermark:share=0.9", newcomer, [], num_blocks=100, free=19)
    assert admits("conservative", newcomer, [seq(prompt=50, most=20)], num_blocks=100)
    assert not admits("conservative", newcomer, [seq(prompt=51, most=20)], num_blocks=100)


def test_run_to_completion():
    newcomer, begins, decodes = seq("new"), seq("begins", out=1), seq("decodes", out=2)
    assert admits("run_to_completion", newcomer, [begins, seq("picked")])
    assert not admits("run_to_completion", newcomer, [begins, decodes])


def test_the_future_by_prediction_and_by_the_past():
    newcomer = seq("new", 10, most=90, predicted_len=20)
    running = [seq("old", 40, 20, most=90, predicted_len=30)]
    # After 10 steps the old one ends with 70 + 20; then the new one holds 30.
    assert admits("future", newcomer, running, num_blocks=90)
    assert not admits("future", newcomer, running, num_blocks=89)
    assert admits("mcsf", newcomer, running, num_blocks=90)
    assert ordered("mcsf", [newcomer, seq("less", predicted_len=10)]) == "less new"
    policy = policy_from_spec("past_future:alpha=0.5")
    assert policy._order.left(newcomer) == 90  # nobody has ended yet
    for length in (30, 10):
        done = seq("done", 5, length)
        done.become(State.ABORTED)
        policy.served(done, 0, length)
    assert policy._order.mean == 20
    assert policy._order.left(newcomer) == 20
    assert policy._order.left(seq(out=40)) == 4  # more than the mean is out: 1.1 times that
    assert policy.admit(newcomer, view(running=[seq("old", 40, 10)], num_blocks=80))
    assert not policy.admit(newcomer, view(running=[seq("old", 40, 10)], num_blocks=79))


def test_wait_lets_requests_of_a_type_come_together():
    policy = policy_from_spec("wait:threshold=2,width=100")
    first, long, second = seq("a", 10, seq_id=0), seq("b", 500, seq_id=1), seq("c", 90, seq_id=2)
    at = view(waiting=[first, long])
    policy.look(at)
    assert not policy.admit(first, at)
    at = view(waiting=[first, long, second])
    policy.look(at)
    assert [policy.admit(s, at) for s in (first, long, second)] == [True, False, True]
    for s in (first, second):
        policy.served(s, s.request.prompt_len, 0)
    at = view(waiting=[long, seq("d", 10, seq_id=3)])
    policy.look(at)
    assert [policy.admit(s, at) for s in at.waiting] == [False, False]
    assert policy.admit(first, at)  # preempted, it need not wait for others again


# ---- victims -----------------------------------------------------------------------------------


def test_victims():
    a = seq("a", 100, 50, most=60, seq_id=0, priority=1)
    b = seq("b", 10, 50, most=500, seq_id=1, priority=2)
    c = seq("c", 300, 5, most=10, seq_id=2, priority=1)
    for s, blocks in ((a, 10), (b, 6), (c, 20)):
        s.block_table = list(range(1, blocks + 1))
    assert gives_way("newest", [a, b, c]) == "c b a"
    assert gives_way("longest_output", [a, b, c]) == "a b c"  # of equals the older
    assert gives_way("lowest_priority", [a, b, c]) == "c a b"
    assert gives_way("least_computed", [a, b, c]) == "b a c"
    # blocks / tokens * (1 - output / max_tokens): 0.011, 0.09, 0.033.
    assert gives_way("cost_aware", [a, b, c]) == "b c a"


# ---- by name -----------------------------------------------------------------------------------


def test_axes_combine():
    policy = policy_from_spec("srpt:sigma=0.5+admit=past_future+victim=newest+max_wait_s=30")
    kinds = [type(p).__name__ for p in (policy._order, policy._admit, policy._victim)]
    assert kinds == ["SRPT", "PastFuture", "Newest"]
    assert policy.max_wait_s == 30
    assert str(policy) == "srpt:sigma=0.5+admit=past_future+victim=newest+max_wait_s=30"
    alone = policy_from_spec("admit=future")
    assert [type(p).__name__ for p in (alone._order, alone._admit, alone._victim)] == [
        "Policy", "Future", "Policy"
    ]  # fmt: skip
    assert new_policy("fcfs") is None
    assert policy_from_spec("fcfs").order(seq(), view()) == 0


def test_every_policy_answers_something_by_name_and_documents_itself():
    for name, kind in POLICIES.items():
        assert any(name in names_of(axis) for axis in AXES), name
        assert kind.__doc__
        assert not kind.__doc__.startswith(f"{kind.__name__}("), f"{name} has no docstring"
        policy_from_spec(name)
        for axis in AXES:
            if answers(kind, axis):
                policy_from_spec(f"{axis}={name}")


@pytest.mark.parametrize(("spec", "says"), [
    ("", "'' is not a policy; known: fcfs, lcfs, "),
    ("spf", "'spf' is not a policy; known: fcfs, "),
    ("srpt:sgma=1", "'sgma' is not a parameter of srpt; it takes: sigma, tau, spread, ratio"),
    ("lcfs:x=1", "'x' is not a parameter of lcfs; it takes: none"),
    ("srpt:sigma", "'sigma' is not a parameter of srpt"),
    ("srpt:sigma=", "sigma = '' must be a number"),
    ("srpt:sigma=nan", "sigma = 'nan' must be a number"),
    ("srpt:sigma=-1", "policy parameter sigma = -1.0: must be at least 0 and at most 10"),
    ("srpt:ratio=0", "policy parameter ratio = 0.0: must be above 0"),
    ("mlfq:levels=2.5", "levels = '2.5' must be a whole number"),
    ("srpt:sigma=1,sigma=1", "gives sigma of srpt twice"),
    ("srpt+newest", "'newest' must be AXIS=NAME with an axis of phase, order, admit, victim, or"),
    ("srpt+place=random", "'place=random' must be AXIS=NAME"),
    ("phase=srpt", "'srpt' is not a policy with an answer to phase; known: votes, prefill_first, "),
    ("phase=mixed:budget=-1", "policy parameter budget = -1: must be at least 0"),
    ("victim=newest+victim=newest", "gives victim twice"),
    ("victim=sjf", "'sjf' is not a policy with an answer to victim; known: "),
    ("srpt+max_wait_s=-1", "max_wait_s must be at least 0 s"),
    ("vtc:weights=alice:0", "must be CLIENT:SHARE"),
    ("vtc:weights=alice", "must be CLIENT:SHARE"),
])  # fmt: skip
def test_a_bad_specification_says_what_is_allowed(spec, says):
    with pytest.raises(ConfigError) as error:
        policy_from_spec(spec)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [
    ("predicted_len", 0), ("predicted_len", 2**31), ("deadline_ns", 1.5), ("priority", 128),
    ("priority", None), ("client", 3), ("program", b"p"),
])  # fmt: skip
def test_a_hint_is_what_a_trace_can_hold(name, value):
    with pytest.raises(ConfigError, match=f"^{name} = "):
        Hints(**{name: value})


def test_a_specification_is_a_text_or_a_policy():
    with pytest.raises(ConfigError, match="policy = 3: must be a text such as"):
        new_policy(3)
    own = Policy()
    assert new_policy(own) is not own


def test_the_table_of_policies_is_up_to_date():
    text = DOC.read_text(encoding="utf-8")
    assert put(text) == text, "run python -m tests.layout.policy_table"
