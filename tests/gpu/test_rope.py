"""The in-place rotation against its reference, bit for bit."""

import pytest
import torch

from mdi_exec.ops.quantise import round_fp4_ref
from mdi_exec.ops.rope import Rotation, rotate, rotate_ref
from tests.gpu.marks import gpu
from tests.gpu.vectors import ROW_COUNTS, assert_bits, normal

kernels = pytest.importorskip("mdi_exec.ops.kernels.rope")
pytestmark = gpu

# (heads, width, rotated): queries, index queries and keys at the real dims, then the tiny ones.
SHAPES = [(64, 512, 64), (32, 128, 64), (None, 512, 64), (None, 128, 64), (8, 64, 16),
          (16, 32, 16), (None, 64, 16), (None, 32, 16)]  # fmt: skip


def case(rows, heads, width, rotated):
    angles = normal(rows, rotated // 2, seed=2, dtype=torch.float32) * 100
    shape = (rows, width) if heads is None else (rows, heads, width)
    return normal(*shape), Rotation(angles.cos(), angles.sin())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_is_exact(shape, inverse):
    for rows in ROW_COUNTS if shape[0] is None else (1, 3, 129):
        x, rotation = case(rows, *shape)
        expected = rotate_ref(x, rotation, inverse)
        found = kernels.rotate(x, rotation, inverse)
        assert found.data_ptr() == x.data_ptr(), "the rotation is in place"
        assert_bits(found, expected)


def test_a_row_does_not_depend_on_its_batch():
    x, rotation = case(129, 8, 64, 16)
    alone = kernels.rotate(x[77:78].clone(), Rotation(*(part[77:78] for part in rotation)), False)
    assert_bits(alone, kernels.rotate(x, rotation, False)[77:78])


def test_no_rows_and_views():
    x, rotation = case(4, 8, 64, 16)
    assert kernels.rotate(x[:0], Rotation(*(part[:0] for part in rotation)), False).shape[0] == 0
    view = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bits(kernels.rotate(view, rotation, False), rotate_ref(x, rotation, False))


def test_public_op_chooses_the_kernel_by_dtype():
    x, rotation = case(3, 8, 64, 16)
    whole = x.float()
    assert_bits(rotate(whole, rotation), rotate_ref(x.float(), rotation, False))
    assert_bits(whole, x.float())
    assert rotate(x, rotation).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", [(32, 128, 64), (16, 32, 16)])
@pytest.mark.parametrize("rows", [1, 3, 129])
def test_rotated_and_rounded_is_both_in_turn(shape, rows):
    x, rotation = case(rows, *shape)
    found = kernels.rotate_round(x, rotation)
    assert_bits(found, round_fp4_ref(rotate_ref(x, rotation, inverse=False)))
