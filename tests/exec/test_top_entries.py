"""Choosing among a prefix of each row."""

import torch

from mdi_exec.ops.top_entries import candidate_blocks, top_visible


def test_only_visible_columns_are_chosen():
    scores = torch.tensor([[1.0, 3.0, 2.0, 9.0]] * 4).to(torch.bfloat16)
    visible = torch.tensor([4, 3, 1, 0], dtype=torch.int32)
    chosen = top_visible(scores, visible, 2)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[1, 3], [1, 2], [0, -1], [-1, -1]]


def test_columns_out_of_sight_may_hold_anything():
    scores = torch.tensor([[1.0, 3.0, torch.nan, torch.inf]])
    assert top_visible(scores, torch.tensor([2]), 3).tolist() == [[0, 1, -1]]


def test_equal_scores_go_to_the_lower_column_and_zeros_are_equal():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert top_visible(scores, torch.tensor([5]), 3).tolist() == [[0, 1, 2]]


def test_blocks_and_columns_are_numbered_alike():
    scores = torch.zeros(1, 16)
    assert candidate_blocks(scores, torch.tensor([16]), 8, 4).dtype == torch.int32
