"""The index-score kernel against its reference: paged keys, several sequences, listed blocks."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops.index_scores import Listed, PagedRows, score_entries, score_entries_ref
from mdi_exec.ops.quantise import round_fp4
from mdi_exec.ops.row_pool import RowPool, key_format, store_rows
from mdi_exec.ops.step_rows import listed_columns
from tests.gpu.marks import gpu
from tests.gpu.vectors import assert_bits, normal

pytestmark = gpu
TRUE, TINY = (32, 128), (16, 32)


def pages(lengths, rows_each, per_block, seed=0):
    """Sequences of `lengths` entries whose last rows query, on scattered blocks."""
    widths = [-(-length // per_block) for length in lengths]
    numbers = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(seed)) + 1
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    taken = 0
    for s, width in enumerate(widths):
        tables[s, :width] = numbers[taken : taken + width]
        taken += width
    seq = torch.cat([torch.full((r,), s) for s, r in enumerate(rows_each)])
    place = torch.cat([torch.arange(r) for r in rows_each])
    visible = torch.cat(
        [
            torch.arange(length - r + 1, length + 1)
            for length, r in zip(lengths, rows_each, strict=True)
        ]
    ).clamp(min=0)
    made = PagedRows(
        tables.cuda(), per_block, seq.int().cuda(), place.int().cuda(), visible.int().cuda(),
        all(r == 1 for r in rows_each),
    )  # fmt: skip
    return made, (sum(widths) + 1) * per_block


def case(shape, lengths, rows_each, per_block):
    heads, width = shape
    paged, num_keys = pages(lengths, rows_each, per_block)
    pool = RowPool(key_format(width, Numerics.QUANTISED), num_keys, torch.device("cuda"))
    store_rows(pool, torch.arange(num_keys, device="cuda"), normal(num_keys, width, seed=1))
    rows = sum(rows_each)
    q = round_fp4(normal(rows, heads, width, seed=2))
    weights = normal(rows, heads, seed=3) * (heads * width) ** -0.5
    return q, weights, pool, paged, -(-max(lengths) // 64) * 64


def compare(q, weights, pool, paged, columns, listed=None):
    found = score_entries(q, weights, pool, paged, columns, listed)
    exact = score_entries_ref(q.float(), weights.float(), pool, paged, columns, listed)
    limit = paged.visible if listed is None else listed.limit
    is_valid = torch.arange(columns, device="cuda") < limit.unsqueeze(1)
    error = (found.float() - exact).masked_fill(~is_valid, 0).abs()
    size = exact.masked_fill(~is_valid, 0).abs()
    assert (error <= size * 2**-8 + 1e-5).all(), error.max()


CASES = {
    "one row": ([300], [1]),
    "decode": ([1, 64, 129, 1000, 65], [1, 1, 1, 1, 1]),
    "one prompt": ([900], [77]),
    "chunks": ([5, 333, 64, 1], [5, 70, 3, 1]),
    "from the start": ([130], [131]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("per_block", [64, 128])
@pytest.mark.parametrize("shape", [TRUE, TINY], ids=["true", "tiny"])
def test_matches_the_unrounded_reference(name, per_block, shape):
    compare(*case(shape, *CASES[name], per_block))


@pytest.mark.parametrize("name", ["decode", "one prompt", "chunks"])
@pytest.mark.parametrize("shape", [TRUE, TINY], ids=["true", "tiny"])
def test_listed_blocks(name, shape):
    q, weights, pool, paged, _ = case(shape, *CASES[name], 128)
    rows, most = len(q), 8
    ids = torch.full((rows, most), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    for row, visible in enumerate(paged.visible.tolist()):
        newest = (visible - 1) // 8
        others = torch.randperm(max(newest, 0), generator=generator)[: most - 1]
        kept = torch.cat((others, torch.tensor([newest]))).sort().values
        ids[row, : len(kept)] = kept
    listed = Listed(ids.cuda(), 8, listed_columns(paged.visible, 8, most))
    compare(q, weights, pool, paged, most * 8, listed)


def test_a_row_does_not_depend_on_its_batch():
    q, weights, pool, paged, columns = case(TRUE, [900, 333], [77, 10], 64)
    whole = score_entries(q, weights, pool, paged, columns)
    for part in (slice(0, 1), slice(5, 9), slice(70, 87)):
        some = score_entries(q[part], weights[part], pool, paged.part(part), columns)
        for mine, theirs, visible in zip(some, whole[part], paged.visible[part], strict=True):
            assert_bits(mine[:visible], theirs[:visible])


def test_the_portable_decoding_agrees(monkeypatch):
    from mdi_exec.ops.kernels import index_scores as kernels

    q, weights, pool, paged, columns = case(TRUE, [300], [9], 64)
    found = score_entries(q, weights, pool, paged, columns)
    monkeypatch.setattr(kernels, "has_known_registers", lambda: False)
    portable = score_entries(q, weights, pool, paged, columns)
    visible = int(paged.visible.min())
    assert_bits(portable[:, :visible], found[:, :visible])
