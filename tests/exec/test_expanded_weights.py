"""Float32 copies of weights cost memory within their budget and change no bit of any result."""

import pytest
import torch

from mdi_exec.engine.options import EngineOptions
from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.gemm import QuantisedWeight
from mdi_shared.errors import ConfigError

PLENTY = 1e9


def weights_of(model: Transformer) -> list[QuantisedWeight]:
    """Every quantised weight of the layers, in no particular order."""
    found: list[QuantisedWeight] = []
    seen, parts = set(), [*model.layers, *model.engrams.values()]
    while parts:
        part = parts.pop()
        if isinstance(part, QuantisedWeight):
            found.append(part)
        elif id(part) not in seen and type(part).__module__.startswith("mdi_exec.model"):
            seen.add(id(part))
            parts += getattr(part, "__dict__", {}).values()
    return found


@pytest.fixture(scope="module")
def load(tiny_config, tiny_tensors, token_map):
    def build(budget_bytes: float) -> tuple[Transformer, ExpansionBudget]:
        budget = ExpansionBudget(budget_bytes)
        weights = Weights(tiny_tensors, budget=budget)
        return Transformer(tiny_config, weights, token_map=token_map), budget

    return build


def test_the_budget_is_spent_to_the_byte_and_never_exceeded(load):
    full, left = load(PLENTY)
    assert all(w.values is not None for w in weights_of(full))
    everything = sum(w.values.nbytes for w in weights_of(full))
    assert left.left_bytes == PLENTY - everything
    assert all(w.values.nbytes == 4 * w.num_values for w in weights_of(full))
    half, left = load(everything / 2)
    kept = [w.values.nbytes for w in weights_of(half) if w.values is not None]
    assert 0 < sum(kept) <= everything / 2
    assert left.left_bytes == everything / 2 - sum(kept)


@pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)
def test_copies_change_no_bit(load, numerics, golden):
    ids = golden("logits/p300")["prompt_ids"]
    logits = []
    for budget_bytes in (0, PLENTY):
        model, _ = load(budget_bytes)
        model.numerics = numerics
        layout = CacheLayout(config=model.config, numerics=numerics)
        cache = DeviceCache(layout, num_blocks=4, num_slots=2, device="cpu")
        prefill = Batch.build([BatchItem(299, 299, 1, [1, 2, 3], 299)], ids[:299])
        decode = Batch.build([BatchItem(1, 300, 1, [1, 2, 3], 1)], ids[299:])
        logits.append([model.forward(step, cache) for step in (prefill, decode)])
    for without, with_copies in zip(*logits, strict=True):
        assert torch.equal(without, with_copies)


def test_copies_unasked_are_those_that_help():
    assert EngineOptions().expanded_weights_bytes == 1e9
    assert EngineOptions(device="cuda").expanded_weights_bytes == 16e9  # for kernels
    on_references = EngineOptions(device="cuda", numerics="float32")
    assert on_references.expanded_weights_bytes == 0
    asked = EngineOptions(device="cuda", expanded_weights_memory_gb=2)
    assert asked.expanded_weights_bytes == 2e9
    assert EngineOptions(expanded_weights_memory_gb=0).expanded_weights_bytes == 0


@pytest.mark.parametrize("value", [-1, -0.5, float("nan")])
def test_a_negative_budget_is_refused(value):
    with pytest.raises(ConfigError, match="expanded_weights_memory_gb"):
        EngineOptions(expanded_weights_memory_gb=value)
