"""RMS norm kernels against their references."""

import pytest
import torch

from mdi_exec.ops.rms_norm import rms_norm_ref, rms_norm_round
from tests.gpu.marks import gpu
from tests.gpu.vectors import ROW_COUNTS, assert_bits, assert_close_in_ulps, normal

kernels = pytest.importorskip("mdi_exec.ops.kernels.norm")
quantise = pytest.importorskip("mdi_exec.ops.kernels.quantise")
pytestmark = gpu

EPS = 1e-20
WIDTHS = (5120, 1280, 512, 128, 64, 32)
# The sum of squares is taken in another order: rstd moves in float32's last bits, a result
# near a halfway point of bfloat16 by one step.
SHARE_OFF = 0.005


def gains(width, seed=1):
    return (1 + 0.15 * normal(width, seed=seed).float()).to(torch.bfloat16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_norm_matches_the_reference(width, rows):
    x = normal(rows, width) * 3
    found = kernels.rms_norm(x, gains(width), EPS)
    assert_close_in_ulps(found, rms_norm_ref(x, gains(width), EPS), ulps=1, share=SHARE_OFF)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 129])
def test_the_rounded_norm_is_the_norm_rounded(width, rows):
    x, weight = normal(rows, width), gains(width)
    normed, rounded = kernels.rms_norm_round(x, weight, EPS)
    assert_bits(normed, kernels.rms_norm(x, weight, EPS))
    assert_bits(rounded, quantise.round_activation(normed))


@pytest.mark.parametrize("scale", [0.0, 2.0**-60, 2.0**50])
def test_extreme_rows(scale):
    """Zeros, squares far below eps, and squares not far from overflow."""
    x = normal(3, 512) * scale
    found = kernels.rms_norm(x, gains(512), EPS)
    assert_close_in_ulps(found, rms_norm_ref(x, gains(512), EPS), ulps=1, share=SHARE_OFF)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_does_not_depend_on_its_batch(width):
    x, weight = normal(129, width), gains(width)
    for row in (0, 1, 77, 128):
        alone = kernels.rms_norm_round(x[row : row + 1], weight, EPS)
        for part, whole in zip(alone, kernels.rms_norm_round(x, weight, EPS), strict=True):
            assert_bits(part, whole[row : row + 1])


def test_other_shapes_and_weights():
    x = normal(3, 5, 64)
    expected = rms_norm_ref(x, gains(64).float(), EPS)
    assert_close_in_ulps(kernels.rms_norm(x, gains(64).float(), EPS), expected, ulps=1, share=0.01)
    assert kernels.rms_norm(x[:0], gains(64), EPS).shape == (0, 5, 64)
    assert kernels.rms_norm_round(x[:0], gains(64), EPS)[1].shape == (0, 5, 64)


def test_nothing_is_written_beyond_the_output():
    buffers = torch.full((2, 5, 64), 7.0, dtype=torch.bfloat16, device=normal(1).device)
    kernel = kernels.compiled(kernels.rms_norm_round_rows, 64, EPS)
    kernel(normal(3, 64), gains(64), buffers[0, 1:4], buffers[1, 1:4])
    assert (buffers[:, [0, 4]] == 7.0).all()
    assert_bits(buffers[0, 1:4], kernels.rms_norm(normal(3, 64), gains(64), EPS))


def test_public_op_chooses_the_kernel_by_dtype():
    x = normal(3, 64)
    assert_bits(rms_norm_round(x, gains(64), EPS)[1],
                kernels.rms_norm_round(x, gains(64), EPS)[1])  # fmt: skip
    normed, same = rms_norm_round(x.float(), gains(64), EPS)
    assert normed is same
