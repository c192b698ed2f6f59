"""Folded FP8: what a row's one scale keeps, what is counted, and products of folded operands."""

import pytest
import torch

from mdi_exec.ops.expert_gemm import expert_gemm
from mdi_exec.ops.folding import FAR_OCTAVES, LARGEST_LIFT, fold_rows, fold_weight
from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.quantise import Quantised, dequantise, quantise_activation
from mdi_exec.ops.routing import group_rows


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(*shape: int, seed: int = 0) -> Quantised:
    found = quantise_activation(normal(*shape, seed=seed).to(torch.bfloat16))
    assert isinstance(found, Quantised)
    return found


def experts(count: int, n: int, k: int, spread: int) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        120 - spread, 121, (count, n, k // 32), dtype=torch.uint8, generator=generator
    )
    scales[..., 0] = 120
    return QuantisedWeight(codes.view(torch.int8), scales.view(torch.float8_e8m0fnu))


def test_rows_keep_all_but_the_smallest_values():
    x = rounded(200, 1024)
    values, folded = dequantise(x), fold_rows(x)
    found = dequantise(folded)
    assert (folded.codes.dtype, folded.scales.shape) == (torch.float8_e4m3fn, (200, 1))
    largest = values.abs().amax(dim=1, keepdim=True)
    changed = found != values
    assert changed.float().mean() < 1e-3
    assert (values.abs()[changed] < (largest.expand_as(values) * 2.0**-13)[changed]).all()
    # Half of E4M3's smallest step, 2^-10, at a scale that makes the largest value more than 224.
    assert ((found - values).abs() <= largest * 2.0**-17).all()
    assert torch.equal(fold_rows(values.to(torch.bfloat16)).codes.float(), folded.codes.float())


@pytest.mark.parametrize("octaves", [FAR_OCTAVES - 1, FAR_OCTAVES + 2])
def test_rows_with_far_groups_are_counted(octaves):
    values = torch.ones(5, 128)
    values[1:4, 32:64] = 2.0**-octaves
    values[2, 96:] = 0  # nothing is lost of zeros
    far = torch.zeros(1, dtype=torch.int32)
    fold_rows(quantise_activation(values.to(torch.bfloat16)), far)
    assert far.item() == (3 if octaves > FAR_OCTAVES else 0)
    fold_rows(quantise_activation(values.to(torch.bfloat16)), far)
    assert far.item() == (6 if octaves > FAR_OCTAVES else 0)


def test_weights_fold_exactly_as_far_as_codes_reach():
    weight = experts(2, 48, 256, spread=LARGEST_LIFT)
    assert torch.equal(fold_weight(weight).dequantised(), weight.dequantised())
    wide = experts(2, 48, 256, spread=LARGEST_LIFT + 4)
    values, found = wide.dequantised(), fold_weight(wide).dequantised()
    is_far = (wide.scales.view(torch.uint8) < 120 - LARGEST_LIFT).repeat_interleave(32, dim=-1)
    assert is_far.any()
    assert torch.equal(found, values.masked_fill(is_far, 0))


@pytest.mark.parametrize("scale", [0, 3, LARGEST_LIFT, 254])
def test_weights_of_extreme_scales_fold_exactly(scale):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 2, 128)
    scales = torch.full((1, 2, 8), scale, dtype=torch.uint8)
    weight = QuantisedWeight(codes.view(torch.int8), scales.view(torch.float8_e8m0fnu))
    assert torch.equal(fold_weight(weight).dequantised(), weight.dequantised())


@pytest.mark.parametrize("k", [64, 128, 320])
def test_packing_is_undone_exactly(k):
    weight = experts(3, 32, k, spread=9)
    folded = fold_weight(weight)
    for plain in (weight, folded):
        packed = plain.packed()
        assert packed.is_packed
        assert packed.out_width == plain.out_width == 32
        values = packed.dequantised()
        assert torch.equal(values[..., :k], plain.dequantised())
        assert not values[..., k:].any()
        assert torch.equal(packed.expert(1).dequantised(), values[1])


def test_products_of_folded_operands():
    weight, x = experts(3, 40, 256, spread=3), rounded(7, 256)
    groups = group_rows(torch.tensor([0, 0, 0, 2, 2, 2, 2]).view(7, 1), 3, 16)
    found = expert_gemm(fold_rows(x), fold_weight(weight), groups, 16)
    exact = expert_gemm(x, weight, groups, 16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact, rtol=2**-7, atol=1e-4 * float(exact.float().std()))
    for row in range(7):
        alone = group_rows(torch.tensor([[0, 2][row > 2]]).view(1, 1), 3, 16)
        one = expert_gemm(fold_rows(x.rows(slice(row, row + 1))), fold_weight(weight), alone, 16)
        assert torch.equal(one[0], found[row])
