"""Hyper-connection kernels against their references: the passes bit for bit."""

import pytest
import torch

from mdi_exec.ops import hyper_connections as ops
from mdi_exec.ops.hyper_connections import HC_MAX_ABS, HcCoefficients
from tests.gpu.marks import gpu
from tests.gpu.vectors import ROW_COUNTS, assert_bits, assert_close_in_ulps, normal

kernels = pytest.importorskip("mdi_exec.ops.kernels.hyper_connections")
coefficients = pytest.importorskip("mdi_exec.ops.kernels.hc_coefficients")
norm = pytest.importorskip("mdi_exec.ops.kernels.norm")
pytestmark = gpu

N, EPS = 4, 1e-20
SPLIT = {"n": N, "iterations": 20, "eps": 1e-6}
WIDTHS = (5120, 128)
SHARE_OFF = 0.005  # as in test_norm.py


def f32(*shape, seed):
    return normal(*shape, seed=seed, dtype=torch.float32)


def drawn(rows, seed=3):
    return HcCoefficients(f32(rows, N, seed=seed), f32(rows, N, seed=seed + 1),
                          f32(rows, N, N, seed=seed + 2))  # fmt: skip


def gains(width):
    return (1 + 0.15 * normal(width, seed=1).float()).to(torch.bfloat16)


def at(row, found):
    return HcCoefficients(*(part[row : row + 1] for part in found))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_read_is_exact(width, rows):
    streams, read = normal(rows, N, width), drawn(rows).read
    assert_bits(kernels.hc_read(streams, read), ops.hc_read_ref(streams, read))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_write_is_exact(width, rows):
    streams, output, found = normal(rows, N, width), normal(rows, width, seed=2), drawn(rows)
    assert_bits(kernels.hc_write(streams, output, found), ops.hc_write_ref(streams, output, found))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_fused_read_and_norm_is_both_in_turn(width, rows):
    streams, read, weight = normal(rows, N, width), drawn(rows).read, gains(width)
    normed, rounded = kernels.hc_read_norm(streams, read, weight, EPS)
    parts = norm.rms_norm_round(kernels.hc_read(streams, read), weight, EPS)
    assert_bits(normed, parts[0])
    assert_bits(rounded, parts[1])
    expected, _ = ops.hc_read_norm_ref(streams, read, weight, EPS)
    assert_close_in_ulps(normed, expected, ulps=1, share=SHARE_OFF)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_fused_write_and_read_is_both_in_turn(width, rows):
    streams, output, found = normal(rows, N, width), normal(rows, width, seed=2), drawn(rows)
    written, *read = kernels.hc_write_read(streams, output, found, gains(width), EPS)
    assert_bits(written, kernels.hc_write(streams, output, found))
    parts = kernels.hc_read_norm(written, found.read, gains(width), EPS)
    for mine, theirs in zip(read, parts, strict=True):
        assert_bits(mine, theirs)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("scale", [0.3, 30.0])
def test_split_matches_the_reference(rows, scale):
    mixes, base = f32(rows, 24, seed=6), f32(24, seed=7)
    scales = scale * f32(3, seed=8).abs()
    found = coefficients.hc_split(mixes, base, scales, **SPLIT)
    for mine, theirs in zip(found, ops.hc_split_ref(mixes, base, scales, **SPLIT), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=HC_MAX_ABS)


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_finish_sums_normalises_and_splits(rows):
    parts, base, scale = f32(8, rows, 24, seed=6), f32(24, seed=7), f32(3, seed=8)
    squares = f32(8, rows, seed=9).square()
    sizes = {"width": 512, "norm_eps": EPS, **SPLIT}
    found = coefficients.hc_finish(parts, squares, base, scale, **sizes)
    expected = ops.hc_finish_ref(parts, squares, base, scale, **sizes)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=HC_MAX_ABS)


@pytest.mark.parametrize("row", [0, 77, 128])
def test_a_row_does_not_depend_on_its_batch(row):
    streams, output, c, weight = (
        normal(129, N, 128),
        normal(129, 128, seed=2),
        drawn(129),
        gains(128),
    )
    one = slice(row, row + 1)
    assert_bits(kernels.hc_write(streams[one], output[one], at(row, c)),
                kernels.hc_write(streams, output, c)[one])  # fmt: skip
    alone = kernels.hc_read_norm(streams[one], c.read[one], weight, EPS)
    for part, whole in zip(alone, kernels.hc_read_norm(streams, c.read, weight, EPS), strict=True):
        assert_bits(part, whole[one])
    parts, squares = f32(8, 129, 24, seed=6), f32(8, 129, seed=9).square()
    rest = (f32(24, seed=7), f32(3, seed=8))
    sizes = {"width": 512, "norm_eps": EPS, **SPLIT}
    alone = coefficients.hc_finish(parts[:, one], squares[:, one], *rest, **sizes)
    for part, whole in zip(alone, at(row, coefficients.hc_finish(parts, squares, *rest, **sizes)),
                           strict=True):  # fmt: skip
        assert_bits(part, whole)


def test_no_rows_and_expanded_streams():
    streams, c, weight = normal(3, N, 128), drawn(3), gains(128)
    assert kernels.hc_read(streams[:0], c.read[:0]).shape == (0, 128)
    assert kernels.hc_read_norm(streams[:0], c.read[:0], weight, EPS)[1].shape == (0, 128)
    nothing = HcCoefficients(*(part[:0] for part in c))
    assert kernels.hc_write(streams[:0], streams[:0, 0], nothing).shape == (0, N, 128)
    found = coefficients.hc_split(c.read[:0, :1].expand(0, 24), weight, weight, **SPLIT)
    assert found.mix.shape == (0, N, N)
    copies = streams[:, :1].expand(-1, N, -1)
    assert_bits(kernels.hc_read(copies, c.read), ops.hc_read_ref(copies, c.read))


def test_nothing_is_written_beyond_the_output():
    buffer = torch.full((5, N, 128), 7.0, dtype=torch.bfloat16, device=normal(1).device)
    streams, output, c = normal(3, N, 128), normal(3, 128, seed=2), drawn(3)
    kernel = kernels.compiled(kernels.hc_write_rows, 128, N)
    kernel(streams, output, c.write, c.mix.flatten(1), buffer[1:4])
    assert (buffer[[0, 4]] == 7.0).all()
    assert_bits(buffer[1:4], ops.hc_write_ref(streams, output, c))


def test_public_ops_choose_the_kernels():
    streams, c, weight = normal(3, N, 128), drawn(3), gains(128)
    rounded = ops.hc_read_norm(streams, c.read, weight, EPS)[1]
    assert_bits(rounded, kernels.hc_read_norm(streams, c.read, weight, EPS)[1])
    whole = streams.float()
    assert_bits(ops.hc_read(whole, c.read), ops.hc_read_ref(whole, c.read))
    args = (f32(3, 24, seed=6), f32(24, seed=7), f32(3, seed=8))
    assert_bits(ops.hc_split(*args, **SPLIT).mix, coefficients.hc_split(*args, **SPLIT).mix)
