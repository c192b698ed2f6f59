"""A rank reads its own experts and Engram rows, and nothing of the others'."""

import pytest
import torch

from mdi_exec.engine.memory import (
    ENGRAM_TABLE,
    ROUTED_EXPERT,
    StepLimits,
    estimate_memory,
    loaded_tensors,
    memory_line,
)
from mdi_exec.model.cache import CacheLayout
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import Weights
from mdi_exec.ranks.exchange import ExpertShard, NoExchange
from mdi_exec.weights.checkpoint import open_checkpoint
from mdi_exec.weights.random import RandomSource
from mdi_exec.weights.source import random_config
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT

LIMITS = StepLimits(rows=64, seqs=4, context=512)


class CountingSource:
    """Notes what is asked of a source: bytes by tensor name."""

    def __init__(self, source) -> None:
        self.source, self.read = source, {}

    def get(self, name):
        return self._note(name, self.source.get(name))

    def get_rows(self, name, start, stop):
        return self._note(f"{name}[{start}:{stop}]", self.source.get_rows(name, start, stop))

    def _note(self, name, tensor):
        assert name not in self.read, f"{name} is read twice"
        self.read[name] = tensor.nbytes
        return tensor


class PretendExchange(NoExchange):
    """Stands for a group whose forward passes are never run."""

    def __init__(self, shard) -> None:
        self.rank, self.size = shard.rank, shard.size


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(CHECKPOINT)


def load(source, config, shard, token_map) -> tuple[Transformer, dict[str, int]]:
    counting = CountingSource(source)
    model = Transformer(config, Weights(counting, shard=shard), token_map=token_map,
                        exchange=PretendExchange(shard))  # fmt: skip
    return model, counting.read


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_files_out(size, checkpoint, token_map):
    config = checkpoint.config
    layers = range(config.num_hidden_layers)
    whole = Transformer(config, Weights(checkpoint), token_map=token_map)
    codes = {layer: [] for layer in config.engram_layer_ids}
    experts, replicated = [], set()
    for rank in range(size):
        shard = ExpertShard(rank, size)
        model, read = load(checkpoint, config, shard, token_map)
        own = {int(found[1]) for name in read if (found := ROUTED_EXPERT.search(name))}
        assert own == set(range(rank * 16 // size, (rank + 1) * 16 // size))
        assert sum(read.values()) == sum(
            spec.nbytes for spec in loaded_tensors(config, shard).values()
        )
        experts.append([model.layers[layer].moe.w2.codes for layer in layers])
        for layer in codes:
            codes[layer].append(model.engrams[layer].table.codes.view(torch.uint8))
        replicated.add(frozenset(
            name for name in read if ENGRAM_TABLE not in name and not ROUTED_EXPERT.search(name)
        ))  # fmt: skip
    assert len(replicated) == 1, "the ranks read the same of everything else"
    for layer in layers:
        stacked = torch.cat([parts[layer] for parts in experts])
        assert torch.equal(stacked, whole.layers[layer].moe.w2.codes)
    for layer, parts in codes.items():
        assert torch.equal(torch.cat(parts), whole.engrams[layer].table.codes.view(torch.uint8))


def test_random_weights_do_not_depend_on_the_shard(monkeypatch):
    monkeypatch.setattr("mdi_exec.weights.random.PIECE_ELEMENTS", 1000)  # in the middle of rows
    config = random_config("tiny")
    source = RandomSource(config, 5, "cpu")
    for name in ("layers.1.engram.embed.weight", "layers.1.engram.embed.scale"):
        whole = source.get(name).view(torch.uint8)
        parts = []
        for rank in range(3):
            own = ExpertShard(rank, 3).rows(len(whole))
            parts.append(source.get_rows(name, own.start, own.stop).view(torch.uint8))
        assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ConfigError, match="rows of"):
        source.get_rows("layers.1.engram.embed.weight", 0, len(whole) + 1)
    scopes = [Weights(source, shard=ExpertShard(rank, 2)).sub("layers.3.ffn.experts")
              for rank in range(2)]  # fmt: skip
    halves = [scope.fp4_experts(("w2",), 16, 128, 64) for scope in scopes]
    everything = Weights(source).sub("layers.3.ffn.experts").fp4_experts(("w2",), 16, 128, 64)
    assert torch.equal(torch.cat([half.codes for half in halves]), everything.codes)


def test_a_rank_needs_less_memory(released):
    layout = CacheLayout(config=released)
    one, four = (
        estimate_memory(layout, LIMITS, num_blocks=100, num_slots=8, for_kernels=True,
                        shard=ExpertShard(size - 1, size))
        for size in (1, 4)
    )  # fmt: skip
    routed = sum(
        spec.nbytes for name, spec in loaded_tensors(released).items()
        if ROUTED_EXPERT.search(name) or ENGRAM_TABLE in name
    )  # fmt: skip
    assert one.weights - four.weights == pytest.approx(routed * 3 / 4, rel=1e-6)
    assert four.workspace > one.workspace
    line = memory_line(four, released, ExpertShard(3, 4))
    assert line.startswith(f"rank 3 of 4: {four.total / 1e9:.2f} GB (weights")
    assert "experts 288 to 383 of 384, 192,005,711 of 768,022,850 Engram rows" in line


def test_a_group_that_cannot_share_is_refused(checkpoint, token_map):
    with pytest.raises(ConfigError) as refused:
        load(checkpoint, checkpoint.config, ExpertShard(0, 3), token_map)
    assert "expert_parallel_size" in str(refused.value)
    assert "must divide the model's 16 routed experts" in str(refused.value)
    assert "\n" not in str(refused.value)
    for wrong in ((4, 4), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError):
            ExpertShard(*wrong)
    with pytest.raises(ConfigError, match="none of 5 Engram rows"):
        ExpertShard(3, 4).rows(5)
