"""Normalising, rotating, rounding and storing in one pass: the bits of doing one after another."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.row_pool import RowPool, entry_format, key_format, window_format
from tests.gpu import vectors
from tests.gpu.marks import gpu
from tests.gpu.vectors import assert_bits, normal

kernels = pytest.importorskip("mdi_exec.ops.kernels.norm_store")
norm = pytest.importorskip("mdi_exec.ops.kernels.norm")
rope = pytest.importorskip("mdi_exec.ops.kernels.rope")
row_pool = pytest.importorskip("mdi_exec.ops.kernels.row_pool")
pytestmark = gpu

EPS = 1e-20
CASES = [(window_format, 512, 64), (entry_format, 512, 64), (key_format, 128, 64),
         (window_format, 64, 16), (entry_format, 64, 16), (key_format, 32, 16)]  # fmt: skip


def product_of(parts, rows, width):
    values = normal(parts, rows, width, dtype=torch.float32, seed=4)
    return Partial(values * 3, torch.bfloat16)


def gains(width):
    return (1 + 0.15 * normal(width, seed=1).float()).to(torch.bfloat16)


def pool_of(make, width, rows):
    pool = RowPool(make(width, Numerics.QUANTISED), rows, torch.device(vectors.DEVICE))
    pool.codes.fill_(7)
    pool.scales.fill_(7)
    return pool


@pytest.mark.parametrize(("make", "width", "rotated"), CASES)
@pytest.mark.parametrize("rows", [1, 3, 129])
@pytest.mark.parametrize("parts", [1, 8])
def test_is_all_steps_in_turn(make, width, rotated, rows, parts):
    product, weight = product_of(parts, rows, width), gains(width)
    angles = normal(rows, rotated // 2, dtype=torch.float32) * 3
    rotation = Rotation(angles.cos(), angles.sin())
    index = torch.randperm(rows + 2, generator=torch.Generator().manual_seed(2))[:rows]
    index = index.to(angles.device)
    index[rows // 2] = -1 if rows > 1 else 0
    found, expected = pool_of(make, width, rows + 2), pool_of(make, width, rows + 2)
    normed = kernels.norm_store(product, weight, EPS, rotation, found, index)
    assert_bits(normed, norm.rms_norm(product.rounded(), weight, EPS))
    row_pool.store_rows(expected, index, rope.rotate(normed.clone(), rotation, False))
    assert_bits(found.codes, expected.codes)
    assert_bits(found.scales, expected.scales)


@pytest.mark.parametrize("width", [1280, 64])
@pytest.mark.parametrize("rows", [1, 3, 129])
@pytest.mark.parametrize("parts", [1, 8])
def test_the_rounded_norm_of_a_sum(width, rows, parts):
    product, weight = product_of(parts, rows, width), gains(width)
    found = norm.rms_norm_round_sum(product, weight, EPS)
    assert_bits(found, norm.rms_norm_round(product.rounded(), weight, EPS)[1])


def test_no_rows():
    rotation, pool = Rotation(*[normal(0, 32).float()] * 2), pool_of(window_format, 512, 3)
    index = torch.empty(0, dtype=torch.int64, device=vectors.DEVICE)
    assert kernels.norm_store(
        product_of(1, 0, 512), gains(512), EPS, rotation, pool, index
    ).shape == (0, 512)
