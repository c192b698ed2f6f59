"""Placements: each rule on a worked example, what they see, and what ends in one line."""

import pytest

from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError, PlacementError
from mdi_shared.placement import (
    PLACEMENTS,
    Balance,
    Placement,
    Placer,
    new_placement,
    require_ranks,
)
from mdi_shared.plan import StepResult
from mdi_shared.rank_view import RankView, ReportedState, SchedulerState, UnseenRank, report
from mdi_shared.request import Request
from mdi_shared.scheduler import Scheduler

BLIND = ("round_robin", "random", "least_tokens", "least_kv")


def request(name="r", prompt_len=10, max_tokens=4):
    return Request(req_id=name, prompt_len=prompt_len, max_tokens=max_tokens)


def view(waiting=0, queued=0, running=0, kv=0):
    return RankView(ReportedState(0, 100, 100, waiting, queued, running, kv, 0))


def chosen(spec, ranks, requests=None):
    placer = Placer(new_placement(spec), ranks)
    return [placer.place(each) for each in requests or [request()]]


def test_those_that_do_not_watch_balance_what_they_gave():
    ranks = [UnseenRank() for _ in range(3)]
    sizes = [request(str(i), *size) for i, size in enumerate([(50, 1), (9, 9), (8, 1), (2, 8)])]
    assert chosen("round_robin", ranks, sizes) == [0, 1, 2, 0]
    assert chosen("least_tokens", ranks, sizes) == [0, 1, 2, 2]
    # Doubled token-steps: 101, 243, 17; then the third has least.
    assert chosen("least_kv", ranks, sizes) == [0, 1, 2, 2]


def test_hashes_spread_by_name_and_seed():
    names = [request(str(i)) for i in range(300)]
    found = {seed: chosen(f"random:seed={seed}", [UnseenRank()] * 3, names) for seed in (0, 1)}
    assert found[0] != found[1]
    assert found[0] == chosen("random", [UnseenRank()] * 3, names)
    assert all(80 < found[0].count(rank) < 120 for rank in range(3))


def test_the_shortest_queue_counts_requests_and_the_least_kv_tokens():
    ranks = [view(waiting=1, queued=10, running=2, kv=40), view(running=2, kv=90),
             view(waiting=2, queued=20)]  # fmt: skip
    assert chosen("jsq", ranks) == [1]
    assert chosen("least_kv_held", ranks) == [2]
    assert chosen("jsq", [view(), view()]) == [0]


def test_of_two_choices_the_emptier_one():
    ranks = [view(running=rank) for rank in range(5)]
    names = [request(str(i)) for i in range(500)]
    found = chosen("power_of_two", ranks, names)
    # Of 10 pairs, rank 0 is the emptier one in 4, rank 3 in 1 and rank 4, the fullest, in none.
    assert [round(found.count(rank) / 50) for rank in range(5)] == [4, 3, 2, 1, 0]


def test_balance_looks_at_growth():
    # Rank 0 holds less, but eight requests grow there: in 100 steps it has 800 more.
    ranks = [view(running=8, kv=100), view(running=1, kv=200), view(running=2, kv=900)]
    assert chosen("balance:horizon=0", ranks) == [0]
    assert chosen("balance:horizon=200", ranks) == [1]


def test_balance_rather_fills_a_gap_than_raises_the_top():
    # 10 more on rank 1 are below the top; on rank 2 they raise it by 10, for all three.
    ranks = [view(kv=100), view(kv=80), view(kv=100)]
    assert chosen("balance:horizon=0", ranks) == [1]
    scores = Balance(horizon=0)
    assert scores.place(request(prompt_len=300), ranks) == 1


def test_what_is_on_its_way_counts_as_waiting():
    rank = view(waiting=1, queued=5)
    for tokens in (7, 8):
        rank.sent(tokens)
    assert (rank.waiting, rank.queued_tokens, rank.outstanding) == (3, 20, 3)
    rank.state = rank.state._replace(num_taken=1, waiting=2, queued_tokens=12)
    assert (rank.waiting, rank.queued_tokens) == (3, 20)
    rank.state = rank.state._replace(num_taken=2, waiting=3, queued_tokens=20)
    assert (rank.waiting, rank.queued_tokens) == (3, 20)


def test_a_burst_is_spread_before_any_rank_has_looked():
    ranks = [view() for _ in range(3)]
    placer, found = Placer(new_placement("jsq"), ranks), []
    for i in range(6):
        found.append(placer.place(request(str(i))))
        ranks[found[-1]].sent(10)
    assert found == [0, 1, 2, 0, 1, 2]


def test_a_state_is_what_a_scheduler_holds():
    config = SchedulerConfig(block_size=4, num_blocks=12, max_num_seqs=3, max_model_len=32,
                             max_num_batched_tokens=8, prefill_attempt_interval=1)  # fmt: skip
    scheduler = Scheduler(config)
    for name, prompt_len in (("a", 6), ("b", 7), ("c", 9)):
        scheduler.submit(request(name, prompt_len, 5))
    assert report(scheduler) == ReportedState(3, 11, 11, 3, 6 + 7 + 9, 0, 0, 0)
    assert scheduler.try_prefill(scheduler.ballot()) is not None
    scheduler.commit(StepResult(((5,), ())))
    # The step had all of a and 2 of b, whose blocks are reserved whole: 2 + 2 of 11.
    prefilled = ReportedState(num_taken=3, num_blocks=11, free_blocks=7, waiting=2,
                              queued_tokens=5 + 9, running=1, kv_tokens=7 + 2,
                              in_flight_tokens=0)  # fmt: skip
    assert report(scheduler) == prefilled
    scheduler.plan_decode(scheduler.ballot())
    assert report(scheduler) == prefilled._replace(kv_tokens=8 + 2, in_flight_tokens=1)


def test_a_placement_that_does_not_watch_sees_nothing():
    class Peeks(Placement):
        watches = False

        def place(self, request, ranks):
            return ranks[0].running

    with pytest.raises(ConfigError) as error:
        chosen(Peeks(), [UnseenRank()] * 2)
    assert str(error.value) == (
        "placement = 'running': the state of a rank was asked for by a placement whose `watches` "
        "is False"
    )


class Wrong(Placement):
    def __init__(self, answer):
        self.answer = answer

    def place(self, request, ranks):
        return self.answer(request)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda _: 2, "returned 2, but the ranks are 0 to 1"),
        (lambda _: -1, "returned -1, but the ranks are 0 to 1"),
        (lambda _: float("nan"), "returned nan, but the ranks are 0 to 1"),
        (lambda _: True, "returned True, but the ranks are 0 to 1"),
        (lambda _: None, "returned None, but the ranks are 0 to 1"),
        (lambda r: 1 // (r.prompt_len - 10), "raised ZeroDivisionError: integer division or"),
    ],
)
def test_what_a_placement_does_wrong_ends_in_one_line(answer, says):
    with pytest.raises(PlacementError) as error:
        chosen(Wrong(answer), [view(), view()])
    assert str(error.value).startswith(f"placement Wrong: place for request 'r' {says}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nearest", "'nearest' is not a placement; known: round_robin, random, least_tokens"),
        ("random:seeds=1", "'seeds' is not a parameter of random; it takes: seed"),
        ("jsq:seed=1", "'seed' is not a parameter of jsq; it takes: none"),
        ("balance:horizon=x", "horizon = 'x' must be a whole number"),
        ("balance:horizon=-1", "placement parameter horizon = -1: must be at least 0"),
        (3, "must be a text such as power_of_two:seed=1, or a Placement"),
    ],
)
def test_what_no_placement_is_called(spec, says):
    with pytest.raises(ConfigError) as error:
        new_placement(spec)
    assert says in str(error.value)


def test_names_and_sessions_come_before_the_placement():
    placer = Placer(new_placement("round_robin"), [UnseenRank()] * 4)
    given = [(3, -1), (-1, 7), (-1, 7), (2, 7), (-1, 7), (-1, -1)]
    assert [placer.place(request(), *each) for each in given] == [3, 0, 0, 2, 2, 1]
    with pytest.raises(ConfigError, match="rank = 4: request 'b' is assigned to it, but the run"):
        require_ranks(["a", "b"], [-1, 4], 4)


def test_which_placements_watch():
    assert tuple(name for name, kind in PLACEMENTS.items() if not kind.watches) == BLIND
    assert SchedulerState(Scheduler(SchedulerConfig())).running == 0
