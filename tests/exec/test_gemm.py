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
from mdi_exec.ops.quantise import quantise_activation
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
