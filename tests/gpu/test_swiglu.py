"""The fused activation against its reference."""

import pytest
import torch

from mdi_exec.ops.quantise import dequantise
from mdi_exec.ops.swiglu import RowWeights, swiglu_quantise, swiglu_quantise_ref
from tests.gpu.marks import gpu
from tests.gpu.vectors import ROW_COUNTS, assert_bits, assert_one_code_apart, normal

kernels = pytest.importorskip("mdi_exec.ops.kernels.swiglu")
pytestmark = gpu

SIZES = [(2304, 10.0), (64, 2.5)]
# The exponential may differ from torch's in float32's last bit, and then a code, rarely.
SHARE_OFF = 1e-3


def expected(gate, up, limit, row_weights):
    return dequantise(swiglu_quantise_ref(gate, up, limit, row_weights), torch.bfloat16)


def weights_of(rows):
    values = normal(2 * rows, seed=5, dtype=torch.float32).abs()
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(6))[:rows]
    return RowWeights(values, order.to(values.device, torch.int32))


@pytest.mark.parametrize(("inner", "limit"), SIZES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_halves_match_the_reference(inner, limit, weighted, rows):
    both = normal(rows, 2 * inner) * 5
    weights = weights_of(rows) if weighted else None
    found = kernels.swiglu_halves(both, limit, weights)
    gate, up = both[:, :inner], both[:, inner:]
    assert_one_code_apart(found, expected(gate, up, limit, weights), share=SHARE_OFF)


@pytest.mark.parametrize(("inner", "limit"), SIZES)
@pytest.mark.parametrize("weighted", [True, False])
def test_views_and_separate_tensors_give_the_same_bits(inner, limit, weighted):
    both = normal(129, 2 * inner) * 5
    weights = weights_of(129) if weighted else None
    gate, up = both[:, :inner], both[:, inner:]
    found = kernels.swiglu_halves(both, limit, weights)
    assert_bits(kernels.swiglu_quantise(gate, up, limit, weights), found)
    apart = kernels.swiglu_quantise(gate.contiguous(), up.contiguous(), limit, weights)
    assert_bits(apart, found)
    swapped = kernels.swiglu_quantise(up, gate, limit, weights)
    assert_bits(swapped, kernels.swiglu_quantise(up.clone(), gate.clone(), limit, weights))


def test_extreme_values():
    """Zeros of both signs, values far beyond the limits, and a silu that underflows."""
    values = torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-38, -1e-38, 10.0, -100.0])
    gate = values.repeat(8).to(torch.bfloat16).repeat(3, 1).to(normal(1).device)
    up = gate.flip(1).contiguous()
    found = kernels.swiglu_quantise(gate, up, 10.0, None)
    assert torch.isfinite(found).all()
    assert_one_code_apart(found, expected(gate, up, 10.0, None), share=0.0)


def test_a_row_does_not_depend_on_its_batch():
    both, weights = normal(129, 128) * 5, weights_of(129)
    own = RowWeights(weights.values, weights.order[77:78])
    alone = kernels.swiglu_halves(both[77:78], 2.5, own)
    assert_bits(alone, kernels.swiglu_halves(both, 2.5, weights)[77:78])
    assert kernels.swiglu_halves(both[:0], 2.5, None).shape == (0, 64)


def test_public_op_chooses_the_kernel_by_dtype():
    both = normal(3, 128)
    assert_bits(swiglu_quantise(both[:, :64], both[:, 64:], 2.5), kernels.swiglu_halves(both, 2.5))
    whole = both.float()
    assert swiglu_quantise(whole[:, :64], whole[:, 64:], 2.5).dtype == torch.float32
