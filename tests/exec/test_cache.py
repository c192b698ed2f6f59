"""Cache sizes at real dimensions, the batch's tensors, and that every tensor finds its module."""

import pytest
import torch

from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.transformer import Layer, Transformer
from mdi_exec.model.weights import Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.sparse_attention import NO_COLUMN
from mdi_shared.errors import ConfigError

RING = 67_584  # bytes: 128 positions of 512 E4M3 codes and 16 scales


def test_bytes_per_token_of_context_at_real_dimensions(released):
    layout = CacheLayout(config=released)
    assert layout.bytes_per_block == 890 * 128


def test_bytes_per_sequence_at_real_dimensions(released):
    tails, history = 3 * 2 * 512 * 4, 3 * 4
    assert CacheLayout(config=released).bytes_per_slot == 40 * RING + tails + history
    with_draft = CacheLayout(config=released, with_draft=True)
    assert with_draft.bytes_per_slot == 43 * RING + tails + history
    backtrack = CacheLayout(config=released, max_backtrack=6)
    assert backtrack.bytes_per_slot == 40 * 528 * 134 + 7 * tails + 9 * 4


def held_bytes(cache: DeviceCache) -> int:
    pools = [*cache.windows, *cache.entries.values(), *cache.keys.values()]
    tensors = [t for pool in pools for t in (pool.codes, pool.scales)]
    tensors += [*cache.tails.values(), cache.engram_ids]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("with_draft", [False, True])
def test_the_cache_holds_the_bytes_its_layout_says(tiny_config, numerics, with_draft):
    layout = CacheLayout(config=tiny_config, numerics=numerics, max_backtrack=3,
                         with_draft=with_draft)  # fmt: skip
    cache = DeviceCache(layout, num_blocks=5, num_slots=4, device="cpu")
    assert held_bytes(cache) == 5 * layout.bytes_per_block + 4 * layout.bytes_per_slot


def test_a_cache_without_usable_blocks_or_slots_is_refused(tiny_config):
    layout = CacheLayout(config=tiny_config)
    with pytest.raises(ConfigError, match="num_blocks = 1: must be at least 2"):
        DeviceCache(layout, num_blocks=1, num_slots=2, device="cpu")
    with pytest.raises(ConfigError, match="num_slots = 1: must be at least 2"):
        DeviceCache(layout, num_blocks=2, num_slots=1, device="cpu")


def test_batch_tensors():
    items = [
        BatchItem(3, 5, 2, [7], 1),
        BatchItem(1, 131, 4, [8, 9], 1),
        BatchItem(2, 2, 1, [3], 0),
    ]
    batch = Batch.build(items, [10, 11, 12, 20, 30, 31])
    assert batch.token_ids.dtype == torch.int32
    assert batch.positions.tolist() == [2, 3, 4, 130, 0, 1]
    assert batch.seq_of_row.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.starts.tolist() == [2, 130, 0]
    assert batch.cu_q.tolist() == [0, 3, 4, 6]
    assert batch.k_len.tolist() == [5, 131, 2]
    assert batch.block_tables.tolist() == [[7, 0], [8, 9], [3, 0]]
    assert batch.slots.tolist() == [2, 4, 1]
    assert batch.logit_rows.tolist() == [2, 3]
    assert batch.max_k == 131


def test_row_numbers_depend_on_nothing_but_the_batch(exact):
    """Rows that end no group, or that a ring does not keep, go to what is never handed out."""
    items = [
        BatchItem(3, 5, 2, [7], 1),
        BatchItem(1, 131, 4, [8, 9], 1),
        BatchItem(2, 2, 1, [3], 0),
    ]
    batch = Batch.build(items, [10, 11, 12, 20, 30, 31])
    ctx = StepContext(batch, exact.cache(), exact.model.ropes)
    assert not ctx.reads_ring
    assert ctx.groups(2).entry.tolist() == [0, 7 * 64 + 1, 0, 0, 0, 3 * 64]
    assert ctx.groups(1).entry.tolist() == [898, 899, 900, 9 * 128 + 2, 384, 385]
    assert ctx.rings == (128, 1, 3)
    assert ctx.target(1).tolist() == [0, 0, 2, 4, 0, 1]
    assert ctx.target(3).tolist() == [2 * 3 + 2, 2 * 3, 2 * 3 + 1, 4 * 3 + 1, 3, 4]
    first, shared = ctx.window_rows[0].tolist(), 3 * 128
    assert first == [0, 1, shared, *[-1] * 125]
    assert ctx.window_rows[3].tolist() == [*range(128 + 3, 256), 128, 129, shared + 3]
    assert ctx.pages(1).visible.tolist() == [3, 4, 5, 131, 1, 2]
    assert ctx.pages(2).place.tolist() == [0, 1, 2, 0, 0, 1]


def test_rows_of_one_token_a_sequence_read_the_ring(exact):
    """Where a row's window is then, in the slot: the row itself included, and nothing behind."""
    items = [BatchItem(1, 131, 4, [8, 9], 1), BatchItem(1, 2, 1, [3], 0)]
    ctx = StepContext(Batch.build(items, [20, 31]), exact.cache(), exact.model.ropes)
    assert ctx.reads_ring
    ring = 4 * 128
    assert ctx.window_rows[0].tolist() == [*range(ring + 3, ring + 128), *range(ring, ring + 3)]
    assert ctx.window_rows[1].tolist() == [128, 129, *[-1] * 126]
    assert ctx.target(128).tolist() == [ring + 2, 129]


def test_broken_batches_are_caught():
    with pytest.raises(AssertionError, match="block table too short"):
        Batch.build([BatchItem(2, 129, 1, [1], 1)], [1, 2])
    with pytest.raises(AssertionError, match="3 token ids for 2 rows"):
        Batch.build([BatchItem(2, 2, 1, [1], 1)], [1, 2, 3])
    with pytest.raises(AssertionError, match="1 <= q <= k"):
        Batch.build([BatchItem(3, 2, 1, [1], 1)], [1, 2, 3])


class Recorder:
    """Notes which tensors are asked for."""

    def __init__(self, source) -> None:
        self.source, self.names = source, []

    def get(self, name: str) -> torch.Tensor:
        self.names.append(name)
        return self.source.get(name)


def test_every_text_tensor_is_loaded_once(tiny_config, tiny_tensors, token_map):
    recorder = Recorder(tiny_tensors)
    Transformer(tiny_config, Weights(recorder), token_map=token_map)
    elsewhere = ("mtp.", "vision.", "aligner.", "image_")
    expected = [n for n in tiny_tensors.tensors if not n.startswith(elsewhere)]
    assert sorted(recorder.names) == sorted(expected)


def test_draft_layers_are_ordinary_layers(tiny_config, tiny_tensors):
    recorder = Recorder(tiny_tensors)
    for i in range(3):
        plan = tiny_config.layer_plan(tiny_config.num_hidden_layers + i)
        layer = Layer(tiny_config, plan, Weights(recorder).sub(f"mtp.{i}"))
        assert layer.moe.num_experts == 8
    heads = {"main_proj", "main_norm", "norm", "markov_head", "confidence_head"}
    expected = [n for n in tiny_tensors.tensors
                if n.startswith("mtp.") and n.split(".")[2] not in heads]  # fmt: skip
    assert sorted(recorder.names) == sorted(expected)


def test_weights_keep_their_stored_formats(exact):
    layer = exact.model.layers[0]
    assert layer.moe.w13.codes.dtype == torch.int8
    assert layer.attention.wq_a.weight.codes.dtype == torch.float8_e4m3fn
    assert layer.attention.wq_a.weight.scales.dtype == torch.float8_e8m0fnu
    assert exact.model.embed.dtype == torch.bfloat16


def test_a_tensor_of_another_shape_is_named(tiny_config, tiny_tensors, token_map):
    class Wrong:
        def get(self, name: str) -> torch.Tensor:
            found = tiny_tensors.get(name)
            return found[:-1] if name == "layers.3.attn.q_norm.weight" else found

    with pytest.raises(ConfigError, match=r"layers\.3\.attn\.q_norm\.weight = \(63,\).*\(64,\)"):
        Transformer(tiny_config, Weights(Wrong()), token_map=token_map)


def test_engram_layers_need_a_token_map(tiny_config, tiny_tensors):
    with pytest.raises(ConfigError, match="token_map = None"):
        Transformer(tiny_config, Weights(tiny_tensors), token_map=None)
    with pytest.raises(ConfigError, match=r"token_map = \(5,\): must map vocab_size = 1024"):
        Transformer(tiny_config, Weights(tiny_tensors), token_map=torch.zeros(5))


def test_a_short_prompts_rows_list_as_many_window_keys_as_it_has(runners):
    """Its own length, not that of what is computed again; rows behind it list a whole window."""
    runner, ids = runners[Numerics.QUANTISED], list(range(45))
    batch = Batch.build([BatchItem(40, 40, 1, [1], 1, 40, 37), BatchItem(5, 5, 2, [2], 1)], ids)
    ctx = StepContext(batch, runner.cache(), runner.model.ropes)
    listed = (ctx.window_rows != NO_COLUMN).sum(dim=1).tolist()
    assert listed == [37] * 37 + [128] * 3 + [128] * 5
    seen = (ctx.window_rows >= 0).sum(dim=1).tolist()
    assert seen == [*range(1, 41), *range(1, 6)]
