"""Top-k and candidate blocks: the reference's very columns, whatever ties and garbage there are."""

import pytest
import torch

from mdi_exec.ops.kernels import top_entries as kernels
from mdi_exec.ops.top_entries import candidate_blocks_ref, top_visible_ref
from tests.gpu.marks import gpu
from tests.gpu.strictness import poisoned, unawaited

pytestmark = gpu

SCORES = {
    "random": lambda x: x,
    "many ties": torch.round,
    "all equal": torch.zeros_like,
    "mostly zero": torch.relu,
    "negative": lambda x: -x.abs() - 1,
    "tiny": lambda x: x * 1e-39,
    "huge": lambda x: x * 1e38,
    "signed zeros": lambda x: torch.copysign(torch.zeros_like(x), x),
    "minus infinity": lambda x: torch.where(x < 0.5, -torch.inf, x),
    "one octave": lambda x: 1 + x.abs() / 8,
}


def scores_of(rows, width, kind):
    generator = torch.Generator("cuda").manual_seed(width)
    x = torch.randn(rows, width, device="cuda", generator=generator)
    return SCORES[kind](x).to(torch.bfloat16)


def visible_of(rows, width, k):
    edges = [width, 0, 1, width // 2, width - 1, k - 1, k, k + 1, 7, 8, 9, 4095, 4096, 4097]
    visible = torch.tensor(edges * (rows // len(edges) + 1), device="cuda")[:rows]
    return visible.clamp(0, width).to(torch.int32)


def without_garbage(scores, visible):
    columns = torch.arange(scores.shape[1], device="cuda")
    return scores.masked_fill(columns >= visible.unsqueeze(1), 0)


def with_garbage(scores, visible):
    columns = torch.arange(scores.shape[1], device="cuda")
    return scores.masked_fill(columns >= visible.unsqueeze(1), torch.nan)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(
    ("rows", "width", "k"),
    [(1, 131_072, 512), (14, 70_000, 512), (129, 16_384, 512), (3, 600, 512), (30, 128, 8)],
)
def test_top_visible(kind, rows, width, k):
    scores, visible = scores_of(rows, width, kind), visible_of(rows, width, k)
    with poisoned():
        chosen = kernels.top_visible(with_garbage(scores, visible), visible, k)
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen, top_visible_ref(without_garbage(scores, visible), visible, k))


@pytest.mark.parametrize("width", [5, 600, 601])
def test_rows_may_lie_apart(width):
    wide = torch.full((6, 704), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, :width] = scores_of(6, width, "random")
    visible = visible_of(6, width, 8).long()
    expected = top_visible_ref(wide[:, :width].contiguous(), visible, 8)
    assert torch.equal(kernels.top_visible(wide[:, :width], visible, 8), expected)
    shifted = wide.roll(3, 1)[:, 3 : 3 + width]
    assert torch.equal(kernels.top_visible(shifted, visible, 8), expected)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(
    ("rows", "width", "k"),
    [(1, 131_072, 2048), (14, 70_000, 2048), (129, 16_448, 2048), (30, 128, 8), (14, 1001, 8)],
)
def test_candidate_blocks(kind, rows, width, k):
    scores, visible = scores_of(rows, width, kind), visible_of(rows, width, 8 * k)
    with poisoned():
        blocks = kernels.candidate_blocks(with_garbage(scores, visible), visible, 8, k)
    expected = candidate_blocks_ref(without_garbage(scores, visible), visible, 8, k)
    assert torch.equal(blocks, expected)


def test_a_row_is_chosen_from_alike_in_any_batch():
    scores = scores_of(200, 20_000, "many ties")
    visible = torch.arange(19_801, 20_001, device="cuda", dtype=torch.int32)
    together = kernels.top_visible(scores, visible, 512)
    blocks = kernels.candidate_blocks(scores, visible, 8, 2048)
    for row in (0, 77, 199):
        part = slice(row, row + 1)
        assert torch.equal(kernels.top_visible(scores[part], visible[part], 512), together[part])
        alone = kernels.candidate_blocks(scores[part], visible[part], 8, 2048)
        assert torch.equal(alone, blocks[part])


def test_no_rows():
    scores = torch.empty((0, 64), dtype=torch.bfloat16, device="cuda")
    visible = torch.empty(0, dtype=torch.int32, device="cuda")
    assert kernels.top_visible(scores, visible, 8).shape == (0, 8)
    assert kernels.candidate_blocks(scores, visible, 8, 8).shape == (0, 8)


def test_nothing_waits_for_the_device():
    scores = scores_of(4, 1024, "random")
    visible = torch.full((4,), 1000, device="cuda")
    kernels.candidate_blocks(scores, visible, 8, 8)
    with unawaited():
        kernels.candidate_blocks(scores, visible, 8, 8)
        kernels.top_visible(scores, visible, 8)
        top_visible_ref(scores, visible, 8)
