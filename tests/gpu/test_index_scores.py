"""The index-score kernel against its reference: paged keys, several sequences, listed blocks."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops.index_scores import (
    DOT_ERROR,
    Listed,
    PagedRows,
    score_entries,
    score_entries_ref,
)
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


def spread(x, octaves):
    """x with groups of 32 that lie up to so many octaves apart."""
    groups = x.unflatten(-1, (-1, 32))
    generator = torch.Generator().manual_seed(4)
    shift = torch.randint(octaves + 1, groups.shape[:-1], generator=generator).cuda()
    return (groups * torch.exp2(-shift.float()).to(x.dtype).unsqueeze(-1)).flatten(-2)


def case(shape, lengths, rows_each, per_block, octaves=0):
    heads, width = shape
    paged, num_keys = pages(lengths, rows_each, per_block)
    pool = RowPool(key_format(width, Numerics.QUANTISED), num_keys, torch.device("cuda"))
    values = spread(normal(num_keys, width, seed=1), octaves)
    store_rows(pool, torch.arange(num_keys, device="cuda"), values)
    rows = sum(rows_each)
    q = round_fp4(spread(normal(rows, heads, width, seed=2), octaves))
    weights = normal(rows, heads, seed=3) * (heads * width) ** -0.5
    return q, weights, pool, paged, -(-max(lengths) // 64) * 64


def compare(q, weights, pool, paged, columns, listed=None, is_exact=True):
    """Compare scores with the reference's, of float32 sums over heads.

    Unless they `is_exact`, dot products may be off a little, and then round to another number.
    """
    found = score_entries(q, weights, pool, paged, columns, listed)
    wanted = score_entries_ref(q, weights.float(), pool, paged, columns, listed)
    limit = paged.visible if listed is None else listed.limit
    is_valid = torch.arange(columns, device="cuda") < limit.unsqueeze(1)
    allowed = wanted.abs() * 2**-8 + 1e-6
    if not is_exact:
        all_heads = score_entries_ref(q, weights.float().abs(), pool, paged, columns, listed)
        allowed += all_heads * 2**-8 + slack(q, weights, pool)
    error = (found.float() - wanted).abs()
    assert (error <= allowed)[is_valid].all(), error[is_valid].max()


def slack(q, weights, pool):
    """What dot products may be off by, all in all: [T, 1]."""
    keys = pool.gather(torch.arange(len(pool.codes), device="cuda")).float()
    by_head = weights.float().abs() * q.float().norm(dim=2)
    return by_head.sum(dim=1, keepdim=True) * keys.norm(dim=1).max() * DOT_ERROR


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
def test_matches_the_reference(name, per_block, shape):
    compare(*case(shape, *CASES[name], per_block))


@pytest.mark.parametrize("octaves", [1, 3, 7, 14, 40])
def test_groups_of_very_different_scales(octaves):
    compare(*case(TRUE, *CASES["chunks"], 64, octaves), is_exact=False)


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-100, 2.0**60])
def test_vectors_of_extreme_size(magnitude):
    q, weights, pool, paged, columns = case(TRUE, [200], [5], 64)
    q[1::2] *= magnitude
    weights[1::2] *= 2.0**-40
    compare(q, weights, pool, paged, columns)


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


@pytest.mark.parametrize("octaves", [0, 9])
def test_a_row_does_not_depend_on_its_batch(octaves):
    q, weights, pool, paged, columns = case(TRUE, [900, 333], [77, 10], 64, octaves)
    whole = score_entries(q, weights, pool, paged, columns)
    for part in (slice(0, 1), slice(5, 9), slice(70, 87)):
        some = score_entries(q[part], weights[part], pool, paged.part(part), columns)
        for mine, theirs, visible in zip(some, whole[part], paged.visible[part], strict=True):
            assert_bits(mine[:visible], theirs[:visible])


def test_a_score_is_the_same_alone_and_listed():
    q, weights, pool, paged, columns = case(TRUE, [600], [50], 64, octaves=9)
    whole = score_entries(q, weights, pool, paged, columns)
    alone = [
        score_entries(q[row : row + 1], weights[row : row + 1], pool,
                      paged.part(slice(row, row + 1))._replace(one_per_seq=True), columns)
        for row in range(50)
    ]  # fmt: skip
    ids = torch.arange(columns // 8, dtype=torch.int32, device="cuda").expand(50, -1).contiguous()
    every = Listed(ids, 8, listed_columns(paged.visible, 8, ids.shape[1]))
    listed = score_entries(q, weights, pool, paged, columns, every)
    for row, visible in enumerate(paged.visible.tolist()):
        assert_bits(alone[row][0, :visible], whole[row, :visible])
        assert_bits(listed[row, :visible], whole[row, :visible])


def test_the_portable_kernel_agrees(monkeypatch):
    from mdi_exec.ops.kernels import index_scores as kernels

    monkeypatch.setattr(kernels, "has_known_registers", lambda: False)
    for shape in (TRUE, TINY):
        compare(*case(shape, *CASES["chunks"], 64))
