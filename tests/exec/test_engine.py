"""The engine on a real model: what users get, and that scheduling never shows in it."""

import math
import random

import pytest

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from tests.exec.engines import CHECKPOINT, SMALL, Watch, is_empty

PROMPT = [17, 300, 5, 42, 999]
LENGTHS = (122, 40, 125, 1, 7, 127, 60, 126, 19)  # some outgrow their first block of 128
EOS = 1


def load(**options):
    return LLM(CHECKPOINT, **{**SMALL, **options})


@pytest.fixture(scope="module")
def llm():
    with load() as loaded:
        yield loaded


def mixed_requests():
    """Nine requests with prompts of many lengths, and every way of sampling."""
    dice = random.Random(11)
    prompts = [[dice.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[row % 3],
            top_p=(1.0, 0.9)[row % 2],
            top_k=(-1, 20, -1, 3)[row % 4],
            max_tokens=6,
            ignore_eos=True,
            seq_seed=1000 + row,
            top_logprobs=row % 3,
        )
        for row in range(len(LENGTHS))
    ]
    return prompts, params


def answers(outputs):
    return [(output.token_ids, output.finish_reason, output.logprobs) for output in outputs]


# ---- scheduling does not show ------------------------------------------------------------------

# Rows come out the same in all numerics (test_batching.py); here tokens are sampled from them.


@pytest.fixture(scope="module")
def batched(llm):
    """Answers to the nine requests in one batch."""
    return answers(llm.generate(*mixed_requests()))


def test_a_request_alone_is_answered_as_in_a_batch_with_eight_others(llm, batched):
    prompts, params = mixed_requests()
    for row in (0, 4, 7):
        alone = answers(llm.generate([prompts[row]], [params[row]]))
        assert alone == [batched[row]], f"request {row}"


@pytest.mark.parametrize(
    "options",
    [
        {"enable_zos": False},
        {"max_num_batched_tokens": 23},
        {"max_num_batched_tokens": 100, "enable_zos": False, "prefill_attempt_interval": 2},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_batches_and_chunks_do_not_change_answers(batched, options):
    with load(**options) as llm:
        assert answers(llm.generate(*mixed_requests())) == batched


@pytest.mark.parametrize("enable_zos", [True, False])
def test_preemption_does_not_change_answers(batched, enable_zos):
    with load(enable_zos=enable_zos, num_blocks=8, max_model_len=160) as llm:
        assert answers(llm.generate(*mixed_requests())) == batched
        assert llm.engine.scheduler.num_preempted >= 2
        assert is_empty(llm.engine)


def test_aborting_neighbours_does_not_change_answers(batched):
    prompts, params = mixed_requests()
    with load(max_num_batched_tokens=100) as llm:
        names = [llm.engine.add_request(*each) for each in zip(prompts, params, strict=True)]
        done, turn = {}, 0
        while llm.engine.has_unfinished_requests():
            if turn in (2, 5, 9):  # while prompts are being run, and later
                llm.engine.abort_request(names[turn - 1])
            done.update((out.req_id, out) for out in llm.engine.step() if out.finished)
            turn += 1
        llm.engine.drain()
        assert is_empty(llm.engine)
    aborted = [row for row, name in enumerate(names) if done[name].finish_reason == "abort"]
    assert aborted == [1, 4, 8]
    for row, name in enumerate(names):
        if row not in aborted:
            assert answers([done[name]]) == [batched[row]], f"request {row}"


def test_steps_overlap_with_zos_only():
    """With ZOS a decode step is launched before the one ahead of it has been awaited."""
    for enable_zos in (True, False):
        with load(enable_zos=enable_zos) as llm:
            watch, in_flight = Watch(llm), []
            inner = llm.engine.runner.launch

            def launch(plan, requests, engine=llm.engine, inner=inner, in_flight=in_flight):
                in_flight.append(engine.scheduler.num_in_flight)
                return inner(plan, requests)

            llm.engine.runner.launch = launch
            llm.generate([PROMPT], SamplingParams(max_tokens=5, ignore_eos=True))
            assert max(in_flight) == (2 if enable_zos else 1)
            assert len(in_flight) == len(watch.plans)


# ---- outputs -----------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [PROMPT[:n] for n in (5, 1, 3)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 1, 3)]
    outputs = llm.generate(prompts, params)
    assert [out.prompt_token_ids for out in outputs] == [tuple(prompt) for prompt in prompts]
    assert [len(out.token_ids) for out in outputs] == [6, 1, 3]
    assert [out.finish_reason for out in outputs] == ["length"] * 3
    again = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    assert {out.req_id for out in again}.isdisjoint(out.req_id for out in outputs)


def test_streaming_shows_every_token_once_and_as_soon_as_it_is_known(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seq_seed=n) for n in (4, 2)]
    whole = llm.generate([PROMPT, PROMPT[:2]], params)
    seen, ended = {}, []
    for out in llm.stream([PROMPT, PROMPT[:2]], params):
        assert out.req_id not in ended, "an output after the last one"
        seen[out.req_id] = seen.get(out.req_id, ()) + out.new_token_ids
        assert out.token_ids == seen[out.req_id], "a view shows what was known then, no more"
        assert len(out.logprobs) == len(out.token_ids)
        assert len(out.new_token_ids) == 1
        if out.finished:
            ended.append(out.req_id)
    assert list(seen.values()) == [out.token_ids for out in whole]
    assert len(ended) == 2


def test_texts_are_encoded_and_outputs_decoded(llm):
    (out,) = llm.generate(["a small stone"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert list(out.prompt_token_ids) == llm.tokenizer.encode("a small stone")
    assert out.text == llm.tokenizer.decode(list(out.token_ids))
    assert "finish_reason='length'" in repr(out)


@pytest.mark.parametrize(
    ("options", "expected", "reason"),
    [
        ({}, (5, 7, EOS), "stop"),
        ({"ignore_eos": True}, (5, 7, EOS, 9, 7, 6), "length"),
        ({"stop_token_ids": (9,)}, (5, 7, EOS), "stop"),
        ({"stop_token_ids": (9,), "ignore_eos": True}, (5, 7, EOS, 9), "stop"),
        ({"stop_token_ids": (7, 9)}, (5, 7), "stop"),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, (5, 7, EOS), "stop"),
        ({"stop_token_ids": (5,)}, (5,), "stop"),
        ({"max_tokens": 3, "ignore_eos": True}, (5, 7, EOS), "length"),
        ({"max_tokens": 2}, (5, 7), "length"),
        ({"max_tokens": 0}, (5,), "length"),
    ],
    ids=str,
)
def test_when_a_request_ends(llm, options, expected, reason):
    params = SamplingParams(golden_token_ids=(5, 7, EOS, 9, 7, 6), **{"max_tokens": 6, **options})
    (out,) = llm.generate([PROMPT], params)
    assert (out.token_ids, out.finish_reason) == (expected, reason)
    assert len(out.logprobs) == len(expected), "a token computed beyond the end is not shown"
    assert is_empty(llm.engine)


def test_eos_can_be_forbidden_as_the_first_token():
    with load() as llm:
        llm.engine.runner.on_logits = lambda requests, logits: logits[:, EOS].fill_(1000.0)
        allowed, banned = llm.generate(
            [PROMPT, PROMPT],
            [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, first_n_token_no_eos=1)],
        )
    assert (allowed.token_ids, allowed.finish_reason) == ((EOS,), "stop")
    assert banned.token_ids[0] != EOS
    assert (banned.token_ids[1:], banned.finish_reason) == ((EOS,), "stop")


def test_the_context_never_outgrows_the_models_limit():
    with load(max_model_len=12) as llm:
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        full, one_less = llm.generate([list(range(3, 15)), list(range(3, 14))], params)
        assert (len(full.token_ids), full.finish_reason) == (1, "length")
        assert (len(one_less.token_ids), one_less.finish_reason) == (2, "length")


def test_logprobs_are_sorted_complete_and_of_the_right_tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, top_logprobs=4)
    greedy, plain = llm.generate(
        [PROMPT, PROMPT],
        [params, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)],
    )
    assert greedy.token_ids == plain.token_ids
    for token, wide, narrow in zip(greedy.token_ids, greedy.logprobs, plain.logprobs, strict=True):
        assert len(wide) == 4
        assert max(wide, key=wide.get) == token
        assert narrow == {token: wide[token]}
        assert sum(math.exp(value) for value in wide.values()) <= 1.0 + 1e-6


def test_requests_without_a_seed_get_one_of_the_engines(llm):
    """One SamplingParams for all is not one seed for all; the engine's own seed fixes them."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    def tokens(seed):
        with load(seed=seed) as fresh:
            return [out.token_ids for out in fresh.generate([PROMPT] * 3, params)]

    first = tokens(1)
    assert len(set(first)) == 3
    assert tokens(1) == first
    assert tokens(2) != first
