"""Matrix-product kernels against their references, and against each other bit for bit."""

import pytest
import torch

from mdi_exec.ops.expert_gemm import expert_gemm, expert_gemm_ref, tile_rows
from mdi_exec.ops.gemm import (
    QuantisedWeight,
    add_parts,
    add_parts_ref,
    matmul,
    matmul_ref,
    partial_gemm,
    partial_matmul,
    quantised_gemm,
    quantised_gemm_ref,
)
from mdi_exec.ops.hyper_connections import HcProjection, hc_coefficients, hc_coefficients_ref
from mdi_exec.ops.quantise import quantise_activation
from mdi_exec.ops.routing import group_rows
from tests.gpu.marks import gpu
from tests.gpu.vectors import ROW_COUNTS, assert_bits, normal

pytestmark = gpu
SHARE_OFF = 0.02  # of bfloat16 results, by one step: sums of another order


def assert_rounded_sums(found, wanted):
    """Equal but for a few results one bfloat16 step off; small sums of large terms may be more."""
    assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
    a, b = found.float(), wanted.float()
    assert torch.isfinite(a).all()
    spread = b.square().mean().sqrt()
    assert ((a - b).abs() <= 2**-7 * b.abs() + 1e-4 * spread).all()
    assert (a != b).float().mean() <= SHARE_OFF


def random_bytes(*shape, low=0, high=256, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)


def fp8_weight(n, k, seed=0):
    codes = (normal(n, k, seed=seed) * 100).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = random_bytes(-(-n // 32), k // 32, low=112, high=116, seed=seed)
    return QuantisedWeight(codes, scales.view(torch.float8_e8m0fnu))


def fp4_weights(experts, n, k, seed=0):
    codes = random_bytes(experts, n, k // 2, seed=seed).view(torch.int8)
    scales = random_bytes(experts, n, k // 32, low=118, high=122, seed=seed + 1)
    return QuantisedWeight(codes, scales.view(torch.float8_e8m0fnu))


@pytest.mark.parametrize(("n", "k"), [(384, 5120), (512, 5120), (32, 128), (16, 128), (8200, 512)])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_plain_product(n, k, rows):
    x, weight = normal(rows, k), normal(n, k, seed=1)
    found = matmul(x, weight)
    torch.testing.assert_close(found, matmul_ref(x, weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("n", "k"), [(1280, 5120), (512, 192), (64, 128), (96, 32)])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_fp8_product_from_codes_and_from_copies(n, k, rows):
    weight, x = fp8_weight(n, k), quantise_activation(normal(rows, k, seed=2))
    wanted = quantised_gemm_ref(x, weight)
    packed = weight.packed()
    copied = weight.expanded(torch.bfloat16).packed()
    assert_bits(packed.dequantised(), weight.dequantised())
    found = quantised_gemm(x, packed)
    assert_rounded_sums(found, wanted)
    assert_bits(quantised_gemm(x, copied), found)


@pytest.mark.parametrize("rows", [1, 5, 64, 130])
def test_grouped_output_product(rows):
    weight, x = fp8_weight(4 * 96, 256), normal(130, 4 * 256)
    wanted = quantised_gemm_ref(x, weight, 4)
    whole = quantised_gemm(x, weight.packed(), 4)
    assert_rounded_sums(whole, wanted)
    for made in (weight.packed(), weight.expanded(torch.bfloat16).packed()):
        assert_bits(quantised_gemm(x[:rows].contiguous(), made, 4), whole[:rows])


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
@pytest.mark.parametrize(("n", "k", "groups"), [(1280, 320, 1), (192, 64, 3), (512, 4096, 2)])
@pytest.mark.parametrize("rows", [65, 128, 1000])
def test_dense_tiles_of_all_widths_have_the_bits_of_the_plain_program(
    monkeypatch, rows, n, k, groups, columns
):
    from mdi_exec.ops.kernels import dense_gemm, gemm  # needs the kernel compiler

    x, weight = normal(rows, groups * k), normal(groups * n, k, seed=1)
    if not dense_gemm.can_multiply(weight, groups):
        pytest.skip("made for sm_90a")
    monkeypatch.setattr(dense_gemm, "tile_columns", lambda *sizes: columns)
    found = dense_gemm.dense_product(x, weight, groups)
    assert_bits(found, gemm._product(x, weight, groups, torch.bfloat16)[0])


@pytest.mark.parametrize("rows", [1, 64, 65, 700])
def test_rows_of_a_product_do_not_depend_on_the_batch(rows):
    weight = fp8_weight(1280, 5120).expanded(torch.bfloat16).packed()
    x = quantise_activation(normal(4096, 5120))
    assert_bits(quantised_gemm(x[:rows].contiguous(), weight), quantised_gemm(x, weight)[:rows])
    gate = normal(384, 5120, seed=1)
    assert_bits(matmul(x[:rows].contiguous(), gate), matmul(x, gate)[:rows])


ROUTINGS = {
    "spread": lambda tokens, experts: torch.randperm(experts)[:3].expand(tokens, -1),
    "one takes all": lambda tokens, experts: torch.tensor([1]).expand(tokens, -1),
    "random": lambda tokens, experts: torch.rand(tokens, experts).argsort(1)[:, :6].sort(1).values,
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 129, 1000])
@pytest.mark.parametrize(("n", "k"), [(256, 5120), (320, 2304), (128, 64), (128, 128)])
def test_expert_product(name, tokens, n, k):
    experts = 16
    torch.manual_seed(tokens)
    chosen = ROUTINGS[name](tokens, experts).to("cuda", torch.int32).contiguous()
    weights = fp4_weights(experts, n, k)
    x = quantise_activation(normal(chosen.numel(), k))
    tile = tile_rows(x, chosen.numel(), experts)
    groups = group_rows(chosen, experts, tile)
    found = expert_gemm(x, weights.packed(), groups, tile)
    wanted = expert_gemm_ref(x, weights, groups, tile)
    assert_rounded_sums(found, wanted)


def test_expert_rows_do_not_depend_on_the_tile():
    chosen = torch.rand(500, 16, device="cuda").argsort(1)[:, :6].sort(1).values.to(torch.int32)
    weights, x = fp4_weights(16, 256, 5120).packed(), quantise_activation(normal(3000, 5120))
    results = [
        expert_gemm(x, weights, group_rows(chosen.contiguous(), 16, tile), tile)
        for tile in (16, 32, 64, 96, 128)
    ]
    for other in results[1:]:
        assert_bits(other, results[0])


def test_decoding_in_registers_and_by_the_portable_loop_agree(monkeypatch):
    """What other architectures run must be what this one was tested with."""
    from mdi_exec.ops.kernels import weight_gemm

    x, weight = quantise_activation(normal(70, 512)), fp8_weight(256, 512)
    found = quantised_gemm(x, weight.packed())
    monkeypatch.setattr(weight_gemm, "has_known_registers", lambda: False)
    assert_bits(quantised_gemm(x, weight.packed()), found)
    assert_rounded_sums(found, matmul_ref(x, weight.dequantised()).to(torch.bfloat16))


@pytest.mark.parametrize(("n", "k", "parts"), [(1280, 5120, 8), (32, 5120, 8), (512, 1280, 2)])
@pytest.mark.parametrize("rows", [1, 5, 17, 64, 65, 300])
def test_narrow_products_come_in_parts_of_one_sum(n, k, parts, rows):
    """Few rows come in parts, many added up: to the same bits, from codes and from copies."""
    weight, x = fp8_weight(n, k), quantise_activation(normal(300, k, seed=2))
    plain = normal(n, k, seed=1)
    wanted, wanted_plain = partial_gemm(x, weight.packed()), partial_matmul(x, plain)
    few = x[:rows].contiguous()
    for made in (weight.packed(), weight.expanded(torch.bfloat16).packed()):
        found = partial_gemm(few, made)
        assert len(found.parts) == parts or (rows > 64 and made.values is not None)
        assert_bits(found.total(), wanted.total()[:rows])
        assert_bits(quantised_gemm(few, made), found.rounded())
    found = partial_matmul(few, plain)
    assert len(found.parts) == (parts if rows <= 64 else 1)
    assert_bits(found.total(), wanted_plain.total()[:rows])
    assert_bits(matmul(few, plain), found.total())
    assert_bits(add_parts(found, 0.3), add_parts_ref(found, 0.3))


@pytest.mark.parametrize(("n", "k"), [(320, 2304), (128, 64)])
def test_experts_by_the_portable_loop_agree(n, k):
    from mdi_exec.ops.kernels.weight_gemm import portable_expert_gemm

    chosen = torch.rand(100, 16, device="cuda").argsort(1)[:, :6].sort(1).values.to(torch.int32)
    weights, x = fp4_weights(16, n, k).packed(), quantise_activation(normal(600, k))
    groups = group_rows(chosen.contiguous(), 16, 64)
    assert_bits(portable_expert_gemm(x, weights, groups, 64), expert_gemm(x, weights, groups, 64))


def test_blocks_share_out_experts_of_any_size():
    """More items than multiprocessors, of very different sizes, again and again from one queue."""
    counts = torch.tensor([700, 0, 1, 129, 128, 3, 257, 90, 16, 17, 0, 40, 33, 500, 81, 5])
    chosen = torch.arange(16).repeat_interleave(counts)[torch.randperm(2000)].view(-1, 1)
    chosen = chosen.to("cuda", torch.int32)
    weights = fp4_weights(16, 4608, 256).packed()
    groups = group_rows(chosen, 16, 128)
    wanted = None
    for seed in (0, 1, 0):
        x = quantise_activation(normal(2000, 256, seed=seed))
        found = expert_gemm(x, weights, groups, 128)
        assert_rounded_sums(found, expert_gemm_ref(x, weights, groups, 128))
        if seed == 0 and wanted is not None:
            assert_bits(found, wanted)
        wanted = found if wanted is None else wanted


@pytest.mark.parametrize("width", [5120, 128])
@pytest.mark.parametrize("rows", [1, 3, 64, 129])
def test_hyper_connection_coefficients(width, rows):
    streams = normal(rows, 4, width)
    projection = HcProjection(normal(24, 4 * width, seed=1).float() * (4 * width) ** -0.5 * 1.37)
    base, scale = normal(24, seed=2).float(), torch.tensor([0.5, 0.6, 0.4], device="cuda")
    options = dict(norm_eps=1e-20, iterations=20, eps=1e-6)
    found = hc_coefficients(streams, projection, base, scale, **options)
    wanted = hc_coefficients_ref(streams, projection, base, scale, **options)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    alone = hc_coefficients(streams[:1], projection, base, scale, **options)
    for mine, whole in zip(alone, found, strict=True):
        assert_bits(mine, whole[:1])
