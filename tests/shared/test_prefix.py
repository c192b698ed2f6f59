"""What prefix reuse finds, keeps and forgets, one rule at a time; blocks are of 4 tokens here."""

from dataclasses import replace

import pytest

from mdi_exec.engine.request_state import ints32
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from mdi_shared.plan import StepPlan
from mdi_shared.prefix.contents import GivenContents, TokenContents
from mdi_shared.prefix.tails import TailPool
from mdi_shared.request import Request
from tests.shared.script import TOKEN, ScriptedRank, request, toy
from tests.shared.workloads import play, small

ON = {"enable_prefix_cache": True, "num_blocks": 40, "max_model_len": 64}


def asks(name, tokens, most=2, **options):
    """A request for these tokens, and what its outputs will be: `TOKEN`s."""
    tokens = list(tokens)
    contents = TokenContents(ints32(tokens + [TOKEN] * most), 4)
    return request(name, len(tokens), max_tokens=most, contents=contents, **options)


def run(script, *, repeat=1, **options):
    rank = ScriptedRank(toy(**{**ON, **options}), script, repeat=repeat)
    rank.advance(400)
    rank.scheduler.check_integrity()
    return rank


def hits(rank):
    """Return {request: (tokens used, tokens known)} of everybody who found something."""
    found = {}
    for turn in rank.turns:
        for hit in turn.plan.hits:
            found.setdefault(turn.names[hit.seq_id], []).append((hit.tokens, hit.known))
    return found


def first_chunks(rank):
    """Return {request: (q, k)} of each first chunk."""
    out = {}
    for turn in rank.turns:
        for item in turn.plan.items if turn.plan.is_prefill else ():
            out.setdefault(turn.names[item.seq_id], (item.q, item.k))
    return out


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_same_prompt_again_computes_its_last_tokens_only(length, hit):
    rank = run({1: [asks("A", range(length))], 20: [asks("B", range(length))]})
    assert first_chunks(rank)["B"] == (length - hit, length)
    assert hits(rank) == ({"B": [(hit, hit)]} if hit else {})


def test_a_further_turn_goes_on_behind_the_last_cut_of_the_one_before():
    first = list(range(10))
    script = {1: [asks("A", first, most=7)], 30: [asks("B", [*first, *[TOKEN] * 7, 99, 98])]}
    rank = run(script)
    # Of 17 tokens the last was never an input, or only of a step whose row was dropped.
    assert hits(rank) == {"B": [(16, 16)]}
    restored = [copy for turn in rank.turns for copy in turn.plan.copies if copy.to_slot]
    assert [copy.cut for copy in restored] == [16]


def test_without_tails_of_turns_the_end_of_the_prompt_is_found():
    first = list(range(10))
    script = {1: [asks("A", first, most=7)], 30: [asks("B", [*first, *[TOKEN] * 7, 99, 98])]}
    assert hits(run(script, prefix_snapshots="prompt")) == {"B": [(8, 16)]}


def test_a_system_prompt_is_of_use_from_its_third_request_on():
    """The second finds blocks and no tail where they end; its chunk ends there and leaves one."""
    common = list(range(14))
    script = {20 * i + 1: [asks(f"R{i}", [*common, *[100 + i] * 6])] for i in range(4)}
    rank = run(script)
    assert hits(rank) == {"R1": [(0, 12)], "R2": [(12, 12)], "R3": [(12, 12)]}
    assert first_chunks(rank)["R1"] == (12, 12)
    assert hits(run(script, prefix_snapshots="prompt+turn"))["R3"] == [(0, 12)]


def test_requests_of_one_step_share_nothing_and_later_ones_do():
    script = {1: [asks("A", range(7)), asks("B", range(7))], 20: [asks("C", range(7))]}
    rank = run(script)
    assert hits(rank) == {"C": [(4, 4)]}


def test_prompts_shorter_than_a_block_neither_give_nor_take():
    rank = run({1: [asks("A", [TOKEN] * 3, most=20)], 30: [asks("B", [TOKEN] * 20)]})
    assert hits(rank) == {}


def test_a_hit_leaves_the_margin_to_compute():
    rank = ScriptedRank(toy(**ON), {1: [asks("A", range(21))], 20: [asks("B", range(30))]})
    rank.scheduler.queues.prefix.margin = 12
    rank.advance(400)
    assert first_chunks(rank)["B"][0] >= 12


def test_a_preempted_sequence_goes_on_behind_its_own_blocks():
    script = {1: [asks(name, [ord(name)] * 9, most=16) for name in "AB"]}
    rank = run(script, num_blocks=10, max_model_len=28, num_draft_tokens=0)
    assert rank.scheduler.num_preempted > 0
    assert all(tokens >= 8 for own in hits(rank).values() for tokens, _ in own)
    assert rank.output_len == {"A": 16, "B": 16}


def test_contents_known_to_a_coarser_grain_are_cut_there():
    ids = tuple(range(6))

    def coarse(name, length, keys):
        return request(name, length, max_tokens=2, contents=GivenContents(keys, 8))

    script = {1: [coarse("A", 22, ids[:4])], 20: [coarse("B", 30, ids)]}
    assert hits(run(script)) == {"B": [(16, 16)]}


def test_no_tail_is_kept_of_a_cut_that_the_slot_has_long_left():
    known = GivenContents(tuple(range(2)), 4)  # of the prompt; nobody knows the outputs
    rank = run({1: [request("A", 9, max_tokens=20, contents=known)]}, prefix_snapshots="turn")
    assert not any(turn.plan.copies for turn in rank.turns)


# ---- what is forgotten ---------------------------------------------------------------------------


def test_idle_blocks_are_given_out_last_and_the_oldest_first():
    script = {1 + 20 * i: [asks(name, [ord(name)] * 13)] for i, name in enumerate("ABC")}
    script[80] = [asks("A2", [ord("A")] * 13)]
    script[100] = [asks("C2", [ord("C")] * 13)]
    found = hits(run(script, num_blocks=10, max_model_len=28))
    assert found["A2"] == [(0, 8)], "its last block went first, with the tail there"
    assert found["C2"] == [(12, 12)]


def test_a_pool_full_of_idle_blocks_is_a_free_pool():
    script = {1 + 20 * i: [asks(f"R{i}", [i] * 21)] for i in range(8)}
    rank = run(script, num_blocks=12, max_model_len=32)
    assert sum(rank.output_len.values()) == 16
    pool = rank.scheduler.queues.blocks
    assert pool.num_free == 11
    assert pool.num_evicted > 0
    assert rank.scheduler.num_preempted == 0


def test_the_tail_unused_for_longest_gives_way():
    tails = TailPool(3, "lru")
    assert [tails.take(key, 4) for key in "ab"] == [1, 2]
    tails.use("a")
    assert tails.take("c", 4) == 2
    assert sorted(tails.kept_keys()) == ["a", "c"]
    tails.drop("a")
    assert tails.take("d", 4) == 1


def test_the_tail_that_saves_least_gives_way_and_unused_ones_age():
    tails = TailPool(3, "flops")
    tails.take("long", 100)
    kept = []
    for key, saved in [("a", 10), ("b", 10), ("c", 60), ("d", 60), ("e", 60)]:
        tails.take(key, saved)
        kept.append("".join(key for key in "abcde" if key in tails) + "long" * ("long" in tails))
    assert kept == ["along", "blong", "clong", "dlong", "de"]


# ---- on and off ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_where_nothing_is_shared_plans_are_those_without(seed):
    off = small(seed, strict=False)
    on = replace(off, config=replace(off.config, enable_prefix_cache=True))
    (ranks, end), (others, _) = play(off, 300), play(on, 300)
    assert end is None
    for rank, other in zip(ranks, others, strict=True):
        assert [turn.plan for turn in rank.turns] == [turn.plan for turn in other.turns]


@pytest.mark.parametrize("seed", range(30))
def test_repeated_steps_are_the_single_steps(seed):
    script = {
        1 + 9 * i: [asks(f"R{i}", [seed % 3, *[5] * (4 * (seed + i) % 21 + 2)], most=3 + seed % 17)]
        for i in range(6)
    }
    options = {"num_blocks": 14 + seed % 9, "max_model_len": 40, "prefill_attempt_interval": 5,
               "prefill_any_attempt_interval": 5}  # fmt: skip
    single, many = run(script, **options), run(script, repeat=20, **options)
    assert hits(single)
    assert hits(many) == hits(single)
    assert [turn.plan for turn in many.turns if turn.plan.is_prefill] == [
        turn.plan for turn in single.turns if turn.plan.is_prefill
    ]
    one, other = (rank.scheduler.queues.blocks for rank in (single, many))
    assert one.allocate(one.num_free) == other.allocate(other.num_free)


def test_plans_with_hits_survive_json():
    rank = run({1: [asks("A", range(9))], 20: [asks("B", range(9))]})
    plans = [turn.plan for turn in rank.turns]
    assert any(plan.copies for plan in plans)
    assert any(plan.hits for plan in plans)
    assert [StepPlan.from_json(plan.to_json()) for plan in plans] == plans


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_cache": True, "strict_upstream": True}, "has no prefix cache"),
        ({"prefix_tails": 5}, "is used by enable_prefix_cache = true only"),
        ({"enable_prefix_cache": True, "prefix_tails": 0}, "must be between 1"),
        ({"prefix_snapshots": "prompt+end"}, "must be some of prompt, turn, branch"),
        ({"prefix_snapshots": "turn+turn"}, "must be some of prompt, turn, branch"),
        ({"prefix_eviction": "fifo"}, "must be one of lru, flops"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)


# ---- keys ----------------------------------------------------------------------------------------


def test_a_key_stands_for_all_tokens_up_to_its_block():
    tokens = ints32([1, 2, 3, 4] * 3)
    keys = TokenContents(tokens, 4).keys(9)
    assert len(set(keys)) == 3
    assert list(TokenContents(tokens[:9], 4).keys(9)) == keys[:2]
    other = TokenContents(ints32([9, 2, 3, 4, *tokens[4:]]), 4).keys(3)
    assert not set(other) & set(keys)


def test_keys_follow_tokens_as_they_come():
    tokens = ints32([1, 2, 3])
    contents = TokenContents(tokens, 4)
    assert list(contents.keys(2)) == []
    tokens.extend([4, 5, 6, 7, 8])
    assert list(contents.keys(1)) == list(contents.keys(2))[:1]
    assert len(contents.keys(2)) == 2


def test_contents_are_no_part_of_what_a_request_is():
    plain = Request(req_id="A", prompt_len=5)
    assert plain == replace(plain, contents=GivenContents((1,), 4))
