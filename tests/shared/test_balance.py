"""One target for a group: the share with the most tokens per time, and ranks that keep to it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.balance import SHARES, Offer, best_share, make_offer
from mdi_shared.chunking import CostTarget
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import NO_HOST_COST, HostCost
from mdi_shared.prefill import PrefillSelection
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence
from mdi_shared.scheduler import Scheduler
from tests.shared.script import play_group_ranks, request, toy

MS = 1_000_000


class ContextCost:
    """1 us per row, and as much for each token of context; 1 ms a step."""

    def __init__(self, host=NO_HOST_COST):
        self.host = host

    def device_ns(self, work):
        return MS + 1_000 * work.rows + 1_000 * (work.sum_k - work.rows)


def config(**options):
    return toy(**{"max_model_len": 60_000, "max_num_batched_tokens": 8_192, "num_blocks": 40_000,
                  "max_num_seqs": 8, "chunk_policy": "cost_target", "prefill_target_ms": 16.0,
                  "balance_target": True,
                  **options})  # fmt: skip


def policy(target_ms=16, host=NO_HOST_COST):
    return CostTarget(TINY, ContextCost(host), target_ms * MS)


def offer_of(prompts, *, chunk_policy=None, **options):
    """Return the offer of a rank on which these prompts wait, given as (length, tokens done)."""
    queues = Queues(config(**options))
    for index, (length, done) in enumerate(prompts):
        seq = Sequence(index, request(f"r{index}", length), eos_token_id=1, max_model_len=60_000)
        seq.cached = done
        queues.waiting.append(seq)
    return make_offer(PrefillSelection(queues, policy()), chunk_policy or policy())


def test_the_share_with_most_tokens_per_time_wins():
    steady = Offer(tuple(100 * n for n in range(1, 17)), tuple(50 + 100 * n for n in range(1, 17)))
    assert best_share([steady]) == SHARES, "the constant pays off"
    # A rank with a long context gains little from a longer step and holds the others up.
    few = Offer((10, *[20] * 15), tuple(10 * n for n in range(1, 17)))
    busy = Offer((40, *[50] * 15), tuple(10 * n for n in range(1, 17)))
    assert best_share([few, busy]) == 1


def test_of_equal_shares_the_smallest():
    even = Offer(tuple(range(1, 17)), tuple(range(10, 170, 10)))
    assert best_share([even, even]) == 1
    assert best_share([Offer(), Offer()]) == SHARES


def test_a_rank_without_work_does_not_stretch_the_step():
    own = Offer(tuple(range(1, 17)), tuple(20 + n for n in range(1, 17)))
    assert best_share([own, Offer()]) == best_share([own])


def test_an_offer_is_what_the_rank_would_run():
    offer = offer_of([(20_000, 0)])
    assert offer.step_ns[-1] <= 16 * MS
    assert offer.tokens[-1] == 8_192, "the token budget holds as well"
    assert list(offer.tokens) == sorted(offer.tokens)
    late = offer_of([(20_000, 10_000)])
    assert 0 < late.tokens[-1] < offer.tokens[-1]
    assert offer_of([]) == Offer()


def test_the_hosts_time_counts():
    host = HostCost(schedule_ns=2 * MS, schedule_ns_per_seq=0, launch_ns=MS, process_ns=MS,
                    process_ns_per_seq=0)  # fmt: skip
    plain, hosted = offer_of([(500, 0)]), offer_of([(500, 0)], chunk_policy=policy(host=host))
    assert [b - a for a, b in zip(plain.step_ns, hosted.step_ns, strict=True)] == [4 * MS] * SHARES


def test_memory_and_seats_limit_an_offer():
    prompts = [(300, 0)] * 3
    assert offer_of(prompts).tokens[-1] == 900
    assert offer_of(prompts, max_num_seqs=2).tokens[-1] == 600
    tight = offer_of(prompts, num_blocks=150, max_model_len=400)  # of 4 tokens
    assert tight.tokens[-1] == 300


prompts = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 9_000)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(1, SHARES))
def test_a_preview_is_what_the_selection_then_picks(lengths, share):
    """Nothing changes by asking, and every share of the offer would have been kept."""
    options = config(num_blocks=9_000)
    rank = Scheduler(options, policy())
    for index, (length, cached) in enumerate(lengths):
        rank.submit(request(f"r{index}", length + cached))
    rank.check_integrity()
    before = rank.offer(rank.ballot())
    assert rank.offer(rank.ballot()) == before
    plan = rank.try_prefill(rank.ballot(), share)
    assert (0 if plan is None else sum(plan.qs)) == before.tokens[share - 1]
    if plan is not None:
        assert plan.target_ns == max(16 * MS * share // SHARES, 1)


def test_a_group_with_uneven_contexts_runs_more_tokens_per_time():
    """Rank 0 works on a long prompt, rank 1 on short ones; both take the same target."""
    scripts = [
        {1: [request("long", 30_000, 2)]},
        {1: [request(f"short{i}", 900, 2) for i in range(8)]},
    ]
    ranks = play_group_ranks([config()] * 2, scripts, 2_000, policy=policy())
    targets = [[t.plan.target_ns for t in rank.turns if t.plan.is_prefill] for rank in ranks]
    assert targets[0] == targets[1]
    assert len(set(targets[0])) > 1, "the group was meant to change its mind"
    assert all(0 < each <= 16 * MS for each in targets[0])
    done = [sum(sum(t.plan.qs) for t in rank.turns if t.plan.is_prefill) for rank in ranks]
    assert done == [30_000, 7_200]


def test_a_group_is_not_asked_unless_it_wants_to_balance():
    scripts = [{1: [request("a", 900, 2)]}, {1: [request("b", 20_000, 2)]}]
    ranks = play_group_ranks([config(balance_target=False)] * 2, scripts, 200, policy=policy())
    targets = {t.plan.target_ns for rank in ranks for t in rank.turns if t.plan.is_prefill}
    assert targets == {16 * MS}
