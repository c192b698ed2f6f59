"""Matrix products: golden results, ragged shapes, and rows that do not see their neighbours."""

import pytest
import torch

from mdi_exec.ops.expert_gemm import expert_gemm
from mdi_exec.ops.gemm import (
    GEMM_MAX_SHARE_OFF,
    GEMM_MAX_ULP,
    ROW_TILE,
    QuantisedWeight,
    matmul,
    quantised_gemm,
)
from mdi_exec.ops.quantise import e2m1_codes, pack_e2m1, quantise_activation
from mdi_exec.ops.routing import group_rows


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(tensors, kind: str) -> QuantisedWeight:
    return QuantisedWeight(tensors[f"{kind}_weight"], tensors[f"{kind}_scale"])


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_weights_decode_exactly(golden, kind):
    tensors = golden("quant/gemm")
    assert torch.equal(weight(tensors, kind).dequantised(), tensors[f"{kind}_weight_f32"])


def test_a_weight_with_cut_tiles_decodes_exactly(golden):
    tensors = golden("quant/gemm")
    assert torch.equal(weight(tensors, "ragged").dequantised(), tensors["ragged_f32"])


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_gemm_matches_golden(golden, kind):
    tensors = golden("quant/gemm")
    found = quantised_gemm(quantise_activation(tensors["x"]), weight(tensors, kind))
    expected = tensors[f"{kind}_out"]
    off = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert off.max() <= GEMM_MAX_ULP
    assert (off > 0).float().mean() <= GEMM_MAX_SHARE_OFF


HUGE, SMALL = 2.0**12, (0.5, 2.0**-5)


def layered_weight(kind: str) -> QuantisedWeight:
    """Rows of 96 inputs: HUGE at input 0, -HUGE at 64, SMALL[row] throughout the block between.

    Row 0 sums that block to 16, row 1 to 1.
    """
    values = torch.zeros(32, 96)
    values[:2, 0], values[:2, 64] = HUGE, -HUGE
    values[:2, 32:64] = torch.tensor(SMALL).unsqueeze(1)
    per_block = torch.tensor([2.0**10, 1.0, 2.0**10]).expand(32, -1).clone()
    if kind == "fp8":
        scales = per_block[:1].to(torch.float8_e8m0fnu)
        codes = (values / per_block.repeat_interleave(32, dim=1)).to(torch.float8_e4m3fn)
    else:
        per_block[1, 1] = 2.0**-4
        scales = per_block.to(torch.float8_e8m0fnu)
        codes = pack_e2m1(e2m1_codes(values / per_block.repeat_interleave(32, dim=1)))
        codes = codes.view(torch.int8)
    made = QuantisedWeight(codes, scales)
    assert torch.equal(made.dequantised(), values)
    return made


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_products_are_summed_in_float32_by_blocks_of_32(kind):
    """2^24 hides a 1 in float32, and each of 32 halves, but not their sum.

    Neither one float32 sum nor a float64 one leaves 16 and 0.
    """
    x = torch.ones(3, 96, dtype=torch.bfloat16)
    x[:, 0], x[:, 64], x[:, 1:32], x[:, 65:] = HUGE, HUGE, 0, 0
    weight = layered_weight(kind)
    expected = torch.tensor([16.0, 0.0]).expand(3, -1)
    for given in (x, quantise_activation(x)):
        assert torch.equal(quantised_gemm(given, weight)[:, :2].float(), expected)
    stacked = QuantisedWeight(weight.codes.unsqueeze(0), weight.scales.unsqueeze(0))
    groups = group_rows(torch.zeros(3, 1, dtype=torch.int64), 1, 16)
    found = expert_gemm(quantise_activation(x), stacked, groups, 16)
    assert torch.equal(found[:, :2].float(), expected)


def test_unrounded_gemm_keeps_float32(golden):
    tensors = golden("quant/gemm")
    x = tensors["x"].to(torch.float32)
    found = quantised_gemm(x, weight(tensors, "fp8"))
    torch.testing.assert_close(found, x @ tensors["fp8_weight_f32"].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (64, 512), (96, 24), (5120, 130)])
def test_a_row_does_not_depend_on_its_batch(inputs, outputs):
    w, x = normal(outputs, inputs), normal(1, inputs, seed=1)
    alone = matmul(x, w)
    torch.testing.assert_close(alone, x @ w.T, rtol=1e-4, atol=1e-4)
    for rows in (2, ROW_TILE["cpu"], ROW_TILE["cpu"] + 1, 100):
        batch = normal(rows, inputs, seed=rows)
        for place in {0, rows // 2, rows - 1}:
            batch[place] = x
            assert torch.equal(matmul(batch, w)[place], alone[0]), f"row {place} of {rows}"


def test_expert_gemm_multiplies_each_row_by_its_expert(golden):
    single = weight(golden("quant/gemm"), "fp4")
    turned = [(t.view(torch.uint8), t.view(torch.uint8).flip(0), t.view(torch.uint8).roll(1, 0))
              for t in (single.codes, single.scales)]  # fmt: skip
    stacked = QuantisedWeight(
        torch.stack(turned[0]).view(torch.int8), torch.stack(turned[1]).view(torch.float8_e8m0fnu)
    )
    x = quantise_activation(normal(7, 128).to(torch.bfloat16))
    found = expert_gemm(
        x, stacked, group_rows(torch.tensor([0, 0, 0, 2, 2, 2, 2]).view(7, 1), 3, 16), 16
    )
    first = quantised_gemm(x.rows(slice(0, 3)), stacked.expert(0))
    last = quantised_gemm(x.rows(slice(3, 7)), stacked.expert(2))
    assert torch.equal(found, torch.cat((first, last)))
