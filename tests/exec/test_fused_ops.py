"""Fused ops do what their parts do; the CPU runs their references."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops.hyper_connections import hc_finish, hc_read, hc_read_norm, hc_split
from mdi_exec.ops.quantise import (
    Quantised,
    dequantise,
    quantise_activation,
    quantise_fp4,
    round_fp4,
)
from mdi_exec.ops.rms_norm import rms_norm, rms_norm_round
from mdi_exec.ops.row_pool import RowPool, entry_format, key_format, store_rows, window_format

EPS = 1e-20


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Quantised | torch.Tensor, expected: Quantised | torch.Tensor):
    assert isinstance(found, Quantised)
    assert isinstance(expected, Quantised)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_norm_with_its_rounding_is_both_in_turn():
    x, weight = normal(3, 64).to(torch.bfloat16), normal(64, seed=1).to(torch.bfloat16)
    normed, rounded = rms_norm_round(x, weight, EPS)
    assert torch.equal(normed, rms_norm(x, weight, EPS))
    assert_same(rounded, quantise_activation(normed))


def test_a_read_with_its_norm_is_all_three_in_turn():
    streams, read = normal(3, 4, 64).to(torch.bfloat16), normal(3, 4, seed=2)
    weight = normal(64, seed=1).to(torch.bfloat16)
    normed, rounded = hc_read_norm(streams, read, weight, EPS)
    assert torch.equal(normed, rms_norm(hc_read(streams, read), weight, EPS))
    assert_same(rounded, quantise_activation(normed))


def test_unrounded_numerics_get_the_norm_twice():
    weight = normal(64, seed=1)
    normed, same = rms_norm_round(normal(3, 64), weight, EPS)
    assert normed is same
    normed, same = hc_read_norm(normal(3, 4, 64), normal(3, 4, seed=2), weight, EPS)
    assert normed is same


def test_finishing_a_projection_in_parts_is_splitting_the_whole():
    sizes = {"n": 4, "iterations": 20, "eps": 1e-6}
    parts, squares = normal(8, 5, 24), normal(8, 5, seed=1).square()
    base, scale = normal(24, seed=2), normal(3, seed=3)
    found = hc_finish(parts, squares, base, scale, width=512, norm_eps=EPS, **sizes)
    mixes = parts.sum(dim=0) * torch.rsqrt(squares.sum(dim=0) / 512 + EPS).unsqueeze(1)
    for mine, whole in zip(found, hc_split(mixes, base, scale, **sizes), strict=True):
        torch.testing.assert_close(mine, whole)


def test_rounding_to_fp4_is_quantising_and_back():
    x = normal(3, 2, 64).to(torch.bfloat16)
    assert torch.equal(round_fp4(x), dequantise(quantise_fp4(x), torch.bfloat16))


@pytest.mark.parametrize("make", [window_format, entry_format, key_format])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_storing_rows_is_encoding_and_writing(make, numerics):
    stored, written = (RowPool(make(64, numerics), 10, torch.device("cpu")) for _ in range(2))
    values = normal(3, 64).to(numerics.dtype)
    store_rows(stored, torch.tensor([7, -1, 3]), values)
    written.write(torch.tensor([7, 3]), written.encode(values[[0, 2]]))
    assert torch.equal(stored.codes[1:], written.codes[1:])
    assert torch.equal(stored.scales[1:], written.scales[1:])


@pytest.mark.parametrize("make", [window_format, entry_format, key_format])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_given_rows_make_a_pool(make, numerics):
    row_format = make(64, numerics)
    values = normal(3, 64).to(numerics.dtype)
    pool = RowPool(row_format, 10, torch.device("cpu"))
    rows = pool.encode(values)
    view = RowPool.of(rows, row_format)
    assert view.codes.data_ptr() == rows.codes.data_ptr()
    index = torch.tensor([2, -1, 0])
    store_rows(pool, torch.tensor([4, 5, 6]), values)
    assert torch.equal(view.gather(index), pool.gather(torch.tensor([6, -1, 4])))
