"""Random weights drawn on a device: the same each time, of the released laws, ready to run."""

import pytest
import torch

from mdi_exec.model.batch import BLOCK_TOKENS, Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.config_reader import read_config
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import Weights
from mdi_exec.weights.make_checkpoint import make_checkpoint
from mdi_exec.weights.presets import layer_kinds, released_config
from mdi_exec.weights.random import RandomSource, random_token_map
from mdi_exec.weights.source import open_model, random_config
from mdi_shared.errors import ConfigError

SLICE_KINDS = ["window+engram", "source r2", "reuse r2", "candidate source r1", "re-index r1",
               "reuse r1"]  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return open_model("random:tiny,seed=3")


def test_a_tensor_depends_on_seed_and_name_alone(tiny):
    name = "layers.0.attn.wq_a.weight"
    first = tiny.tensors.get(name)
    tiny.tensors.get("layers.1.attn.wq_a.weight")
    again = tiny.tensors.get(name)
    other = RandomSource(tiny.config, 4, "cpu").get(name)
    assert first.dtype == torch.float8_e4m3fn
    assert torch.equal(first.view(torch.uint8), again.view(torch.uint8))
    assert not torch.equal(first.view(torch.uint8), other.view(torch.uint8))


def test_all_tensors_have_the_released_form_and_finite_values(tiny):
    for name, spec in tiny.tensors.tensors.items():
        value = tiny.tensors.get(name)
        assert tuple(value.shape) == spec.shape, name
        assert value.numel() * value.element_size() == spec.nbytes, name
        assert bool(torch.isfinite(value.to(torch.float32)).all()), name


def test_weights_spread_as_those_of_a_made_checkpoint(tiny, tmp_path):
    made = open_model(make_checkpoint(tmp_path / "made", with_draft=False, with_vision=False))
    experts, inner, width = (getattr(tiny.config, name) for name in (
        "n_routed_experts", "moe_intermediate_size", "hidden_size"))  # fmt: skip
    for load in (
        lambda scope: scope.sub("ffn.experts").fp4_experts(("w1",), experts, inner, width),
        lambda scope: scope.sub("engram").fp8("wkv", 5 * width, 192),
    ):
        here, there = (
            float(load(Weights(tensors).sub("layers.4")).dequantised().std())
            for tensors in (tiny.tensors, made.tensors)
        )
        assert here == pytest.approx(there, rel=0.15)  # few scales: they spread themselves


def test_the_model_runs_and_its_logits_are_finite(tiny):
    model = Transformer(tiny.config, Weights(tiny.tensors), token_map=tiny.token_map)
    cache = DeviceCache(CacheLayout(config=tiny.config), num_blocks=4, num_slots=2, device="cpu")
    ids = torch.arange(BLOCK_TOKENS + 9) % tiny.config.vocab_size
    batch = Batch.build([BatchItem(len(ids), len(ids), 1, (1, 2), 1)], ids)
    logits = model.forward(batch, cache)
    assert bool(torch.isfinite(logits).all())
    assert 1.0 < float(logits.std()) < 10.0


def test_a_token_map_reaches_every_compressed_id(tiny):
    token_map = random_token_map(tiny.config)
    assert token_map.unique().tolist() == list(range(tiny.config.engram_compressed_vocab_size))


def test_the_shortest_slice_has_every_kind_of_the_release_once():
    kinds = layer_kinds(random_config("flash-slice"))
    released = layer_kinds(read_config(released_config()))
    assert kinds == SLICE_KINDS
    assert {kind.removesuffix("+engram") for kind in released} == {
        kind.removesuffix("+engram") for kind in kinds
    }


def test_sizes_follow_the_preset():
    config = open_model("random:flash-slice,layers=8,experts=24").config
    assert (config.num_hidden_layers, config.n_routed_experts) == (8, 24)
    assert config.engram_compressed_vocab_size == 99_092


@pytest.mark.parametrize(
    "model", ["random:tiny,depth=3", "random:flash-slice,layers=x", "random:huge", "random:"]
)
def test_a_wrong_model_is_named(model):
    with pytest.raises(ConfigError):
        open_model(model)


def test_an_unknown_tensor_is_named(tiny):
    with pytest.raises(ConfigError, match=r"layers\.0\.attn\.wq_z"):
        tiny.tensors.get("layers.0.attn.wq_z.weight")
