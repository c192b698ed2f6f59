"""Rounding kernels against their references, bit for bit."""

import pytest
import torch

from mdi_exec.ops import quantise as ops
from mdi_exec.ops.quantise import Quantised, dequantise
from tests.gpu.marks import gpu
from tests.gpu.vectors import ROW_COUNTS, assert_bits, every_magnitude, normal, ties

kernels = pytest.importorskip("mdi_exec.ops.kernels.quantise")
pytestmark = gpu

CODES = {
    "fp8": (kernels.quantise_fp8, ops.quantise_fp8_ref, 32),
    "fp4": (kernels.quantise_fp4, ops.quantise_fp4_ref, 32),
    "fp4_e4m3": (kernels.quantise_fp4_e4m3, ops.quantise_fp4_e4m3_ref, 16),
}


def fp8_values(x):
    return dequantise(ops.quantise_fp8_ref(x), torch.bfloat16)


VALUES = {"fp8": (kernels.round_activation, fp8_values),
          "fp4": (kernels.round_fp4, ops.round_fp4_ref)}  # fmt: skip


def assert_same(found: Quantised, expected: Quantised):
    assert_bits(found.scales, expected.scales)
    assert_bits(found.codes, expected.codes)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("make", [every_magnitude, ties])
def test_codes_and_scales_are_exact(name, make):
    kernel, reference, group = CODES[name]
    assert_same(kernel(make(group)), reference(make(group)))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("make", [every_magnitude, ties])
def test_rounded_values_are_exact(name, make):
    kernel, reference = VALUES[name]
    assert_bits(kernel(make(32)), reference(make(32)))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 5120), (127, 2304), (5, 8, 64)])
def test_codes_of_any_shape(name, shape):
    kernel, reference, _ = CODES[name]
    assert_same(kernel(normal(*shape)), reference(normal(*shape)))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("rows", [0, *ROW_COUNTS])
def test_values_of_any_number_of_rows(name, rows):
    kernel, reference = VALUES[name]
    x = normal(rows, 16, 32)
    assert_bits(kernel(x), reference(x))


def test_a_view_is_rounded_like_its_copy():
    x = normal(64, 128).t()
    assert_bits(kernels.round_activation(x), fp8_values(x))


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_nothing_is_written_beyond_the_output(form):
    buffer = torch.full((67, 32), 7.0, dtype=torch.bfloat16, device=normal(1).device)
    kernels.compiled(kernels.round_groups, form)(normal(65, 32), buffer[1:66])
    assert (buffer[[0, 66]] == 7.0).all()
    assert_bits(buffer[1:66], VALUES[form][1](normal(65, 32)))


def test_public_ops_choose_the_kernel_by_dtype():
    x = normal(3, 64)
    rounded = ops.quantise_activation(x)
    assert isinstance(rounded, torch.Tensor)
    assert_bits(rounded, fp8_values(x))
    assert_bits(ops.round_fp4(x), ops.round_fp4_ref(x))
    assert ops.quantise_activation(x.float()).dtype == torch.float32


@pytest.mark.parametrize("kernel", [kernels.quantise_fp8, kernels.round_activation])
def test_a_width_of_broken_groups_is_an_error(kernel):
    with pytest.raises(RuntimeError):
        kernel(normal(2, 48))
