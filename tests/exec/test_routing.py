"""Routing ops against rules written out in plain Python."""

import math

import pytest
import torch

from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.routing import NO_EXPERT, combine, group_rows, max_tiles, route

SHAPES = [(1, 3, 8), (5, 2, 4), (40, 6, 16), (130, 6, 384)]


def random_experts(num_tokens, k, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    return order[:, :k].sort(dim=1).values.to(torch.int32)


def test_experts_are_chosen_with_the_bias_and_weighted_without():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    experts, weights = route(Partial.of(logits), torch.tensor([0.0, 0.0, -9.0, 9.0]), 2, 1.5)
    assert experts.tolist() == [[1, 3]]
    a, b = (math.sqrt(math.log1p(math.exp(x))) for x in (1.0, -1.0))
    assert weights[0].tolist() == pytest.approx([1.5 * a / (a + b), 1.5 * b / (a + b)], rel=1e-6)


def test_equal_scores_go_to_the_lower_expert():
    experts, weights = route(Partial.of(torch.zeros(1, 9)), torch.zeros(1, 9), 3, 1.0)
    assert experts.tolist() == [[0, 1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)


def test_a_token_can_have_its_own_bias():
    bias = torch.zeros(2, 5)
    bias[1, 4] = 1.0
    experts, _ = route(Partial.of(torch.zeros(2, 5)), bias, 2, 1.0)
    assert experts.tolist() == [[0, 1], [0, 4]]


@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), SHAPES)
@pytest.mark.parametrize("tile", [1, 7, 64])
def test_groups_cover_each_row_once(num_tokens, k, num_experts, tile):
    experts = random_experts(num_tokens, k, num_experts)
    groups = group_rows(experts, num_experts, tile)
    flat, num_rows = experts.flatten().tolist(), num_tokens * k
    by_expert = sorted(range(num_rows), key=lambda row: (flat[row], row))
    assert groups.order.tolist() == by_expert
    assert [groups.position[row] for row in by_expert] == list(range(num_rows))
    assert groups.counts.tolist() == [flat.count(e) for e in range(num_experts)]
    assert groups.offsets[-1] == num_rows
    tiles = []
    for expert, count in enumerate(groups.counts.tolist()):
        tiles += [(expert, int(groups.offsets[expert]) + i) for i in range(0, count, tile)]
    bound = max_tiles(num_rows, num_experts, tile)
    tiles += [(NO_EXPERT, 0)] * (bound - len(tiles))
    assert list(zip(groups.tile_expert.tolist(), groups.tile_start.tolist(), strict=True)) == tiles


def test_one_expert_may_get_everything():
    groups = group_rows(torch.full((10, 1), 2), 4, 4)
    assert groups.tile_expert.tolist() == [2, 2, 2, NO_EXPERT, NO_EXPERT, NO_EXPERT]
    assert groups.tile_start.tolist() == [0, 4, 8, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combining_undoes_the_grouping(dtype):
    experts = random_experts(20, 3, 8)
    groups = group_rows(experts, 8, 16)
    rows, shared = torch.randn(60, 32).to(dtype), torch.randn(20, 32).to(dtype)
    found = combine(rows[groups.order], groups.position, shared)
    summed = torch.unflatten(rows.float(), 0, (20, 3)).sum(dim=1) + shared.float()
    torch.testing.assert_close(found, summed.to(dtype))
