"""Folding of rows, bit for bit, and products of folded operands against exact ones."""

from itertools import pairwise

import pytest
import torch

from mdi_exec.ops.expert_gemm import expert_gemm
from mdi_exec.ops.folding import fold_rows_ref, fold_weight
from mdi_exec.ops.kernels import folding as kernels
from mdi_exec.ops.quantise import dequantise, quantise_activation_ref
from mdi_exec.ops.routing import group_rows
from tests.gpu.marks import gpu
from tests.gpu.test_gemm import ROUTINGS, fp4_weights
from tests.gpu.vectors import ROW_COUNTS, assert_bits, normal

pytestmark = gpu
# The tensor core's own sums keep 14 bits over 128 inputs: some results are one bfloat16 step off.
SHARE_OFF = 0.08


def rounded(*shape, seed=0, channels=0.0):
    """Rounded bfloat16 values; `channels` spreads the columns' magnitudes, in powers of e."""
    spread = torch.exp(channels * normal(shape[-1], seed=9).float())
    values = (normal(*shape, seed=seed).float() * spread).to(torch.bfloat16)
    return dequantise(quantise_activation_ref(values), torch.bfloat16)


@pytest.mark.parametrize("width", [5120, 2304, 128, 64])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_folded_rows_are_exact(width, rows):
    for channels in (0.0, 3.0):
        x = rounded(rows, width, channels=channels)
        x[rows // 2] = 0
        far, expected_far = (torch.zeros(1, dtype=torch.int32, device=x.device) for _ in range(2))
        found, expected = kernels.fold_rows(x, far), fold_rows_ref(x, expected_far)
        for mine, theirs in zip(found, expected, strict=True):
            assert_bits(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert far.item() == expected_far.item()


def exact_product(x, weight, groups):
    """The float64 product of unfolded operands."""
    out = torch.empty(x.shape[0], weight.out_width, dtype=torch.float64, device=x.device)
    for expert, (start, end) in enumerate(pairwise(groups.offsets.tolist())):
        values = weight.expert(expert).dequantised().to(torch.float64)
        out[start:end] = x[start:end].to(torch.float64) @ values.t()
    return out


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 129, 1000])
@pytest.mark.parametrize(("n", "k"), [(256, 5120), (320, 2304), (128, 64), (128, 128)])
def test_folded_expert_product(name, tokens, n, k):
    torch.manual_seed(tokens)
    chosen = ROUTINGS[name](tokens, 16).to("cuda", torch.int32).contiguous()
    weight, x = fp4_weights(16, n, k), rounded(chosen.numel(), k, seed=tokens)
    groups = group_rows(chosen, 16, 128)
    found = expert_gemm(kernels.fold_rows(x), fold_weight(weight).packed(), groups, 128)
    exact = exact_product(x, weight, groups)
    assert torch.isfinite(found).all()
    error = (found.to(torch.float64) - exact).norm() / exact.norm()
    rounding = (exact.to(torch.bfloat16).to(torch.float64) - exact).norm() / exact.norm()
    assert error <= 1.05 * rounding + 1e-5
    assert (found != exact.to(torch.bfloat16)).float().mean() <= SHARE_OFF


def test_folded_rows_do_not_depend_on_the_tile_or_the_batch():
    chosen = torch.rand(500, 16, device="cuda").argsort(1)[:, :6].sort(1).values.to(torch.int32)
    chosen, weight = chosen.contiguous(), fold_weight(fp4_weights(16, 256, 5120)).packed()
    x = kernels.fold_rows(rounded(3000, 5120))
    wanted = expert_gemm(x, weight, group_rows(chosen, 16, 128), 128)
    for tile in (16, 48, 64):
        assert_bits(expert_gemm(x, weight, group_rows(chosen, 16, tile), tile), wanted)
    sorted_experts = chosen.flatten().sort().values
    for row in (0, 1501, 2999):
        alone = group_rows(sorted_experts[row].view(1, 1), 16, 128)
        one = x.rows(torch.tensor([row], device="cuda"))
        assert_bits(expert_gemm(one, weight, alone, 128), wanted[row, None])
