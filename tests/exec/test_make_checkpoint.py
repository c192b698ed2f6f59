"""Made checkpoints: true to the format, reproducible, all or nothing, and numerically sane."""

import hashlib
import itertools
import json
import math
import shutil

import pytest
import torch

from mdi_exec.model.batch import BLOCK_TOKENS, Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.config import ModelConfig
from mdi_exec.model.config_reader import read_config, read_config_file
from mdi_exec.model.engram import engram_hashes
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import Weights
from mdi_exec.numerics import Numerics
from mdi_exec.weights.checkpoint import open_checkpoint
from mdi_exec.weights.make_checkpoint import make_checkpoint
from mdi_exec.weights.names import TensorSpec, expected_tensors
from mdi_exec.weights.presets import preset_config, released_config
from mdi_exec.weights.random import WORDS_AT_ONCE, tensor_data
from mdi_exec.weights.tokenizer import Tokenizer, compressed_vocab_map
from mdi_shared.errors import ConfigError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny checkpoint in several shards."""
    parent = tmp_path_factory.mktemp("made")
    return make_checkpoint(parent / "tiny", seed=5, shard_bytes=1_500_000)


def digests(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def test_everything_a_user_needs_is_there(made):
    files = sorted(path.name for path in made.iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    assert shards == [f"model-{i:05}-of-00006.safetensors" for i in range(1, 7)]
    assert {"README.md", "config.json", "tokenizer.json"} < set(files)
    assert "random" in (made / "README.md").read_text()
    open_checkpoint(made).verify()


def test_the_config_is_the_golden_one_but_for_the_tokenizer(made, golden_path):
    ours = read_config_file(made / "config.json")
    golden = read_config_file(golden_path / "tiny" / "config.json")
    for name in ModelConfig.__dataclass_fields__:
        if name != "engram_compressed_vocab_size":
            assert getattr(ours, name) == getattr(golden, name), name
    mark = json.loads((made / "config.json").read_text())["made_checkpoint"]
    assert (mark["weights"], mark["preset"], mark["seed"]) == ("random", "tiny", 5)


def test_tokenizer_and_engram_sizes_agree_with_the_config(made):
    config = read_config_file(made / "config.json")
    tokenizer = Tokenizer.from_file(made / "tokenizer.json")
    token_map = compressed_vocab_map(tokenizer)
    assert tokenizer.vocab_size == config.vocab_size
    assert int(token_map.max()) + 1 == config.engram_compressed_vocab_size
    assert [h.num_rows for h in engram_hashes(config)] == list(config.engram_num_embeddings)
    assert tokenizer.token(config.eos_token_id) == "<｜end▁of▁sentence｜>"


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(made, tmp_path):
    again = make_checkpoint(tmp_path / "again", seed=5, shard_bytes=1_500_000)
    assert digests(again) == digests(made)
    other = digests(make_checkpoint(tmp_path / "other", seed=6, shard_bytes=1_500_000))
    assert all(other[name] != digest for name, digest in digests(made).items()
               if name.startswith("model-"))  # fmt: skip


def test_sharding_does_not_change_the_weights(made, tmp_path):
    one = open_checkpoint(make_checkpoint(tmp_path / "one", seed=5))
    many = open_checkpoint(made)
    assert one.names == many.names
    for name in one.names[::41]:
        assert torch.equal(one.get(name).view(torch.uint8), many.get(name).view(torch.uint8))


def test_data_longer_than_a_piece_is_whole():
    elements = 8 * WORDS_AT_ONCE + 13
    tensors = {
        "a.weight": TensorSpec("I8", (elements,)),
        "b.weight": TensorSpec("BF16", (1, WORDS_AT_ONCE * 4 + 3)),
    }
    for name, spec in tensors.items():
        pieces = [bytes(piece) for piece in tensor_data(name, tensors, 1)]
        assert len(pieces) == 2
        assert sum(map(len, pieces)) == spec.nbytes
        assert pieces[0][: len(pieces[1])] != pieces[1]


def dequantised(checkpoint, name):
    """Values of a weight, float64."""
    codes, scales = checkpoint.get(f"{name}.weight"), checkpoint.get(f"{name}.scale")
    values = codes.to(torch.float64)
    spread = scales.to(torch.float64).repeat_interleave(32, dim=1)
    if scales.shape[0] != codes.shape[0]:
        spread = spread.repeat_interleave(32, dim=0)
    return values * spread[: values.shape[0], : values.shape[1]]


def test_weights_spread_as_meant(made):
    checkpoint = open_checkpoint(made)
    for name, std in [
        ("layers.0.attn.wq_b", 64**-0.5),
        ("layers.0.attn.wo_b", 0.3 * 64**-0.5),
        ("layers.1.engram.embed", 1.0),
    ]:
        assert dequantised(checkpoint, name).std().item() == pytest.approx(std, rel=0.15)
    assert checkpoint.get("head.weight").float().std().item() == pytest.approx(
        3 * 128**-0.5, rel=0.02
    )
    assert checkpoint.get("norm.weight").float().mean().item() == pytest.approx(1.0, abs=0.05)
    assert not any(
        torch.isnan(checkpoint.get(name).float()).any() for name in checkpoint.names[::7]
    )


@pytest.mark.parametrize("numerics", list(Numerics))
def test_the_model_runs_and_its_logits_spread_by_about_three(made, numerics):
    checkpoint = open_checkpoint(made)
    token_map = compressed_vocab_map(Tokenizer.from_file(checkpoint.tokenizer_file))
    model = Transformer(
        checkpoint.config, Weights(checkpoint), token_map=token_map, numerics=numerics
    )
    layout = CacheLayout(config=checkpoint.config, numerics=numerics)
    cache = DeviceCache(layout, num_blocks=4, num_slots=2, device="cpu")
    ids = torch.randint(
        0, 1024, (200,), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    table = list(range(1, -(-200 // BLOCK_TOKENS) + 1))
    logits = model.forward(Batch.build([BatchItem(200, 200, 1, table, 200, 200)], ids), cache)
    assert torch.isfinite(logits).all()
    assert 2.5 < logits.std().item() < 3.5
    assert logits.argmax(dim=1).unique().numel() > 100  # rows differ


def test_the_slice_has_every_kind_of_layer_at_released_dimensions():
    config = sized(preset_config("flash-slice", with_draft=False, with_vision=False))
    plans = [config.layer_plan(layer) for layer in range(6)]
    assert [plan.ratio for plan in plans] == [0, 2, 2, 1, 1, 1]
    assert plans[0].engram_index == 0
    assert [plan.owns_compressor for plan in plans] == [False, True, False, True, False, False]
    assert [plan.is_index_source for plan in plans] == [False, True, False, True, True, False]
    assert plans[3].is_candidate_source
    assert plans[4].uses_candidates
    released = expected_tensors(read_config(released_config()))
    ours = expected_tensors(config)
    for name in ("attn.wq_b.weight", "ffn.experts.0.w2.scale", "attn.wo_a.scale", "hc_attn_fn"):
        assert ours[f"layers.5.{name}"] == released[f"layers.21.{name}"]
    assert ours["layers.0.engram.wkv.weight"] == released["layers.1.engram.wkv.weight"]


@pytest.mark.parametrize("layers", range(6, 41))
def test_slices_of_any_length_are_valid(layers):
    config = sized(preset_config("flash-slice", layers=layers))
    assert config.num_hidden_layers == layers
    assert config.n_prefill_layer == layers // 2


def sized(config):
    """A preset's config with table sizes made up: the dimensions are what is looked at."""
    text = config["text_config"]
    text["engram_num_embeddings"] = [100 + i for i in range(len(text["engram_layer_ids"]))]
    text["engram_compressed_vocab_size"] = 1000
    return read_config(config)


def test_small_is_between_tiny_and_the_slice():
    sizes = [
        sum(spec.nbytes for spec in expected_tensors(sized(preset_config(preset))).values())
        for preset in ("tiny", "small", "flash-slice")
    ]
    assert 1e6 < sizes[0] < 1e7 < sizes[1] < 1e9 < 3e10 < sizes[2]


def test_draft_and_images_can_be_left_out(tmp_path):
    bare = open_checkpoint(
        make_checkpoint(tmp_path / "bare", with_draft=False, with_vision=False, num_experts=4)
    )
    assert {name.split(".")[0] for name in bare.names} == {"embed", "layers", "norm", "head"}
    assert bare.config.n_routed_experts == 4


def test_progress_counts_up_to_the_whole(tmp_path):
    calls = []
    made = make_checkpoint(
        tmp_path / "made", progress=lambda done, total: calls.append((done, total))
    )
    total = open_checkpoint(made).weight_bytes
    assert calls[-1] == (total, total)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(calls))


def test_nothing_is_left_of_an_interrupted_one(tmp_path):
    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "made", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_filled_and_a_full_one_refused(tmp_path):
    target = tmp_path / "made"
    target.mkdir()
    make_checkpoint(target)
    before = digests(target)
    with pytest.raises(ConfigError, match=r"directory = .*is not an empty directory"):
        make_checkpoint(target, seed=1)
    assert digests(target) == before
    with pytest.raises(ConfigError, match="is not an empty directory"):
        make_checkpoint(target / "config.json")


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=30 * 2**30)
    monkeypatch.setattr("mdi_exec.weights.make_checkpoint.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"takes \d\d\.\d GiB and 30\.0 GiB are free") as caught:
        make_checkpoint(tmp_path / "made", "flash-slice")
    needed = float(str(caught.value).split("takes ")[1].split(" ")[0])
    assert math.isclose(needed, 44, abs_tol=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "preset = 'huge': must be one of tiny, small, flash-slice"),
        ({"preset": "tiny", "layers": 6}, "layers = 6: preset 'tiny' has its own"),
        ({"preset": "flash-slice", "layers": 5}, "layers = 5: must lie in 6 .. 40"),
        ({"preset": "flash-slice", "layers": 41}, "layers = 41: must lie in 6 .. 40"),
        ({"num_experts": 2}, "experts = 2: must be from 3"),
        ({"num_experts": 5000}, "experts = 5000: must be from 3, those a token takes, to 4096"),
        ({"shard_bytes": 0}, "shard_bytes = 0: must be at least 1"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    with pytest.raises(ConfigError) as caught:
        make_checkpoint(tmp_path / "made", **options)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []
