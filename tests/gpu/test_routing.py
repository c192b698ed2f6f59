"""Routing kernels against their references on the same GPU."""

import pytest
import torch

from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.kernels import grouping
from mdi_exec.ops.kernels import routing as kernels
from mdi_exec.ops.routing import combine_ref, group_rows_ref, route_ref
from tests.gpu.marks import gpu
from tests.gpu.strictness import poisoned, unawaited

pytestmark = gpu

SIZES = [(384, 6), (128, 3), (16, 3)]  # experts, experts per token
ROWS = [1, 3, 127, 129, 1000, 4096]
# The float32 sum of six scores may be taken in another order, and log1p differ in the last place.
WEIGHT_RTOL = 2e-6


def logits_of(num_tokens, num_experts, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(num_tokens, num_experts, device="cuda", generator=generator) * 3


def compare_routes(logits, bias, k):
    with poisoned():
        experts, weights = kernels.route(Partial.of(logits), bias, k, 1.5)
    expected, expected_weights = route_ref(Partial.of(logits), bias, k, 1.5)
    assert experts.dtype == torch.int32
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=WEIGHT_RTOL, atol=0)


@pytest.mark.parametrize(("num_experts", "k"), SIZES)
@pytest.mark.parametrize("num_tokens", ROWS)
def test_route(num_experts, k, num_tokens):
    logits = logits_of(num_tokens, num_experts)
    compare_routes(logits, logits_of(1, num_experts, 1)[0] * 0.1, k)
    compare_routes(logits, logits_of(num_tokens, num_experts, 2) * 0.1, k)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_route_with_equal_scores(scale):
    logits = logits_of(200, 384).sign() * scale
    compare_routes(logits, torch.zeros(384, device="cuda"), 6)


def test_route_of_extreme_logits():
    logits = torch.tensor([-80.0, -20.0, 19.99, 20.0, 20.01, 80.0, 1e4, -1.0], device="cuda")
    compare_routes(torch.stack([logits, logits.flip(0)]), torch.zeros(8, device="cuda"), 8)


def test_parts_of_logits_are_added_in_order():
    parts = logits_of(8 * 30, 384).view(8, 30, 384)
    product, bias = Partial(parts, torch.float32), logits_of(1, 384, 1)[0]
    expected = kernels.route(Partial.of(product.total()), bias, 6, 1.5)
    for mine, theirs in zip(kernels.route(product, bias, 6, 1.5), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_token_is_routed_alike_in_any_batch():
    logits, bias = logits_of(130, 384), logits_of(1, 384, 1)[0]
    together = kernels.route(Partial.of(logits), bias, 6, 1.5)
    for token in (0, 1, 64, 129):
        alone = kernels.route(Partial.of(logits[token : token + 1]), bias, 6, 1.5)
        assert all(torch.equal(a[0], t[token]) for a, t in zip(alone, together, strict=True))


def compare_groups(experts, num_experts, tile):
    with poisoned():
        groups = grouping.group_rows(experts, num_experts, tile)
    expected = group_rows_ref(experts, num_experts, tile)
    for name, a, b in zip(groups._fields, groups, expected, strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("num_experts", "k", "tile"), [(384, 6, 64), (384, 6, 128), (16, 3, 16)])
@pytest.mark.parametrize("num_tokens", ROWS)
def test_group_rows(num_experts, k, tile, num_tokens):
    logits = Partial.of(logits_of(num_tokens, num_experts))
    experts, _ = route_ref(logits, torch.zeros(num_experts, device="cuda"), k, 1.0)
    compare_groups(experts, num_experts, tile)
    compare_groups(experts.long(), num_experts, tile)


@pytest.mark.parametrize("expert", [0, 200, 383])
def test_all_rows_may_go_to_one_expert(expert):
    compare_groups(torch.full((3000, 6), expert, device="cuda"), 384, 64)


def test_no_rows():
    groups = grouping.group_rows(torch.empty((0, 6), dtype=torch.int32, device="cuda"), 384, 64)
    assert groups.order.numel() == groups.tile_expert.numel() == 0
    assert not groups.counts.any()
    assert not groups.offsets.any()


@pytest.mark.parametrize(("width", "k"), [(5120, 6), (128, 3)])
@pytest.mark.parametrize("num_tokens", ROWS)
def test_combine(width, k, num_tokens):
    generator = torch.Generator("cuda").manual_seed(3)
    rows = torch.randn(num_tokens * k, width, device="cuda", generator=generator).bfloat16()
    shared = torch.randn(num_tokens, width, device="cuda", generator=generator).bfloat16()
    position = torch.randperm(num_tokens * k, device="cuda", generator=generator).int()
    with poisoned():
        found = kernels.combine(rows, position, shared)
    assert torch.equal(found, combine_ref(rows, position, shared))


def test_nothing_waits_for_the_device():
    logits, bias = logits_of(40, 384), torch.zeros(384, device="cuda")
    rows = torch.zeros(240, 5120, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):  # the first turn compiles
        experts, _ = kernels.route(Partial.of(logits), bias, 6, 1.5)
        groups = grouping.group_rows(experts, 384, 64)
        kernels.combine(rows, groups.position, rows[:40])
    with unawaited():
        experts, _ = kernels.route(Partial.of(logits), bias, 6, 1.5)
        groups = grouping.group_rows(experts, 384, 64)
        kernels.combine(rows, groups.position, rows[:40])
        group_rows_ref(experts, 384, 64)


@pytest.mark.parametrize("width", [5120, 128])
@pytest.mark.parametrize("num_tokens", [1, 3, 129, 1000])
def test_grouped_tokens(width, num_tokens):
    x = logits_of(num_tokens, width).to(torch.bfloat16)
    compare_tokens(x, logits_of(num_tokens, 16, 1).topk(3).indices.to(torch.int32))


def compare_tokens(x, experts):
    with poisoned():
        groups, rows = grouping.group_tokens(x, experts, 16, 16)
    expected = group_rows_ref(experts, 16, 16)
    for mine, theirs in zip(groups, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(rows, x[expected.order // experts.shape[1]])
