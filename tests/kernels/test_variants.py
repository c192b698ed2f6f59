"""A kernel compiles in seconds: none may come in a variant for each length of context."""

import pytest
import torch

pytest.importorskip("tilelang", reason="kernels are written in TileLang, which is not installed")

from mdi_exec.ops.kernels import top_entries
from mdi_exec.ops.top_entries import candidate_blocks_ref

BLOCK = 8
K = 32


def test_candidate_blocks_are_one_program_at_any_length(monkeypatch):
    asked = set()

    def compiled(builder, *args):
        asked.add((builder.__name__, args))
        return lambda *_: None

    monkeypatch.setattr(top_entries, "compiled", compiled)
    for entries in range(64, 4_096, 64):
        scores = torch.zeros(3, entries, dtype=torch.bfloat16)
        top_entries.candidate_blocks(scores, torch.tensor([1, 40, entries]), BLOCK, K)
    assert asked == {("block_maxima_program", (BLOCK,)), ("top_visible_program", (K, True))}


@pytest.mark.parametrize("entries", [1, 8, 63, 64, 256])
def test_blocks_that_are_all_kept_are_the_references(entries):
    scores = torch.randn(50, entries).to(torch.bfloat16)
    visible = torch.randint(1, entries + 1, (50,))
    found = top_entries.candidate_blocks(scores, visible, BLOCK, K)
    expected = candidate_blocks_ref(scores, visible, BLOCK, K)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
