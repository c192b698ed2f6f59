"""Selecting entries and candidate blocks by score; equal scores go to the lower position.

bfloat16 scores tie often, so the tie rule is part of the result. It needs a stable sort: torch's
own top-k promises nothing about ties.
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select

NONE = -1


def top_entries_ref(scores: Tensor, is_valid: Tensor, k: int) -> Tensor:
    width = scores.shape[1]
    masked = scores.masked_fill(~is_valid, -torch.inf)
    order = torch.sort(masked, dim=1, descending=True, stable=True).indices[:, :k]
    ranks = torch.arange(order.shape[1], device=scores.device)
    is_taken = ranks < is_valid.sum(dim=1, keepdim=True)
    chosen = torch.sort(order.masked_fill(~is_taken, width), dim=1).values
    chosen = chosen.masked_fill(chosen == width, NONE)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=NONE)


def top_entries(scores: Tensor, is_valid: Tensor, k: int) -> Tensor:
    """Return the columns of the k highest valid scores, ascending: int64 [T, k], -1 = none.

    scores [T, M], is_valid bool [T, M]; a row with fewer than k valid columns returns all of them.
    """
    return select(scores, ref=top_entries_ref)(scores, is_valid, k)


def top_visible_ref(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    columns = torch.arange(scores.shape[1], device=scores.device)
    return top_entries_ref(scores, columns < visible.unsqueeze(1), k).to(torch.int32)


def top_visible(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Return the columns of each row's k highest scores, ascending: int32 [T, k], -1 = none.

    scores [T, M]; visible int32 or int64 [T], at most M: a row's valid columns are 0 .. visible-1,
    what lies behind does not count. A row with fewer than k valid columns returns all of them.
    """
    run = select(scores, ref=top_visible_ref, kernel="top_entries.top_visible")
    return run(scores, visible, k)


def candidate_blocks_ref(scores: Tensor, visible: Tensor, block_size: int, k: int) -> Tensor:
    columns = torch.arange(scores.shape[1], device=scores.device)
    masked = scores.masked_fill(columns >= visible.unsqueeze(1), -torch.inf)
    padding = -scores.shape[1] % block_size
    masked = torch.nn.functional.pad(masked, (0, padding), value=-torch.inf)
    block_scores = torch.unflatten(masked, 1, (-1, block_size)).amax(dim=2)
    block_scores = block_scores.clamp(max=torch.finfo(scores.dtype).max)  # below the newest one's
    blocks = torch.arange(block_scores.shape[1], device=scores.device)
    newest = ((visible - 1) // block_size).unsqueeze(1)
    block_scores = block_scores.masked_fill(blocks == newest, torch.inf)
    kept = top_entries_ref(block_scores, blocks <= newest, min(k, block_scores.shape[1]))
    return kept.to(torch.int32)


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, k: int) -> Tensor:
    """Return the k blocks of entries with the highest maximum, ascending: int32 [T, <= k].

    scores [T, M]; visible [T], at most M, counts each query's entries. The block of the newest
    visible entry is always kept (docs/model.md, 4). -1 = none.
    """
    run = select(scores, ref=candidate_blocks_ref, kernel="top_entries.candidate_blocks")
    return run(scores, visible, block_size, k)
