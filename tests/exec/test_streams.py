"""Calls that share an engine: outputs go to whoever asked, whatever other calls and threads do."""

import gc
import threading

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError, NumericsError
from mdi_shared.errors import ConfigError
from mdi_traces.run import load_run
from tests.exec.engines import CHECKPOINT, SMALL, is_empty
from tests.exec.groups import llm_results

LONG = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def llm():
    with LLM(CHECKPOINT, **SMALL) as loaded:
        yield loaded


def tokens(outputs):
    return [output.token_ids for output in outputs if output.finished]


def test_one_prompt_or_several_texts_or_ids(llm):
    text = "The scheduler"
    ids = llm.tokenizer.encode(text)
    want = tokens(llm.generate([text], SHORT))
    for given in (text, ids, tuple(ids), [ids]):
        assert tokens(llm.generate(given, SHORT)) == want
    assert tokens(llm.generate(prompt_token_ids=ids, sampling_params=SHORT)) == want
    assert tokens(llm.generate([text, ids], SHORT)) == want * 2
    assert llm.generate([]) == []
    assert list(llm.stream([])) == []


def test_several_outputs_of_a_prompt_follow_one_another(llm):
    params = [SamplingParams(max_tokens=5, ignore_eos=True, n=3, seed=7), SHORT]
    outputs = llm.generate([[5, 6], [9]], params)
    places = [(output.prompt_index, output.sample_index) for output in outputs]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0)]
    singly = [SamplingParams(max_tokens=5, ignore_eos=True, seed=7 + i) for i in range(3)]
    assert tokens(outputs)[:3] == tokens(llm.generate([[5, 6]] * 3, singly))
    streamed = {(o.prompt_index, o.sample_index): o.token_ids for o in llm.stream([[5, 6], [9]],
                params) if o.finished}  # fmt: skip
    assert streamed == dict(zip(places, tokens(outputs), strict=True))


def test_what_a_repr_shows(llm):
    (output,) = llm.generate("The", SHORT)
    assert repr(output) == (
        f"RequestOutput(req_id={output.req_id!r}, text={output.text!r}, "
        f"token_ids={list(output.token_ids)}, finish_reason='length')"
    )


def test_a_call_during_an_open_stream_takes_none_of_its_outputs(llm):
    alone = {name: tokens(llm.generate(prompt, LONG)) for name, prompt in (("a", [5]), ("b", [6]))}
    stream = llm.stream([5], LONG)
    first = next(stream)
    assert tokens(llm.generate([6], LONG)) == alone["b"]
    other = llm.stream([6], LONG)
    rest, others = [first, *stream], list(other)
    assert tokens(rest) == alone["a"]
    assert tokens(others) == alone["b"]
    assert [len(output.new_token_ids) for output in rest] == [1] * 20, "a step was swallowed"
    assert next(stream, None) is None
    assert is_empty(llm.engine)


def test_outputs_of_the_engines_own_requests_stay_with_the_engine(llm):
    llm.engine.add_request([5], SHORT, "mine")
    assert len(llm.generate([6], LONG)) == 1
    outputs = llm.engine.take_outputs()
    assert {output.req_id for output in outputs} == {"mine"}
    assert outputs[-1].finish_reason == "length"


def ways_to_leave():
    def close(stream):
        stream.close()
        stream.close()

    def leave_with(stream):
        with stream:
            next(stream)

    def fail_in_with(stream):
        with pytest.raises(KeyError), stream:
            raise KeyError

    def let_go(stream):
        del stream
        gc.collect()

    def never_begin(stream):
        pass

    return [close, leave_with, fail_in_with, let_go, never_begin]


@pytest.mark.parametrize("leave", ways_to_leave(), ids=lambda way: way.__name__)
def test_a_stream_that_is_left_aborts_its_requests(llm, leave):
    leave(llm.stream([[5], [6]], SamplingParams(max_tokens=400, ignore_eos=True)))
    before = llm.engine.scheduler.step
    assert len(llm.generate([7], SHORT)[0].token_ids) == 4
    assert llm.engine.scheduler.step - before < 150, "what was left ran on"
    assert is_empty(llm.engine)


def test_a_closed_stream_has_ended_when_close_returns(llm):
    stream = llm.stream([[5], [6]], LONG)
    next(stream)
    stream.close()
    assert is_empty(llm.engine)
    assert list(stream) == []


def test_threads_generate_side_by_side(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    prompts = [[[5 + i] * 20, [30 + i]] for i in range(6)]
    alone = [tokens(llm.generate(each, params)) for each in prompts]
    found = [None] * len(prompts)

    def call(index):
        if index % 2:
            found[index] = tokens(llm.generate(prompts[index], params))
        else:
            done = {o.prompt_index: o.token_ids for o in llm.stream(prompts[index], params)}
            found[index] = [done[i] for i in range(2)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a call hangs"
    assert found == alone
    assert is_empty(llm.engine)


def test_a_second_thread_under_torchrun_is_refused():
    def work():
        with LLM(CHECKPOINT, **SMALL) as ranked:
            stream = ranked.stream([5, 6], SHORT)
            said = []

            def call():
                try:
                    ranked.generate([6], SHORT)
                except ConfigError as error:
                    said.append(str(error))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join(300)
            return said, len(tokens(stream))

    results = llm_results(2, work)
    assert all(said == ["threads = 2: under torchrun one thread makes all calls"]
               for said, _ in results)  # fmt: skip
    assert sum(count for _, count in results) == 1


@pytest.mark.parametrize("how", ["error", "close"])
def test_who_waits_gets_a_last_output_when_the_engine_stops(how, tmp_path):
    llm = LLM(CHECKPOINT, **SMALL, record=str(tmp_path / "run"))
    one, other = llm.stream([[5], [6]], LONG), llm.stream([7], LONG)
    shown = [next(one) for _ in range(5)]
    llm.engine.add_request([8], LONG, "mine")
    if how == "error":
        llm.rank.model.layers[3].attn_norm.weight.fill_(float("nan"))
        last = rest_of(one, NumericsError)
    else:
        llm.close()
        last = rest_of(one)
    ended = [output for output in last if output.finished]
    assert [(output.prompt_index, output.finish_reason) for output in ended] == [
        (0, "error"), (1, "error")
    ]  # fmt: skip
    assert ended[0].token_ids[: len(shown[0].token_ids)] == shown[0].token_ids
    mine = llm.engine.take_outputs()
    assert (mine[-1].req_id, mine[-1].finish_reason) == ("mine", "error")
    *_, final = rest_of(other)
    assert final.finish_reason == "error"
    for call in (lambda: llm.generate([5]), llm.engine.step):
        with pytest.raises(EngineStoppedError):
            call()
    llm.close()
    assert load_run(tmp_path / "run").requests["finish_reason"].isna().all()


def rest_of(stream, error=EngineStoppedError):
    """What a stream still gives before it raises."""
    outputs = []
    with pytest.raises(error):
        outputs.extend(stream)
    return outputs
