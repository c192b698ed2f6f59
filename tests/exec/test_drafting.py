"""Drafts change nothing but speed: tokens and log-probabilities with and without, bit for bit.

The head of a model of random weights guesses right by chance only. So most tests force a random
pattern of acceptances: drafts are the tokens that plain decoding gave, some of them spoilt.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mdi_exec.engine.draft_options import require_drafts
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.numerics import Numerics
from mdi_exec.weights.source import random_config
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT, SMALL, is_empty
from tests.exec.groups import llm_results

VOCABULARY = 1024
dice = random.Random(7)
PROMPTS = [[dice.randrange(3, 900) for _ in range(n)] for n in (1, 37, 124, 131, 250, 9)]
KINDS = (
    {"temperature": 0.0, "max_tokens": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 50, "top_logprobs": 2},
    {"temperature": 0.7, "golden_token_ids": (5, -1, -1, 8, 9, -1, 1000)},
    {"temperature": 1.0},
    {"temperature": 0.0, "first_n_token_no_eos": 1},
)
PARAMS = [SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "seq_seed": 100 + i, **kind})
          for i, kind in enumerate(KINDS)]  # fmt: skip


class Served:
    """One loaded model; `serve` runs all requests with other options and returns what they got."""

    def __init__(self, numerics):
        self.llm = LLM(CHECKPOINT, numerics=numerics.value, num_draft_tokens=5, **SMALL)
        self.plain = self.serve(0)

    def serve(self, drafts, params=PARAMS, *, right=None, **options):
        """`right` is the chance that a draft is made what it should be; None leaves them alone."""
        self.llm.reopen(**{**SMALL, **options}, num_draft_tokens=drafts)
        self.accepted = []
        if drafts:
            spoil(self.llm.engine.runner, self, right)
        outputs = self.llm.generate(PROMPTS, params)
        self.llm.engine.drain()
        assert is_empty(self.llm.engine)
        self.num_preempted = self.llm.engine.scheduler.num_preempted
        return [(o.token_ids, o.logprobs, o.finish_reason, o.text) for o in outputs]


def spoil(runner, served, right):
    """Note what is accepted; where `right` is given, replace drafts by the plain run's tokens."""
    drafting = runner._program.drafting
    propose, verify = drafting.propose, drafting.verify
    luck = random.Random(3)

    def verified(batch, tokens):
        found = verify(batch, tokens)
        served.accepted += found.accepted.tolist()
        return found

    def forced(batch, found, rows):
        made = propose(batch, found, rows)
        if right is None:
            return made
        bases, seeds = batch.starts + found.accepted, rows.seeds[batch.cu_q[:-1]]
        for slot, base, seed in zip(batch.slots, bases.tolist(), seeds.tolist(), strict=True):
            if not slot:  # an idle rank's
                continue
            index = seed - 100
            text = [*PROMPTS[index], *served.plain[index][0], *[0] * 9]
            for i in range(drafting.size):
                token = text[base + 2 + i] if base + 2 + i < len(text) else 0
                wrong = luck.random() >= right
                drafting.ids[slot, i] = (token + wrong) % VOCABULARY
        return made

    drafting.verify, drafting.propose = verified, forced


@pytest.fixture(scope="module")
def rounded_model():
    served = Served(Numerics.QUANTISED)
    yield served
    served.llm.close()


@pytest.fixture(scope="module")
def exact_model():
    served = Served(Numerics.FLOAT32)
    yield served
    served.llm.close()


@pytest.mark.parametrize("zos", [True, False], ids=["ZOS", "without ZOS"])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
def test_random_acceptances_change_nothing(rounded_model, drafts, zos):
    found = rounded_model.serve(drafts, right=0.7, enable_zos=zos)
    assert found == rounded_model.plain
    assert set(rounded_model.accepted) == set(range(drafts + 1))


@pytest.mark.parametrize("zos", [True, False], ids=["ZOS", "without ZOS"])
def test_without_rounding_either(exact_model, zos):
    assert exact_model.serve(4, right=0.7, enable_zos=zos) == exact_model.plain
    assert set(exact_model.accepted) == set(range(5))


def test_the_heads_own_drafts(rounded_model):
    assert rounded_model.serve(3) == rounded_model.plain


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 50, "max_num_seqs": 6},
        {"max_num_seqs": 2, "max_num_batched_tokens": 61, "enable_zos": False},
    ],
    ids=["chunks", "two at a time"],
)
def test_however_they_are_scheduled(rounded_model, options):
    assert rounded_model.serve(3, right=0.8, **options) == rounded_model.plain


@pytest.mark.parametrize("zos", [True, False], ids=["ZOS", "without ZOS"])
def test_preempted_and_computed_again(rounded_model, zos):
    found = rounded_model.serve(3, right=0.8, enable_zos=zos, num_blocks=10, max_model_len=300)
    assert rounded_model.num_preempted >= 1
    assert found == rounded_model.plain


def test_behind_a_bounded_replay(rounded_model):
    options = {"replay_keep_tokens": 140, "max_num_batched_tokens": 128}
    plain = rounded_model.serve(0, **options)
    assert plain != rounded_model.plain
    assert rounded_model.serve(3, right=0.5, **options) == plain


def ended_by(params, **change):
    return [SamplingParams(
        max_tokens=p.max_tokens, temperature=p.temperature, top_p=p.top_p, top_k=p.top_k,
        seq_seed=p.seq_seed, ignore_eos=True, golden_token_ids=p.golden_token_ids, **change,
    ) for p in params]  # fmt: skip


@pytest.mark.parametrize("zos", [True, False], ids=["ZOS", "without ZOS"])
def test_ends_inside_an_accepted_run(rounded_model, zos):
    """Every draft is right; each request has its stop at another place of a run of four."""
    texts = [tokens for tokens, *_ in rounded_model.plain]
    stops = tuple({text[2 + i] for i, text in enumerate(texts) if len(text) > 2 + i})
    params = ended_by(PARAMS, stop_token_ids=stops)
    plain = rounded_model.serve(0, params)
    assert {reason for _, _, reason, _ in plain} >= {"stop"}
    assert rounded_model.serve(3, params, right=1.0, enable_zos=zos) == plain
    assert max(rounded_model.accepted) == 3


def test_stop_strings_inside_an_accepted_run(rounded_model):
    """What a step brings behind the string is not shown, though the model has computed it."""
    texts = [text for *_, text in rounded_model.plain]
    stops = tuple({text[5:7] for text in texts if len(text) > 7})
    params = ended_by(PARAMS, stop=stops)
    plain = rounded_model.serve(0, params)
    assert [reason for _, _, reason, _ in plain].count("stop") >= 3
    assert rounded_model.serve(4, params, right=1.0) == plain


def test_the_models_longest_context_ends_a_run(rounded_model):
    options = {"max_model_len": 256, "num_blocks": 30}
    plain = rounded_model.serve(0, **options)
    assert len(plain[4][0]) == 7, "one past the cap"
    assert rounded_model.serve(5, right=1.0, **options) == plain


def test_aborts_in_the_middle(rounded_model):
    """Who is aborted has a part of its tokens, all others have theirs."""
    llm = rounded_model.llm
    llm.reopen(**SMALL, num_draft_tokens=3)
    spoil(llm.engine.runner, rounded_model, 0.7)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        llm.engine.add_request(prompt, params, str(index))
    done = {}
    for turn in range(200):
        if turn in (4, 6):
            llm.engine.abort_request(str(turn // 2))
        done |= {out.req_id: out for out in llm.engine.step() if out.finished}
        if len(done) == len(PROMPTS):
            break
    llm.engine.drain()
    assert is_empty(llm.engine)
    for index, (tokens, logprobs, reason, _) in enumerate(rounded_model.plain):
        out = done[str(index)]
        assert out.finish_reason == ("abort" if index in (2, 3) else reason)
        count = len(out.token_ids)
        assert (out.token_ids, out.logprobs) == (tokens[:count], logprobs[:count])
        assert count == len(tokens) or index in (2, 3)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_ranks_of_a_group_draft_together(rounded_model, exchange):
    """Idle ranks take part: the second rank has been done for long when the first one is."""
    params = [replace(p, max_tokens=p.max_tokens if i % 2 == 0 else 3)
              for i, p in enumerate(PARAMS)]  # fmt: skip

    def serve():
        found = SimpleNamespace(plain=rounded_model.plain, accepted=[])
        options = {"num_draft_tokens": 3, "exchange": exchange, **SMALL}
        with LLM(CHECKPOINT, **options) as llm:
            spoil(llm.engine.runner, found, 0.7)
            outputs = llm.generate(PROMPTS, params)
        return [(o.token_ids, o.logprobs) for o in outputs], found.accepted

    plain = [
        (tokens[: p.max_tokens], logprobs[: p.max_tokens])
        for p, (tokens, logprobs, *_) in zip(params, rounded_model.plain, strict=True)
    ]
    for outputs, accepted in llm_results(2, serve):
        assert outputs == plain
        assert max(accepted) > 0


def test_what_cannot_draft_says_so(tiny_config):
    without = random_config("tiny")
    for count, config, where, message in (
        (2, without, "cpu", "the model has no draft head: num_nextn_predict_layers = 0"),
        (6, tiny_config, "cpu", "must be at most 5, the block that the model's draft head was"),
        (2, tiny_config, "cuda:0", "drafts have run on a CPU only so far, not on cuda:0"),
    ):
        with pytest.raises(ConfigError, match=f"num_draft_tokens = {count}: {message}"):
            require_drafts(count, config, device=where)
    require_drafts(0, without, device="cuda:0")
    with LLM("random:tiny", **SMALL) as llm:
        with pytest.raises(ConfigError, match="= 1: the model has no draft head"):
            llm.reopen(**SMALL, num_draft_tokens=1)
        assert len(llm.generate([[5]], PARAMS[0])) == 1, "nothing was closed"
    with LLM(CHECKPOINT, **SMALL) as llm, pytest.raises(ConfigError, match="loaded without its"):
        llm.reopen(**SMALL, num_draft_tokens=1)


def test_fewer_steps_are_taken(rounded_model):
    """A prompt's token, one behind placeholders, and six at a time: three decode steps, not 13."""
    rounded_model.serve(5, right=1.0, enable_zos=False)
    assert rounded_model.llm.engine.scheduler.step == 1 + 3 + 1
