"""Tokens, log-probabilities and logits are bit for bit the same with prefix reuse and without."""

import random

import pytest
import torch

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.tails import Tails
from mdi_exec.numerics import Numerics
from mdi_shared.errors import ConfigError
from mdi_shared.plan import TailCopy
from tests.exec.engines import CHECKPOINT, GOLDEN_MODES, SMALL, Watch, is_empty

REUSE = {**SMALL, "enable_prefix_cache": True}
DICE = random.Random(5)
TEXT = [3 + DICE.randrange(1000) for _ in range(700)]


@pytest.fixture(scope="module")
def llm():
    with LLM(CHECKPOINT, **SMALL) as opened:
        yield opened


def asks(seed, most=4):
    return SamplingParams(max_tokens=most, temperature=1.0, ignore_eos=True, seq_seed=seed,
                          top_logprobs=3)  # fmt: skip


def serve(llm, rounds, **options):
    """Serve rounds of (prompt, parameters), one after the other; return outputs and the watch."""
    llm.reopen(**options)
    watch = Watch(llm)
    out = []
    for requests in rounds:
        prompts, params = zip(*requests, strict=True)
        found = llm.generate(list(prompts), list(params))
        out += [(output.token_ids, output.logprobs, output.finish_reason) for output in found]
    llm.engine.drain()
    assert is_empty(llm.engine)
    llm.engine.scheduler.check_integrity()
    return out, watch


def hits(watch):
    return [hit.tokens for plan in watch.plans for hit in plan.hits]


def require_equal_rows(one, other):
    """Rows of logits that both runs computed are the same bits."""
    assert other.rows.keys() <= one.rows.keys()
    for key in other.rows:
        for row in (*one.rows[key], *other.rows[key]):
            assert torch.equal(row, one.rows[key][0]), key


@pytest.mark.parametrize("mode", GOLDEN_MODES, ids=lambda mode: mode.value)
def test_a_hit_at_every_cut_is_the_cold_run(mode):
    """Prompts that grow by a block each go on where the one before ended, the last at 512."""
    rounds = [[(TEXT[:length], asks(length))] for length in (130, 260, 386, 513, 520)]
    with LLM(CHECKPOINT, numerics=mode.value, **SMALL) as llm:
        cold, without = serve(llm, rounds, **SMALL)
        warm, watch = serve(llm, rounds, **REUSE)
        assert hits(watch) == [128, 256, 384, 512]
        assert warm == cold
        require_equal_rows(without, watch)
        warm, watch = serve(llm, rounds[::2], **REUSE, max_num_batched_tokens=100)
        assert hits(watch) == [128, 384]
        assert warm == cold[::2]
        require_equal_rows(without, watch)


def test_the_same_prompt_again_and_a_shared_system_prompt(llm):
    system = TEXT[:270]
    rounds = [[([*system, *TEXT[300 + i : 430 + 5 * i]], asks(i))] for i in range(3)]
    rounds += [rounds[0], [(TEXT[:128], asks(9))], [(TEXT[:129], asks(9))]]
    cold, without = serve(llm, rounds, **SMALL)
    warm, watch = serve(llm, rounds, **REUSE)
    assert hits(watch) == [0, 256, 384, 128]
    (first, *_), *_ = [plan.hits for plan in watch.plans if plan.hits]
    assert first.known == 256
    assert warm == cold
    require_equal_rows(without, watch)


@pytest.mark.parametrize("zos", [True, False], ids=["zos", "in turn"])
def test_a_session_goes_on_behind_its_outputs(llm, zos):
    def talk(**options):
        llm.reopen(**options, enable_zos=zos)
        watch, said, out = Watch(llm), TEXT[: 125 + 128], []
        for turn in range(3):
            (output,) = llm.generate([said], [asks(turn, most=5 + turn)])
            out.append((output.token_ids, output.logprobs))
            said = [*said, *output.token_ids, *TEXT[400 : 521 - turn]]
        llm.engine.drain()
        return out, watch

    cold, without = talk(**SMALL)
    warm, watch = talk(**REUSE)
    assert hits(watch) == [256, 384]
    assert warm == cold
    require_equal_rows(without, watch)


def test_preempted_sequences_go_on_behind_their_own_blocks(llm):
    rounds = [[(TEXT[40 * i : 40 * i + 250], asks(i, most=12)) for i in range(3)]]
    tight = {**REUSE, "num_blocks": 8, "max_model_len": 400}
    cold, _ = serve(llm, rounds, **SMALL)
    warm, watch = serve(llm, rounds, **tight)
    assert llm.engine.scheduler.num_preempted > 0
    assert max(hits(watch)) >= 128
    assert warm == cold


def test_short_prompts_share_nothing(llm):
    """Rows of a prompt shorter than the window are not those of a longer one."""
    first = [(TEXT[:120], asks(1, most=12))]
    (cold,), _ = serve(llm, [first], **SMALL)
    longer = [([*TEXT[:120], *cold[0], 5, 6], asks(2))]
    cold, _ = serve(llm, [first, longer], **SMALL)
    warm, watch = serve(llm, [first, longer], **REUSE)
    assert hits(watch) == []
    assert warm == cold


def test_under_bounded_replay_a_hit_ends_before_the_first_kept_row(llm):
    rounds = [[(TEXT[:length], asks(length))] for length in (300, 400, 410)]
    keep = {"replay_keep_tokens": 140}
    cold, without = serve(llm, rounds, **SMALL, **keep)
    warm, watch = serve(llm, rounds, **REUSE, **keep)
    assert hits(watch) == [256, 256]
    assert warm == cold
    require_equal_rows(without, watch)


def test_a_crowd_with_few_tails_and_blocks(llm):
    """Prompts of a tree, in rounds of several at once, with evictions of both kinds."""
    dice = random.Random(11)
    rounds = []
    for i in range(3):
        batch = []
        for j in range(3):
            stem = dice.choice((0, 130, 260))
            start = dice.choice((300, 310))
            batch.append(([*TEXT[:stem], *TEXT[start : start + dice.randint(5, 140)]],
                          asks(10 * i + j, most=dice.randint(1, 6))))  # fmt: skip
        rounds.append(batch)
    scarce = {**REUSE, "num_blocks": 14, "prefix_tails": 2, "max_num_batched_tokens": 150}
    cold, _ = serve(llm, rounds, **SMALL)
    warm, watch = serve(llm, rounds, **scarce)
    assert sum(hits(watch)) > 0
    assert llm.engine.scheduler.queues.prefix.tails.num_evicted > 0
    assert warm == cold


# ---- memory --------------------------------------------------------------------------------------


def test_a_tail_is_half_of_the_rings(tiny_config):
    layout = CacheLayout(config=tiny_config, num_tails=3)
    cache = DeviceCache(layout, num_blocks=2, num_slots=4, device="cpu")
    tails = Tails(cache)
    assert tails.num_bytes == 3 * layout.bytes_per_tail
    cache.rings.codes.random_(0, 255)
    before = cache.rings.codes.clone()
    view = cache.rings.codes.view(layout.num_window_layers, 4, 2, -1)
    tails.copy([TailCopy(tail=2, slot=1, cut=256, to_slot=False)])
    view[:, 1, 1] = 0
    tails.copy([TailCopy(2, 1, 256, True), TailCopy(2, 3, 256, True)])
    expected = before.view_as(view).clone()
    expected[:, 3, 1] = expected[:, 1, 1]
    assert torch.equal(view, expected)


def test_tails_of_the_released_model(released):
    ring = 528 * 128
    layout = CacheLayout(config=released, num_tails=2)
    assert layout.bytes_per_tail == 40 * ring + 512
    producers = CacheLayout(config=released, num_tails=2, has_consumer_tails=False)
    assert producers.bytes_per_tail == 20 * ring + 512
    assert layout.bytes_per_slot == 2 * (40 * ring + 512) + 3 * 2 * 512 * 4


def test_strict_mode_has_no_prefix_cache(llm):
    with pytest.raises(ConfigError, match="enable_prefix_cache = True: contradicts strict"):
        llm.reopen(**REUSE, strict_upstream=True)
    assert Numerics(llm.options.numerics)
