"""The rounding primitives against golden codes, scales and values, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_exec.ops.quantise import (
    E4M3_MAX,
    Quantised,
    dequantise,
    e2m1_codes,
    pack_e2m1,
    power_of_two_ceil,
    quantise_activation,
    quantise_fp4,
    quantise_fp4_e4m3,
    quantise_fp8,
    unpack_e2m1,
)

FORMATS = {
    "fp8_e8m0_g32": (quantise_fp8, "codes_e4m3", "scales_e8m0"),
    "fp4_e8m0_g32": (quantise_fp4, "packed_e2m1", "scales_e8m0"),
    "fp4_e4m3_g16": (quantise_fp4_e4m3, "packed_e2m1", "scales_e4m3"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_scales_and_values_are_exact(golden, name):
    quantise, codes, scales = FORMATS[name]
    expected = golden(f"quant/{name}")
    found = quantise(expected["input"])
    assert torch.equal(found.codes.view(torch.uint8), expected[codes].view(torch.uint8))
    assert torch.equal(found.scales.view(torch.uint8), expected[scales].view(torch.uint8))
    values = dequantise(found, torch.bfloat16)
    assert torch.equal(values.view(torch.int16), expected["dequant"].view(torch.int16))


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_a_rounded_value_changes_nothing(golden, name):
    """What the caches rely on: storing codes is equivalent to storing the rounded values."""
    quantise = FORMATS[name][0]
    once = dequantise(quantise(golden(f"quant/{name}")["input"][12:20]), torch.bfloat16)
    assert torch.equal(dequantise(quantise(once), torch.bfloat16), once)


def test_every_byte_decodes(golden):
    tables = golden("quant/gemm")
    assert torch.equal(unpack_e2m1(tables["all_e2m1"].unsqueeze(1)).view(256, 2),
                       tables["all_e2m1_f32"])  # fmt: skip
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(codes.to(torch.float32), tables["all_e4m3_f32"],
                               rtol=0, atol=0, equal_nan=True)  # fmt: skip
    scales = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(scales.to(torch.float32), tables["all_e8m0_f32"])


def test_all_codes_survive_packing():
    codes = torch.arange(16, dtype=torch.uint8).repeat(16)
    values = unpack_e2m1(pack_e2m1(codes))
    assert torch.equal(e2m1_codes(values), codes)


def test_fp4_numbers_at_fifteen_scales_in_a_row_are_fp8_numbers():
    codes = torch.arange(16, dtype=torch.uint8).view(8, 2)
    values = unpack_e2m1(pack_e2m1(codes)).flatten()
    scaled = values.unsqueeze(1) * 2.0 ** torch.arange(-8, 7)  # index scores fold scales into codes
    assert torch.equal(scaled.to(torch.float8_e4m3fn).to(torch.float32), scaled)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
     (5.01, 6.0), (0.26, 0.5)],
)  # fmt: skip
def test_ties_go_to_the_even_code(value, rounded):
    both = torch.tensor([value, -value])
    assert unpack_e2m1(pack_e2m1(e2m1_codes(both))).tolist() == [rounded, -rounded]


@given(st.floats(min_value=2.0**-120, max_value=2.0**120, width=32))
@settings(max_examples=200, deadline=None)
def test_power_of_two_ceil_is_the_next_power_of_two(value):
    scale = power_of_two_ceil(torch.tensor([value])).to(torch.float32).item()
    assert scale / 2 < value <= scale


def test_fp8_stays_within_range_and_half_a_step():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)) * 100
    rows = quantise_fp8(x.to(torch.bfloat16))
    assert rows.codes.to(torch.float32).abs().max() <= E4M3_MAX
    error = (dequantise(rows) - x.to(torch.bfloat16).float()).abs()
    scales = rows.scales.to(torch.float32).repeat_interleave(32, dim=1)
    largest_step = 32.0  # between E4M3 codes of the top binade
    assert (error <= scales * largest_step / 2).all()


def test_float32_activations_pass_unrounded():
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    assert quantise_activation(x) is x
    assert isinstance(quantise_activation(x.to(torch.bfloat16)), Quantised)
