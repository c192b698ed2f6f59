"""Bounded replay: consumer layers run on the last rows of a prompt only, and see no further."""

import pytest
import torch

from mdi_exec.model.batch import Batch, BatchItem

KEEP = 140


def chunkings(length: int) -> list[list[int]]:
    return [
        [length],
        [length - 7, 7],  # the cut lies inside the first chunk
        [length - KEEP, KEEP] if length > KEEP else [1, length - 1],  # on a chunk boundary
        [47] * (length // 47) + [length % 47],
    ]


def run(runner, golden, chunks):
    cache, length = runner.cache(), len(golden["prompt_ids"])
    last = runner.prefill(cache, golden["prompt_ids"], chunks, keep=KEEP)
    steps = golden["decode_logits"].shape[0]
    decoded = runner.decode(cache, length, golden["decode_ids"][:steps], keep=KEEP,
                            prompt_len=length)  # fmt: skip
    return last, decoded


@pytest.mark.parametrize("length", [129, 300, 520])
def test_without_rounding_replay_is_golden(exact, golden, length):
    expected = golden(f"replay/f32_p{length}")
    found = [run(exact, expected, chunks) for chunks in chunkings(length)]
    for last, decoded in found:
        torch.testing.assert_close(last[0], expected["prefill_last"], rtol=0, atol=1e-4)
        torch.testing.assert_close(decoded, expected["decode_logits"], rtol=0, atol=1e-4)
        assert torch.equal(last, found[0][0])
        assert torch.equal(decoded, found[0][1])


@pytest.mark.parametrize("length", [129, 300, 520])
def test_with_rounding_replay_is_as_close_as_rounding_allows(rounded, golden, length):
    expected = golden(f"replay/p{length}")
    last, decoded = run(rounded, expected, [length])
    error = torch.cat((last, decoded)) - torch.cat(
        (expected["prefill_last"].unsqueeze(0), expected["decode_logits"])
    )
    assert error.abs().mean() <= 0.2
    assert error.abs().max() <= 2.0


def test_kept_rows_are_golden(exact, golden):
    expected = golden("replay/f32_p300")
    item = BatchItem(300, 300, 1, [1, 2, 3], KEEP, 300)
    batch = Batch.build([item], expected["prompt_ids"], replay_keep_tokens=KEEP)
    found = exact.model.forward(batch, exact.cache())
    assert torch.equal(found.argmax(dim=1), expected["prefill_kept_argmax"].long())


def test_replay_really_drops_rows_and_changes_long_prompts(exact, golden):
    ids = golden("replay/f32_p300")["prompt_ids"]
    batch = Batch.build([BatchItem(300, 300, 1, [1, 2, 3], 1, 300)], ids, replay_keep_tokens=KEEP)
    cut, rows = batch.consumer_rows()
    assert rows.tolist() == list(range(160, 300))
    assert cut.positions.tolist() == rows.tolist()
    full = exact.prefill(exact.cache(), ids)[-1]
    assert not torch.equal(exact.model.forward(batch, exact.cache())[0], full)


def test_cut_and_uncut_sequences_share_a_batch(exact, golden):
    expected = golden("replay/f32_p300")
    ids, cache = expected["prompt_ids"], exact.cache()
    items = [
        BatchItem(20, 20, 1, [4, 5, 6], 0, 300),  # wholly before the cut
        BatchItem(300, 300, 2, [1, 2, 3], 1, 300),
        BatchItem(30, 30, 3, [7], 1, 30),
    ]
    tokens = torch.cat((ids[:20], ids, ids[:30]))
    found = exact.model.forward(Batch.build(items, tokens, replay_keep_tokens=KEEP), cache)
    torch.testing.assert_close(found[0], expected["prefill_last"], rtol=0, atol=1e-4)
    assert torch.equal(found[1], exact.prefill(exact.cache(), ids[:30])[-1])


def test_a_batch_before_the_cut_has_no_logits(exact, golden):
    ids = golden("replay/f32_p300")["prompt_ids"]
    batch = Batch.build(
        [BatchItem(20, 20, 1, [4, 5, 6], 0, 300)], ids[:20], replay_keep_tokens=KEEP
    )
    assert exact.model.forward(batch, exact.cache()).shape == (0, 1024)
