"""The sparse-attention kernel against its reference."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops.rope import Rotation, rotate
from mdi_exec.ops.row_pool import RowPool, entry_format, store_rows, window_format
from mdi_exec.ops.sparse_attention import (
    ATTENTION_MAX_ABS,
    ATTENTION_MEAN_ABS,
    attend_staged,
    attend_staged_ref,
    can_stage,
    sparse_attention,
    sparse_attention_ref,
)
from tests.gpu.marks import gpu
from tests.gpu.strictness import poisoned
from tests.gpu.vectors import assert_bits, normal

pytestmark = gpu
MANY_HEADS = (80, 64, 96)
TRUE, TINY = (64, 512, 512), (8, 64, 32)  # heads, width, entries selected


def pool(row_format, values):
    made = RowPool(row_format, len(values), values.device)
    store_rows(made, torch.arange(len(values), device=values.device), values)
    return made


def chosen(rows, count, limit, filled, seed):
    """Distinct ascending numbers, `filled` of them per row, then -1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.rand(rows, limit, device="cuda", generator=generator).argsort(1)[:, :count]
    keep = torch.arange(count, device="cuda") < filled.unsqueeze(1)
    return order.masked_fill(~keep, -1).to(torch.int32).contiguous()


def inputs(rows, shape, *, window_filled=128, entries_filled=None, seed=0):
    heads, width, top_k = shape
    q = normal(rows, heads, width, seed=seed)
    window = pool(window_format(width, Numerics.QUANTISED), normal(rows + 128, width, seed=1))
    entries = pool(entry_format(width, Numerics.QUANTISED), normal(2048, width, seed=2))
    full = torch.full((rows,), window_filled, device="cuda")
    window_rows = chosen(rows, 128, rows + 128, full, seed)
    filled = torch.full((rows,), top_k if entries_filled is None else entries_filled, device="cuda")
    entry_rows = chosen(rows, top_k, 2048, filled, seed + 1)
    sink = normal(heads, seed=3).float()
    return q, window, window_rows, sink, entries, entry_rows


def check(q, window, window_rows, sink, entries, entry_rows):
    found = sparse_attention(q, window, window_rows, sink, entries=entries, entry_rows=entry_rows)
    wanted = sparse_attention_ref(
        q, window, window_rows, sink, entries=entries, entry_rows=entry_rows, rotation=None
    )
    error = (found.float() - wanted.float()).abs()
    assert torch.isfinite(found).all()
    assert error.max() < ATTENTION_MAX_ABS
    assert error.mean() < ATTENTION_MEAN_ABS
    return found


@pytest.mark.parametrize("shape", [TRUE, TINY], ids=["true", "tiny"])
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize(("window", "entries"), [(128, None), (1, 0), (77, 5), (128, 31)])
def test_matches_the_reference(shape, rows, window, entries):
    check(*inputs(rows, shape, window_filled=window, entries_filled=entries))


@pytest.mark.parametrize("shape", [TRUE, TINY], ids=["true", "tiny"])
def test_window_only(shape):
    q, window, window_rows, sink, _, _ = inputs(5, shape, window_filled=90)
    check(q, window, window_rows, sink, None, None)


@pytest.mark.parametrize("shape", [TRUE, TINY], ids=["true", "tiny"])
def test_no_key_at_all_gives_zero(shape):
    q, window, window_rows, sink, entries, entry_rows = inputs(3, shape)
    nothing, none = torch.full_like(window_rows, -1), torch.full_like(entry_rows, -1)
    found = sparse_attention(q, window, nothing, sink, entries=entries, entry_rows=none)
    assert torch.equal(found, torch.zeros_like(found))


def test_large_scores_and_scales():
    """Logits in the hundreds, entries at the largest scale: the softmax stays finite."""
    q, window, window_rows, sink, entries, entry_rows = inputs(4, TRUE)
    store_rows(entries, torch.arange(2048, device="cuda"), normal(2048, 512, seed=5) * 900)
    found = sparse_attention(q * 20, window, window_rows, sink, entries=entries,
                             entry_rows=entry_rows)  # fmt: skip
    wanted = sparse_attention_ref(q * 20, window, window_rows, sink, entries=entries,
                                  entry_rows=entry_rows, rotation=None)  # fmt: skip
    relative = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert torch.isfinite(found).all()
    assert relative < 0.01


def test_a_row_does_not_depend_on_its_batch():
    q, window, window_rows, sink, entries, entry_rows = inputs(40, TRUE)
    whole = sparse_attention(q, window, window_rows, sink, entries=entries, entry_rows=entry_rows)
    for row in (0, 17, 39):
        part = slice(row, row + 1)
        alone = sparse_attention(
            q[part].contiguous(), window, window_rows[part].contiguous(), sink, entries=entries,
            entry_rows=entry_rows[part].contiguous(),
        )  # fmt: skip
        assert_bits(alone, whole[part])


@pytest.mark.parametrize("shape", [TRUE, TINY, MANY_HEADS], ids=["true", "tiny", "many heads"])
def test_rotation_is_that_of_its_own_kernel(shape):
    q, window, window_rows, sink, entries, entry_rows = inputs(5, shape)
    angles = normal(5, shape[1] // 16, seed=9).float() * 3
    rotation, options = Rotation(angles.cos(), angles.sin()), {"entries": entries}
    found = sparse_attention(
        q, window, window_rows, sink, **options, entry_rows=entry_rows, rotation=rotation
    )
    turned = rotate(q.clone(), rotation)
    plain = sparse_attention(turned, window, window_rows, sink, **options, entry_rows=entry_rows)
    assert_bits(found, rotate(plain, rotation, inverse=True))


# ---- staged keys -------------------------------------------------------------------------------

staged = pytest.mark.skipif(
    not (
        torch.cuda.is_available() and can_stage(torch.empty(0, dtype=torch.bfloat16, device="cuda"))
    ),
    reason="staged keys have a kernel for sm_90a",
)


def staged_inputs(q, window, window_rows, sink, entries, entry_rows):
    """The same for `attend_staged`: entries first, the window's keys behind them."""
    numbers = [torch.arange(len(pool.codes), device="cuda") for pool in (entries, window)]
    keys = torch.cat((entries.gather(numbers[0]), window.gather(numbers[1])))
    rows = (window_rows + len(numbers[0])).masked_fill(window_rows < 0, -1)
    return q, keys, torch.cat((rows, entry_rows), dim=1).contiguous(), sink


@staged
@pytest.mark.parametrize("shape", [TRUE, TINY, MANY_HEADS], ids=["true", "tiny", "many heads"])
@pytest.mark.parametrize("rows", [1, 3, 130, 700])
@pytest.mark.parametrize(("window", "entries"), [(128, None), (1, 0), (77, 5), (0, 31), (0, 0)])
def test_staged_keys_give_the_same_bits(shape, rows, window, entries):
    given = inputs(rows, shape, window_filled=window, entries_filled=entries, seed=rows)
    q, pool, window_rows, sink, entry_pool, entry_rows = given
    with poisoned():
        found = attend_staged(*staged_inputs(*given))
        wanted = sparse_attention(
            q, pool, window_rows, sink, entries=entry_pool, entry_rows=entry_rows
        )
    assert_bits(found, wanted)


@staged
@pytest.mark.parametrize("shape", [TRUE, TINY], ids=["true", "tiny"])
def test_a_staged_window_gives_the_same_bits(shape):
    q, window, window_rows, sink, _, _ = inputs(300, shape, window_filled=90)
    keys = window.gather(torch.arange(len(window.codes), device="cuda"))
    found = attend_staged(q, keys, window_rows, sink)
    assert_bits(found, sparse_attention(q, window, window_rows, sink))


@staged
def test_staged_keys_match_the_reference_at_any_scale():
    q, window, window_rows, sink, entries, entry_rows = inputs(140, TRUE, window_filled=100)
    store_rows(entries, torch.arange(2048, device="cuda"), normal(2048, 512, seed=5) * 900)
    for factor in (1, 20):
        given = staged_inputs(q * factor, window, window_rows, sink, entries, entry_rows)
        found, wanted = attend_staged(*given).float(), attend_staged_ref(*given).float()
        assert torch.isfinite(found).all()
        assert (found - wanted).norm() / wanted.norm() < 0.01


@staged
def test_a_staged_row_does_not_depend_on_its_batch():
    q, keys, rows, sink = staged_inputs(*inputs(400, TRUE))
    whole = attend_staged(q, keys, rows, sink)
    for part in (slice(0, 1), slice(17, 30), slice(132, 265), slice(399, 400)):
        some = attend_staged(q[part].contiguous(), keys, rows[part].contiguous(), sink)
        assert_bits(some, whole[part])
    moved = torch.randperm(len(keys), device="cuda")
    elsewhere = torch.empty_like(keys)
    elsewhere[moved] = keys
    at = torch.where(rows < 0, -1, moved[rows.clamp(min=0)]).int()
    assert_bits(attend_staged(q, elsewhere, at, sink), whole)
