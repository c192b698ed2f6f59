"""Storing and gathering cached rows against their references, bit for bit."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops import row_pool as ops
from mdi_exec.ops.row_pool import RowPool, entry_format, key_format, window_format
from tests.gpu.marks import gpu
from tests.gpu.vectors import DEVICE, ROW_COUNTS, assert_bits, every_magnitude, normal

kernels = pytest.importorskip("mdi_exec.ops.kernels.row_pool")
pytestmark = gpu

CASES = [(window_format, 512), (window_format, 64), (entry_format, 512), (entry_format, 64),
         (key_format, 128), (key_format, 32)]  # fmt: skip


def pools(make, width, num_rows):
    """Return two equal pools full of random bytes."""
    found, expected = (
        RowPool(make(width, Numerics.QUANTISED), num_rows, torch.device(DEVICE)) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(4)
    for name in ("codes", "scales"):
        shape = getattr(found, name).shape
        noise = torch.randint(1, 120, shape, generator=generator, dtype=torch.uint8).to(DEVICE)
        setattr(found, name, noise)
        setattr(expected, name, noise.clone())
    return found, expected


def shuffled(rows, num_rows):
    """Return distinct row numbers from 1 on, every third of them -1."""
    order = torch.randperm(num_rows - 1, generator=torch.Generator().manual_seed(rows))[:rows] + 1
    order[2::3] = -1
    return order.to(DEVICE)


@pytest.mark.parametrize(("make", "width"), CASES)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_storing_is_exact_and_skips_missing_rows(make, width, rows):
    found, expected = pools(make, width, 1100)
    index, values = shuffled(rows, 1100), normal(rows, width) * 3
    before = found.codes[0].clone(), found.scales[0].clone()
    kernels.store_rows(found, index, values)
    ops.store_rows_ref(expected, index, values)
    assert_bits(found.codes[1:], expected.codes[1:])
    assert_bits(found.scales[1:], expected.scales[1:])
    assert_bits(found.codes[0], before[0])
    assert_bits(found.scales[0], before[1])


@pytest.mark.parametrize(("make", "width"), CASES)
def test_storing_every_magnitude_is_exact(make, width):
    values = every_magnitude(width)
    found, expected = pools(make, width, len(values) + 1)
    index = torch.arange(1, len(values) + 1, device=DEVICE)
    kernels.store_rows(found, index, values)
    ops.store_rows_ref(expected, index, values)
    assert_bits(found.codes, expected.codes)
    assert_bits(found.scales, expected.scales)
    assert_bits(kernels.gather_rows(found, index), ops.gather_rows_ref(found, index))


@pytest.mark.parametrize(("make", "width"), CASES)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 7), (129, 33)])
def test_gathering_is_exact(make, width, shape):
    pool, _ = pools(make, width, 50)
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(-1, 50, shape, generator=generator).to(DEVICE)
    assert_bits(kernels.gather_rows(pool, index), ops.gather_rows_ref(pool, index))


@pytest.mark.parametrize(("make", "width"), CASES)
def test_every_code_decodes(make, width):
    """All bytes but the NaN codes, at several scales."""
    pool, _ = pools(make, width, 256)
    pool.codes = (torch.arange(256, device=DEVICE).unsqueeze(1) + torch.arange(
        pool.codes.shape[1], device=DEVICE)).to(torch.uint8)  # fmt: skip
    if pool.format.code_dtype == torch.float8_e4m3fn:
        pool.codes[(pool.codes & 0x7F) == 0x7F] = 0x80
    index = torch.arange(256, device=DEVICE)
    assert_bits(kernels.gather_rows(pool, index), ops.gather_rows_ref(pool, index))


@pytest.mark.parametrize(("make", "width"), CASES)
def test_a_pool_of_given_rows(make, width):
    pool, _ = pools(make, width, 50)
    values = normal(9, width)
    kernels.store_rows(pool, torch.arange(20, 29, device=DEVICE), values)
    view = RowPool.of(pool.format.quantise(values), pool.format)
    index = torch.tensor([4, -1, 0, 8], device=DEVICE)
    expected = kernels.gather_rows(pool, torch.where(index < 0, -1, index + 20))
    assert_bits(kernels.gather_rows(view, index), expected)


def test_public_ops_choose_the_kernels():
    found, expected = pools(window_format, 64, 20)
    index, values = torch.tensor([5, -1, 7], device=DEVICE), normal(3, 64)
    ops.store_rows(found, index, values)
    kernels.store_rows(expected, index, values)
    assert_bits(found.codes, expected.codes)
    assert_bits(found.gather(index), kernels.gather_rows(found, index))
    plain = RowPool(window_format(64, Numerics.FLOAT32), 20, torch.device(DEVICE))
    ops.store_rows(plain, index, values.float())
    assert_bits(plain.gather(index[:1]), values[:1].float())
