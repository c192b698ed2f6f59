"""Text that streams: never taken back, held only as long as it must be, and decoded once."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.request_state import RequestBook
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.text import OutputText
from mdi_exec.weights.tokenizer import TextStream, Tokenizer
from mdi_exec.weights.tokenizer_builder import build_tokenizer
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT, SMALL, is_empty

# An added token that is no special one, and one whose spelling looks like bytes.
TOKENIZER = Tokenizer(build_tokenizer(512, {0: "<begin>", 1: "<｜end｜>", 2: "Ġx", 511: "<last>"}))
BYTE_ID = {TOKENIZER.token_bytes(i): i for i in range(512)}
IDS = st.lists(st.integers(0, 515), max_size=40)  # four of them undefined
BYTES = st.binary(max_size=40).map(lambda data: [BYTE_ID[bytes([byte])] for byte in data])
TEXTS = st.text("aé€𐍈", max_size=20).map(lambda text: [BYTE_ID[bytes([b])] for b in text.encode()])
OUTPUTS = st.one_of(IDS, BYTES, TEXTS)


@settings(deadline=None, max_examples=400)
@given(ids=OUTPUTS, skips=st.booleans())
def test_pieces_join_to_what_all_ids_decode_to(ids, skips):
    stream = TextStream(TOKENIZER, skip_special_tokens=skips)
    pieces = [stream.push(token) for token in ids]
    whole = TOKENIZER.decode(ids, skip_special_tokens=skips)
    assert "".join(pieces) + stream.flush() == whole
    assert stream.flush() == ""
    for count in range(len(ids)):  # what is shown is what every continuation begins with
        shown = "".join(pieces[:count])
        assert whole.startswith(shown)
        spelled = b"".join(TOKENIZER.token_bytes(i, skip_special_tokens=skips) for i in ids[:count])
        assert len(spelled.decode(errors="replace")) - len(shown) <= 3, (
            "more is held than a character's bytes"
        )


@pytest.mark.parametrize("num_bytes", [1, 4, 1000])
def test_bytes_that_are_no_character_do_not_hold_the_text_up(num_bytes):
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(BYTE_ID[b"\xe2"]) for _ in range(num_bytes)]
    assert "".join(pieces) == "\ufffd" * (num_bytes - 1)
    assert stream.push(BYTE_ID[b"a"]) == "\ufffda"


def expected_end(text, stops):
    """Where the text ends: before the stop string that is complete first, the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, minus_length = min(found, default=(len(text), 0))
    return end + minus_length


@settings(deadline=None, max_examples=400)
@given(
    text=st.text("abé", max_size=24),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 48), max_size=10),
)
def test_stop_strings_end_the_text_whatever_tokens_spell_them(text, stops, cuts):
    output, shown = OutputText(TOKENIZER, stops), []
    data = text.encode()
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, stop in pairwise(bounds):
        output.push([BYTE_ID[data[i : i + 1]] for i in range(start, stop)])
        shown.append(output.between(0, output.num_tokens))
    whole = output.between(0, output.num_tokens) + output.rest()
    assert whole == text[: expected_end(text, stops)]
    assert output.is_stopped == any(stop in text for stop in stops)
    assert all(whole.startswith(part) for part in shown), "text was taken back"
    longest = max(map(len, stops))
    if not output.is_stopped and shown:
        assert len(text) - len(shown[-1]) < longest, "more is held than may become a stop string"


def test_each_token_is_decoded_once_however_often_the_text_is_read(monkeypatch):
    book = RequestBook(512, TOKENIZER, seed=0)
    sink, calls = [], []
    spell = Tokenizer.token_bytes
    monkeypatch.setattr(
        Tokenizer, "token_bytes", lambda *args, **more: calls.append(1) or spell(*args, **more)
    )
    state = book.add([5], SamplingParams(stop="zzzz"), None, 0, sink)
    joined = ""
    for token in range(3, 303):
        state.tokens.append(token)
        state.finish_reason = "length" if token == 302 else None
        book.show(state, (token,))
        joined += sink[-1].new_text
        assert sink[-1].text == joined
    assert len(calls) == 300
    assert sink[10].text == TOKENIZER.decode(range(3, 14)), "an old view stays as it was"
    assert len(calls) == 300


# ---- in an engine ------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The scheduler decides", [5, 6, 7], [900, 3, 44, 12]]


@pytest.fixture(scope="module", params=[True, False], ids=["zos", "no zos"])
def llm(request):
    with LLM(CHECKPOINT, **SMALL, enable_zos=request.param) as loaded:
        yield loaded


def with_stop(outputs, index, length=3):
    """Stop strings from the middle of each output, across tokens; and where they stand."""
    stops = [output.text[index : index + length] for output in outputs]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop, "\0\0"])
              for stop in stops]  # fmt: skip
    return params, [output.text.index(stop) for output, stop in zip(outputs, stops, strict=True)]


def test_a_stop_string_ends_its_request_and_no_other(llm):
    plain = llm.generate(PROMPTS, GREEDY)
    params, at = with_stop(plain, 8)
    outputs = llm.generate(PROMPTS, [params[0], GREEDY, params[2]])
    assert [output.finish_reason for output in outputs] == ["stop", "length", "stop"]
    assert outputs[1].token_ids == plain[1].token_ids
    for index in (0, 2):
        assert outputs[index].text == plain[index].text[: at[index]]
        assert plain[index].token_ids[: len(outputs[index].token_ids)] == outputs[index].token_ids
        assert len(outputs[index].logprobs) == len(outputs[index].token_ids)
        # The last token is the one that completed the stop string.
        assert params[index].stop[0] in TextStream(llm.tokenizer).push(*outputs[index].token_ids)
    assert is_empty(llm.engine)


def test_streamed_text_is_never_taken_back_and_holds_no_stop_string(llm):
    params, _ = with_stop(llm.generate(PROMPTS, GREEDY), 8)
    seen = ["", "", ""]
    with llm.stream(PROMPTS, params) as outputs:
        for output in outputs:
            index = output.prompt_index
            assert output.text.startswith(seen[index])
            assert output.text == seen[index] + output.new_text
            assert params[index].stop[0] not in output.text
            seen[index] = output.text
    assert seen == [output.text for output in llm.generate(PROMPTS, params)]


def test_a_name_can_be_used_again_behind_a_stop_string(llm):
    (plain,) = llm.generate(PROMPTS[1], GREEDY)
    (params,), (at,) = with_stop([plain], 4, 1)
    for _ in range(4):
        llm.engine.add_request(PROMPTS[1], params, "mine")
        found = []
        while llm.engine.has_unfinished_requests():
            found += llm.engine.step()
        assert (found[-1].text, found[-1].finish_reason) == (plain.text[:at], "stop")
    llm.engine.drain()
    assert is_empty(llm.engine)


def test_stop_strings_need_a_tokenizer():
    with LLM("random:tiny", **SMALL) as bare:
        with pytest.raises(ConfigError) as error:
            bare.generate([[5]], SamplingParams(stop="end"))
        assert str(error.value) == (
            "stop = ('end',): the checkpoint has no tokenizer.json; give stop_token_ids"
        )
        (output,) = bare.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert (output.text, len(output.token_ids)) == ("", 2)
