"""Engram: hash constants and rows bit for bit, look-up and gate against golden tensors."""

import dataclasses

import pytest
import torch

from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.model.engram import engram_hashes
from mdi_exec.model.step_context import StepContext
from mdi_exec.numerics import Numerics
from mdi_exec.ops.engram import BLOCKED, engram_add, engram_rows
from mdi_shared.errors import ConfigError


def step(runner, ids, *, cache=None, start=0, is_image=None) -> StepContext:
    item = BatchItem(len(ids), start + len(ids), 1, [1, 2], 0)
    cache = runner.cache() if cache is None else cache
    return StepContext(Batch.build([item], ids, is_image=is_image), cache, runner.model.ropes)


def hash_all(model, ids):
    return torch.stack([e.table_rows(ids, model.engram_ids.pad_id)
                        for e in model.engrams.values()], dim=1)  # fmt: skip


def test_tiny_constants_match_golden(tiny_config, golden):
    expected = golden("layers/engram_hash")
    for i, found in enumerate(engram_hashes(tiny_config)):
        assert torch.equal(found.multipliers, expected["multipliers"][i])
        assert torch.equal(found.primes, expected["primes"][i])
        assert torch.equal(found.offsets.flatten(), expected["offsets"][i])


def test_released_constants_match_golden(tiny_config, golden):
    expected = golden("layers/engram_hash")
    released = dataclasses.replace(
        tiny_config, num_hidden_layers=20, num_nextn_predict_layers=0,
        compress_ratios=(0, 0) + (2,) * 18, kv_source_layer_ids=(2, 8, 14),
        index_source_layer_ids=(2, 8, 14), candidate_source_layer_id=None,
        dspark_target_layer_ids=(), engram_layer_ids=(1, 14), engram_vocab_size=16_000_000,
        engram_n_heads=8, engram_num_embeddings=(384_006_168, 384_016_682),
        engram_compressed_vocab_size=99_092,
    )  # fmt: skip
    for i, found in enumerate(engram_hashes(released)):
        assert torch.equal(found.multipliers, expected["real_multipliers"][i])
        assert torch.equal(found.primes, expected["real_primes"][i])


def test_a_table_size_that_is_no_sum_of_primes_is_refused(tiny_config):
    wrong = dataclasses.replace(tiny_config, engram_num_embeddings=(3144, 3425))
    with pytest.raises(ConfigError, match=r"engram_num_embeddings\[1\] = 3425: must be 3424"):
        engram_hashes(wrong)


def test_hash_rows_match_golden(exact, golden):
    expected = golden("layers/engram_hash")
    ids = exact.model.engram_ids(step(exact, expected["token_ids"]))
    assert torch.equal(ids[:, 0], expected["compressed"].long())
    assert torch.equal(hash_all(exact.model, ids), expected["hash_ids"].long())


def test_image_tokens_block_what_lies_behind_them(exact, golden):
    expected = golden("layers/engram_hash")
    ctx = step(exact, expected["token_ids"], is_image=expected["image_mask"].bool())
    ids = exact.model.engram_ids(ctx)
    assert torch.equal(hash_all(exact.model, ids), expected["hash_ids_masked"].long())


@pytest.mark.parametrize("chunks", [[1] * 6 + [155], [2, 3, 60, 96], [160, 1]])
@pytest.mark.parametrize("with_image", [False, True])
def test_history_carries_over_chunks(exact, golden, chunks, with_image):
    expected = golden("layers/engram_hash")
    cache, start, parts = exact.cache(), 0, []
    mask = expected["image_mask"].bool() if with_image else None
    for q in chunks:
        rows = slice(start, start + q)
        is_image = None if mask is None else mask[rows]
        ctx = step(exact, expected["token_ids"][rows], cache=cache, start=start, is_image=is_image)
        parts.append(hash_all(exact.model, exact.model.engram_ids(ctx)))
        start += q
    wanted = "hash_ids_masked" if with_image else "hash_ids"
    assert torch.equal(torch.cat(parts), expected[wanted].long())


@pytest.mark.parametrize("layer", [1, 4])
def test_look_up_and_gate_match_golden(rounded, golden, layer):
    expected = {k.split("engram.")[1]: v for k, v in golden("layers/quantised").items()
                if k.startswith(f"p.L{layer:02d}.engram.")}  # fmt: skip
    shown = golden("layers/quantised")["rows"].long()
    engram, model = rounded.model.engrams[layer], rounded.model
    ids = model.engram_ids(step(rounded, golden("layers/quantised")["token_ids"]))
    rows = engram.table_rows(ids, model.engram_ids.pad_id)
    assert torch.equal(rows, expected["hash_ids"].long())
    looked_up = engram.look_up(rows, Numerics.QUANTISED.dtype)
    assert (looked_up[shown] != expected["kv"]).float().mean() < 1e-3
    found = engram(expected["h_in"], ids[shown], model.engram_ids.pad_id)
    assert (found != expected["h_out"]).float().mean() < 1e-3


def test_the_gate_is_closed_at_image_tokens():
    generator = torch.Generator().manual_seed(3)
    streams, looked_up = torch.randn(2, 4, 32, generator=generator), torch.ones(2, 160)
    ones = torch.ones(4, 32)
    found = engram_add(streams, looked_up, ones, ones, torch.tensor([True, False]))
    assert torch.equal(found[1], streams[1])
    assert not torch.equal(found[0], streams[0])


def test_hashing_is_exact_near_the_int64_limit():
    """Products close to 2^63 must neither wrap nor lose bits."""
    ids = torch.tensor([[99_091, 99_090, 5, BLOCKED]])
    factor = (2**63 - 1) // 99_092 // 2 * 2 - 1
    multipliers = torch.tensor([factor, factor - 2, 7, 9])
    primes, offsets = torch.tensor([[16_000_057], [11], [13]]), torch.zeros(3, 1, dtype=torch.int64)
    found = engram_rows(ids, 3, multipliers, primes, offsets)
    z1 = (99_091 * factor) ^ (99_090 * (factor - 2))
    z2 = z1 ^ (5 * 7)
    assert found.tolist() == [[z1 % 16_000_057, z2 % 11, (z2 ^ (3 * 9)) % 13]]
