"""The memory estimate against the tensors that are really there."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mdi_exec.engine.memory import MemoryEstimate, StepLimits, estimate_memory, require_fits
from mdi_exec.model.batch import BLOCK_TOKENS, Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.dspark import DraftHead
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.numerics import Numerics
from mdi_exec.weights.source import open_model, random_config
from mdi_shared.errors import ConfigError

ROWS, CONTEXT = BLOCK_TOKENS, 4 * BLOCK_TOKENS
LIMITS = StepLimits(rows=ROWS, seqs=2, context=CONTEXT)
# Made from the config, not loaded: rotations, hash constants, the token map.
NOT_WEIGHTS = ("ropes", "engram_ids", "multipliers", "primes", "offsets")
MOST_OVERESTIMATE = 6.0


def bytes_held(root, skip=()) -> int:
    """Bytes of the storages of all tensors reachable from an object."""
    seen, sizes, waiting = set(), {}, [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            waiting += [part for name, part in value.items() if name not in skip]
        elif isinstance(value, list | tuple):
            waiting += value
        elif type(value).__module__.startswith("mdi_exec") and id(value) not in seen:
            seen.add(id(value))
            names = [*getattr(value, "__dict__", {}), *getattr(value, "__dataclass_fields__", {})]
            waiting += [getattr(value, name) for name in names if name not in skip]
    return sum(sizes.values())


class PeakBytes(TorchDispatchMode):
    """Follows the bytes of all tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else (out,):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _note(self, storage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key, nbytes) -> None:
        self._known.discard(key)
        self.now -= nbytes


@pytest.fixture(scope="module", params=["tiny", "small"])
def source(request):
    if request.param == "tiny":
        return open_model("random:tiny")
    return open_model("random:small,experts=8")


def estimate(config, **options) -> MemoryEstimate:
    layout = CacheLayout(config=config)
    return estimate_memory(layout, LIMITS, **{"num_blocks": 8, "num_slots": 3, **options})


@pytest.mark.parametrize("copies_limit", [0.0, 1e12])
def test_weights_and_copies_are_exact(source, copies_limit):
    weights = Weights(source.tensors, budget=ExpansionBudget(copies_limit))
    model = Transformer(source.config, weights, token_map=source.token_map)
    found = estimate(source.config, copies_limit=copies_limit)
    assert bytes_held(model, NOT_WEIGHTS) == found.weights + found.copies
    assert (found.copies > 0) == (copies_limit > 0)


@pytest.mark.parametrize("copies_limit", [0.0, 1e12])
def test_a_draft_head_is_exact_too(copies_limit):
    source = open_model("random:tiny", with_draft=True)
    weights = Weights(source.tensors, budget=ExpansionBudget(copies_limit))
    model = Transformer(source.config, weights, token_map=source.token_map)
    head = DraftHead(model, weights.sub("mtp"))
    layout = CacheLayout(config=source.config).with_drafts(5)
    found = estimate_memory(layout, LIMITS, num_blocks=8, num_slots=3, copies_limit=copies_limit)
    assert bytes_held(head, NOT_WEIGHTS) == found.weights + found.copies
    assert bytes_held(DeviceCache(layout, num_blocks=8, num_slots=3, device="cpu")) == found.cache


@pytest.mark.parametrize("numerics", list(Numerics))
def test_the_cache_is_exact(source, numerics):
    layout = CacheLayout(config=source.config, numerics=numerics)
    cache = DeviceCache(layout, num_blocks=8, num_slots=3, device="cpu")
    found = estimate_memory(layout, LIMITS, num_blocks=8, num_slots=3)
    assert bytes_held(cache) == found.cache


def test_a_draft_head_and_an_image_tower_are_not_counted(tiny_config):
    assert tiny_config.vision is not None
    whole = estimate(tiny_config)
    bare = estimate(random_config("tiny"))
    assert abs(whole.weights - bare.weights) < bare.weights // 100  # the Engram vocabularies differ


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_step_stays_below_the_workspace(source, numerics):
    budget = ExpansionBudget(folds_experts=numerics is Numerics.FOLDED)
    model = Transformer(source.config, Weights(source.tensors, budget=budget),
                        token_map=source.token_map, numerics=numerics)  # fmt: skip
    layout = CacheLayout(config=source.config, numerics=numerics)
    cache = DeviceCache(layout, num_blocks=16, num_slots=3, device="cpu")
    half, tables = ROWS // 2, (range(1, 5), range(5, 9))
    items = [BatchItem(half, CONTEXT, 1 + i, table, 1) for i, table in enumerate(tables)]
    batch = Batch.build(items, torch.arange(ROWS) % source.config.vocab_size)
    gc.collect()
    with PeakBytes() as watched:
        model.forward(batch, cache)
    found = estimate_memory(layout, LIMITS, num_blocks=16, num_slots=3).workspace
    assert watched.peak <= found <= MOST_OVERESTIMATE * watched.peak


def test_kernels_need_less_than_references(source):
    assert estimate(source.config, for_kernels=True).workspace < estimate(source.config).workspace


def test_tables_elsewhere_do_not_count(source):
    less = estimate(source.config, engram_elsewhere=True).weights
    rows = sum(source.config.engram_num_embeddings)
    width = source.config.engram_head_dim
    assert estimate(source.config).weights - less == rows * (width + width // 32)


def test_the_slice_fits_an_h200_and_the_whole_model_does_not():
    def needs(layers):
        layout = CacheLayout(config=random_config("flash-slice", layers=layers))
        limits = StepLimits(rows=8192, seqs=256, context=131_072)
        return estimate_memory(layout, limits, num_blocks=65_536, num_slots=308, copies_limit=8e9,
                               for_kernels=True)  # fmt: skip

    require_fits(needs(6), 139 * 2**30, 141 * 2**30, "cuda")
    with pytest.raises(ConfigError, match="fewer layers or experts"):
        require_fits(needs(40), 139 * 2**30, 141 * 2**30, "cuda")


def test_a_chunk_of_32768_tokens_at_131072_fits_an_h200():
    """Rows are taken in blocks where they would need a score for every entry."""
    layout = CacheLayout(config=random_config("flash-slice"))
    limits = StepLimits(rows=32_768, seqs=1, context=131_072)
    estimate = estimate_memory(layout, limits, num_blocks=1_030, num_slots=2, copies_limit=16e9,
                               for_kernels=True)  # fmt: skip
    assert estimate.workspace < 20e9
    require_fits(estimate, free=int(141e9), total=int(150e9), where="a GPU")


def test_what_does_not_fit_is_said_in_one_line():
    found = MemoryEstimate(weights=48 * 10**9, copies=0, cache=90 * 10**9, workspace=3 * 10**9)
    with pytest.raises(ConfigError) as caught:
        require_fits(found, 120 * 10**9, 140 * 10**9, "cuda:1")
    assert str(caught.value) == (
        "device memory = '141.0 GB': needed (weights 48.0, their copies 0.0, cache 90.0, a step's "
        "workspace 3.0), but 120.0 of 140.0 GB are free on cuda:1; lower kv_cache_memory_gb, "
        "max_num_seqs or num_blocks"
    )
