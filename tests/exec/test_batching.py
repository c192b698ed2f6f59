"""A sequence's logits are bit for bit the same alone, chunked, batched, and wherever it is kept."""

import pytest
import torch

from mdi_exec.model import indexer, staged_keys
from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.numerics import Numerics
from mdi_exec.ops import sparse_attention

LONG = (9, 2, 7, 15, 4)  # block tables, in no order
SHORT = (11, 3, 21)


@pytest.fixture(scope="module", params=list(Numerics), ids=lambda mode: mode.value)
def runner(request, small_runners):
    return small_runners[request.param]


@pytest.fixture(scope="module")
def prompts(golden):
    return {n: golden(f"logits/p{n}")["prompt_ids"] for n in (37, 300, 520)}


@pytest.fixture(scope="module")
def whole(runner, prompts):
    """Logits of each prompt run alone in one chunk."""
    return {n: runner.prefill(runner.cache(), ids) for n, ids in prompts.items()}


@pytest.mark.parametrize(
    "chunks",
    [[1, 5, 64, 3, 56, 171], [1, 1, 1, 297], [128, 128, 44], [299, 1], [33] * 9 + [3]],
    ids=lambda chunks: f"{len(chunks)} chunks",
)
def test_chunks_change_nothing(runner, prompts, whole, chunks):
    found = runner.prefill(runner.cache(), prompts[300], chunks, slot=4, table=SHORT)
    assert torch.equal(found, whole[300])


def test_chunks_change_nothing_in_a_prompt_shorter_than_the_window(runner, prompts):
    ids = prompts[37]
    whole = runner.prefill(runner.cache(), ids, given_len=37)
    for chunks in ([1, 5, 31], [36, 1], [1] * 9 + [28]):
        found = runner.prefill(runner.cache(), ids, chunks, given_len=37)
        assert torch.equal(found, whole), f"chunks {chunks}"


def test_outputs_computed_again_are_no_part_of_a_short_prompt(runner, prompts):
    """A preempted sequence runs its outputs as prompt; its rows are those of before."""
    ids = prompts[300][:60]
    cache = runner.cache()
    first = runner.prefill(cache, ids[:50], given_len=50)
    decoded = runner.decode(cache, 50, ids[50:])
    again = runner.prefill(runner.cache(), ids, [20, 40], given_len=50)
    assert torch.equal(again, torch.cat((first, decoded)))


def test_decoding_a_prompt_token_by_token_changes_nothing(runner, prompts, whole):
    found = runner.decode(runner.cache(), 0, prompts[37][:20])
    assert torch.equal(found, whole[37][:20])


def test_a_mixed_batch_changes_nothing(runner, prompts, whole):
    """A decode row, a long chunk in the middle of its prompt, a whole prompt and a placeholder."""
    cache = runner.cache()
    runner.prefill(cache, prompts[300][:299], slot=3, table=SHORT)
    first = prompts[520][:201]
    runner.prefill(cache, first, [200, 1], slot=2, table=LONG)
    items = [
        BatchItem(1, 300, 3, SHORT, 1),
        BatchItem(319, 520, 2, LONG, 319),
        BatchItem(37, 37, 5, [12], 37),
        BatchItem(1, 1, 0, [0], 1),
    ]
    tokens = torch.cat((prompts[300][299:], prompts[520][201:], prompts[37], torch.tensor([7])))
    found = runner.model.forward(Batch.build(items, tokens), cache)
    assert found.shape[0] == 358
    assert torch.equal(found[0], whole[300][299])
    assert torch.equal(found[1:320], whole[520][201:])
    assert torch.equal(found[320:357], whole[37])


def test_many_decode_rows_change_nothing(runner, prompts, whole):
    cache, lengths = runner.cache(), (300, 37, 128, 65, 129, 64)
    tables, blocks = [], iter(range(1, 24))
    for slot, length in enumerate(lengths, start=1):
        tables.append([next(blocks) for _ in range(-(-length // 128))])
        ids = prompts[300][: length - 1]
        runner.prefill(cache, ids, slot=slot, table=tables[-1])
    items = [BatchItem(1, n, i + 1, tables[i], 1) for i, n in enumerate(lengths)]
    tokens = torch.stack([prompts[300][n - 1] for n in lengths])
    found = runner.model.forward(Batch.build(items, tokens), cache)
    for row, length in zip(found, lengths, strict=True):
        assert torch.equal(row, whole[300][length - 1]), f"context {length}"


def test_only_wanted_rows_get_logits(runner, prompts, whole):
    items = [BatchItem(37, 37, 1, [1], 1), BatchItem(20, 20, 2, [2], 0)]
    tokens = torch.cat((prompts[37], prompts[300][:20]))
    found = runner.model.forward(Batch.build(items, tokens), runner.cache())
    assert torch.equal(found, whole[37][-1:])


def test_a_used_slot_and_used_blocks_need_no_clearing(runner, prompts, whole):
    cache = runner.cache()
    runner.prefill(cache, prompts[520], slot=1, table=LONG)
    assert torch.equal(runner.prefill(cache, prompts[37], slot=1, table=[7]), whole[37])


def test_rejected_drafts_leave_no_trace(runner, prompts, whole):
    """Run six wrong tokens, then the right ones over them; repeatedly, across a group boundary."""
    cache = runner.cache(max_backtrack=6)
    runner.prefill(cache, prompts[300][:255], slot=1, table=SHORT)
    for start in (255, 256, 259, 260):
        wrong = prompts[300][:6] + 1
        item = BatchItem(6, start + 6, 1, SHORT, 6)
        runner.model.forward(Batch.build([item], wrong), cache)
        end = {255: 256, 256: 259, 259: 260, 260: 266}[start]
        item = BatchItem(end - start, end, 1, SHORT, end - start)
        found = runner.model.forward(Batch.build([item], prompts[300][start:end]), cache)
        assert torch.equal(found, whole[300][start:end]), f"at {start}"


def test_blocking_of_long_prompts_changes_nothing(runner, prompts, whole, monkeypatch):
    monkeypatch.setattr(indexer, "MAX_GATHERED_VALUES", 600_000)
    monkeypatch.setattr(sparse_attention, "MAX_GATHERED_VALUES", 300_000)
    assert torch.equal(runner.prefill(runner.cache(), prompts[300]), whole[300])


def test_staging_keys_changes_nothing(runner, prompts, whole, monkeypatch):
    """Two chunks at once, of sequences that hold several blocks."""
    used = []
    monkeypatch.setattr(staged_keys, "can_stage", lambda q: not used.append(q.dtype))
    monkeypatch.setattr(staged_keys, "MIN_ROWS", 20)
    cache = runner.cache()
    runner.prefill(cache, prompts[520][:200], slot=2, table=LONG)
    items = [BatchItem(320, 520, 2, LONG, 320), BatchItem(300, 300, 3, SHORT, 300)]
    tokens = torch.cat((prompts[520][200:], prompts[300]))
    found = runner.model.forward(Batch.build(items, tokens), cache)
    assert used
    assert torch.equal(found[:320], whole[520][200:])
    assert torch.equal(found[320:], whole[300])
