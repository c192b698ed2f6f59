"""Row numbers of ragged steps, pairs and n-grams that reach back, against their references."""

import pytest
import torch

from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.ops import engram, index_scores, pairs
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.index_scores import Listed, PagedRows
from mdi_exec.ops.step_rows import StepRows, StepShape, StepTables, step_rows_ref
from tests.gpu import vectors
from tests.gpu.marks import gpu
from tests.gpu.vectors import assert_bits, normal

step_rows = pytest.importorskip("mdi_exec.ops.kernels.step_rows")
engram_kernels = pytest.importorskip("mdi_exec.ops.kernels.engram")
pair_kernels = pytest.importorskip("mdi_exec.ops.kernels.pairs")
selected = pytest.importorskip("mdi_exec.ops.kernels.selected_rows")
pytestmark = gpu

STEPS = {
    "decode": [(1, k) for k in (1, 2, 127, 128, 129, 130, 1001, 16_384)],
    "one prompt": [(300, 300)],
    "chunks": [(3, 5), (1, 131), (2, 2), (200, 700), (1, 1), (129, 129)],
}
# Cosines of the same angle may differ in float32's last bits if two libraries compute them.
ANGLE_ATOL = 2e-6


def tables(name, replay_keep=0):
    items = [
        BatchItem(q, k, 3 + index, [1 + (7 * index + b) % 90 for b in range(-(-k // 128))], 1,
                  prompt_len=k, given_len=(0, k - 1, 40)[index % 3])
        for index, (q, k) in enumerate(STEPS[name])
    ]  # fmt: skip
    batch = Batch.build(items, [7] * sum(i.q for i in items), vectors.DEVICE,
                        replay_keep_tokens=replay_keep)  # fmt: skip
    if replay_keep:
        batch, _ = batch.consumer_rows()
    return StepTables(*(getattr(batch, name) for name in StepTables._fields))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("in_ring", [True, False])
@pytest.mark.parametrize("replay_keep", [0, 150])
def test_row_numbers(name, in_ring, replay_keep):
    step = tables(name, replay_keep)
    frequencies = 10_000.0 ** -torch.arange(64, device=vectors.DEVICE).view(2, 32).div(32)
    for ratio, rings in ((1, (128, 1, 3)), (2, (130, 3, 0))):
        shape = StepShape(128, rings, in_ring, 128, 8, ratio, 100)
        found = step_rows.step_rows(step, shape, frequencies)
        expected = step_rows_ref(step, shape, frequencies)
        for field, mine, theirs in zip(StepRows._fields, found, expected, strict=True):
            if field in ("cos", "sin"):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=ANGLE_ATOL)
            else:
                assert mine.dtype == theirs.dtype, field
                assert torch.equal(mine, theirs), field


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("width", "parts"), [(512, 8), (64, 1)])
def test_pairs(name, width, parts):
    step = tables(name)
    rows, length = len(step.positions), 1
    product, gates = (
        Partial(normal(parts, rows, width, dtype=torch.float32, seed=seed), torch.bfloat16)
        for seed in (1, 2)
    )
    tail = pairs.Tail(normal(20 * length, 2, width, dtype=torch.float32, seed=3), length)
    found, own = pair_kernels.pool_pairs(product, gates, tail, step)
    expected, expected_own = pairs.pool_pairs_ref(product, gates, tail, step)
    assert_bits(own, expected_own)
    torch.testing.assert_close(found.total(), expected.total(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("length", [3, 5])
def test_ngrams_and_their_rows(name, length):
    step, pad = tables(name), 2
    dice = torch.Generator().manual_seed(0)

    def draw(most, *shape, least=0):
        return torch.randint(least, most, shape, generator=dice).to(vectors.DEVICE)

    ids, history = draw(99_000, len(step.positions), least=-1), draw(99_000, 20, length, least=-1)
    found = engram_kernels.ids_before(ids, history.int(), step, 4)
    assert torch.equal(found, engram.ids_before_ref(ids, history.int(), step, 4))
    constants = draw(2**62 // 99_000, 4), draw(2**20, 3, 8, least=2**19), draw(2**30, 3, 8)
    rows = engram_kernels.engram_rows(found, pad, *constants)
    assert torch.equal(rows, engram.engram_rows_ref(found, pad, *constants))


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("rows", [1, 130])
def test_selected_rows(staged, is_listed, rows):
    dice = torch.Generator().manual_seed(rows)

    def draw(most, *shape, least=0):
        made = torch.randint(least, most, shape, generator=dice, dtype=torch.int32)
        return made.to(vectors.DEVICE)

    pages = PagedRows(draw(900, 4, 16), 64, draw(4, rows), draw(4, rows), draw(9, rows), False)
    ids = Listed(draw(128, rows, 20), 8, draw(160, rows)) if is_listed else None
    columns = draw(160, rows, 32, least=-1)
    found = selected.selected_rows(columns, pages, ids, staged)
    assert torch.equal(found, index_scores.selected_rows_ref(columns, pages, ids, staged))
