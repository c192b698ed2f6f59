"""Tokenizer: round trips, text as it is generated, and the compressed vocabulary."""

import pytest
import tokenizers
import torch

from mdi_exec.weights.tokenizer import TextStream, Tokenizer, compressed_vocab_map
from mdi_exec.weights.tokenizer_builder import build_tokenizer
from mdi_shared.errors import ConfigError

SPECIALS = {0: "<begin>", 1: "<end>", 511: "<last>"}
TEXTS = [
    "The scheduler decides what happens in the next step.",
    "def add(a, b):\n\treturn a + b  # 1.5 €",
    "crêperie, Straße, 今天天气很好, река",
    "bytes of four: \U00010348\U0001d11e, and \ufffd itself",
]


@pytest.fixture(scope="module")
def tiny(golden_path):
    return Tokenizer.from_file(golden_path / "tiny" / "tokenizer.json")


@pytest.fixture(scope="module")
def built():
    return Tokenizer(build_tokenizer(512, SPECIALS))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive_a_round_trip(tiny, built, text):
    for tokenizer in (tiny, built):
        ids = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_one_id_and_skipped_on_request(built):
    ids = built.encode("<begin>step<last>")
    assert ids[0] == 0
    assert ids[-1] == 511
    assert built.decode(ids) == "step"
    assert built.decode(ids, skip_special_tokens=False) == "<begin>step<last>"


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_joins_to_the_whole(built, text):
    ids = built.encode(text)
    stream = TextStream(built)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd"), "half a character was shown"
    assert stream.flush() == ""


def test_random_ids_stream_to_what_they_decode_to(tiny):
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        ids = torch.randint(0, 1024, (60,), generator=generator).tolist()
        stream = TextStream(tiny, skip_special_tokens=False)
        streamed = "".join(stream.push(*ids[i : i + 3]) for i in range(0, 60, 3)) + stream.flush()
        assert streamed == tiny.decode(ids, skip_special_tokens=False)


def test_a_characters_bytes_are_held_back_until_it_is_whole(built):
    ids = built.encode("\U00010348")
    assert len(ids) == 4
    stream = TextStream(built)
    assert [stream.push(token) for token in ids] == ["", "", "", "\U00010348"]


def test_compressed_ids_are_the_golden_ones(tiny, token_map):
    found = compressed_vocab_map(tiny)
    assert found.dtype == torch.int64
    assert torch.equal(found, token_map.to(torch.int64))
    assert int(found.max()) + 1 == 669


def test_compressed_ids_forget_case_accents_and_white_space():
    words = {3: "Step", 4: "step", 5: "sṭep", 6: " step", 7: "ſtep", 8: "\t\n", 9: "  ", 10: "st"}
    tokenizer = Tokenizer(build_tokenizer(300, {0: "<a>", 1: "<b>", 2: "<A>", **words}))
    found = compressed_vocab_map(tokenizer).tolist()
    assert found[0] == found[2] != found[1]
    assert found[3] == found[4] == found[5] == found[6] == found[7] != found[10]
    space = tokenizer.encode(" ")
    assert len(space) == 1
    assert found[8] == found[9] == found[space[0]]  # a lone space stays one


def test_pieces_of_characters_stay_apart(built):
    found = compressed_vocab_map(built).tolist()
    pieces = [i for i in range(512) if built.decode([i]) == "\ufffd"]
    assert len(pieces) >= 100
    assert len({found[i] for i in pieces}) == len(pieces)


def test_ids_behind_the_vocabulary_share_one_compressed_id(built):
    found = compressed_vocab_map(built, 520)
    assert torch.equal(found[:512], compressed_vocab_map(built))
    assert len(set(found[512:].tolist())) == 1


def test_compressed_ids_count_up_in_order_of_first_appearance(tiny):
    seen = -1
    for compressed in compressed_vocab_map(tiny).tolist():
        assert compressed <= seen + 1
        seen = max(seen, compressed)


@pytest.mark.parametrize("vocab_size", [300, 1024, 5000])
def test_built_vocabularies_are_full_and_always_the_same(vocab_size):
    first, second = (build_tokenizer(vocab_size, {0: "<begin>"}) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert sorted(first.get_vocab().values()) == list(range(vocab_size))


def test_synthetic_words_can_be_encoded():
    tokenizer = Tokenizer(build_tokenizer(5000, {0: "<begin>"}))
    assert tokenizer.encode(tokenizer.decode([4999])) == [4999]


def test_wrong_vocabularies_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size = 256: must be at least 257"):
        build_tokenizer(256, {0: "<begin>"})
    with pytest.raises(ConfigError, match="above every special id"):
        build_tokenizer(300, {300: "<begin>"})
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    other = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.decoder = 'NoneType': only ByteLevel"):
        Tokenizer.from_file(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json") as caught:
        Tokenizer.from_file(tmp_path / "bad.json")
    assert "\n" not in str(caught.value)
