"""Mixture-of-experts routing: who computes each token, in which order, and how results meet again.

`route` chooses experts, `group_rows` sorts the chosen (token, expert) pairs by expert and cuts them
into tiles for a grouped matrix product, `combine` adds each token's results up. Shapes follow from
the arguments alone, never from the choices: nothing waits for the GPU (docs/model.md, 5). Read
next: `expert_gemm.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.elementwise import everywhere
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.quantise import Quantised

WEIGHT_EPS = 1e-20
NO_EXPERT = -1  # the expert of a tile that is not needed


class RowGroups(NamedTuple):
    """Rows (token, slot) sorted by expert, in tiles; R = T * k rows, all tensors int32.

    order [R]: the flat index token * k + slot of each sorted row. position [R]: the inverse, where
    each flat index went. counts [E] and offsets [E + 1]: each expert's rows and the first of them.
    tile_expert and tile_start [`max_tiles`]: a tile is up to `tile` rows of one expert, from
    sorted row tile_start to the expert's last at most; tiles ascend, those not needed come last
    with expert -1 and start 0. queue [2]: zeros; blocks of a product take tiles from it, one after
    the other, and the last one leaves zeros again.
    """

    order: Tensor
    position: Tensor
    counts: Tensor
    offsets: Tensor
    tile_expert: Tensor
    tile_start: Tensor
    queue: Tensor


def max_tiles(num_rows: int, num_experts: int, tile: int) -> int:
    """Return how many tiles `num_rows` rows need at most, however they are distributed."""
    return min(num_experts, num_rows) + num_rows // tile


def route_ref(logits: Partial, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    scores = everywhere(torch.nn.functional.softplus, logits.total()).sqrt()
    chosen = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(dim=1, keepdim=True) + WEIGHT_EPS) * scale
    experts, order = chosen.sort(dim=1)
    return experts.to(torch.int32), weights.gather(1, order)


def route(logits: Partial, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose k experts a token: experts int32 [T, k], ascending, and their weights float32 [T, k].

    logits [T, E] count unrounded; bias float32 [E] or, one for each token, [T, E]. Experts are
    chosen by sqrt(softplus(logit)) + bias, equal ones by the lower id, and weighted without the
    bias: a token's weights add up to `scale`.
    """
    run = select(logits.parts, ref=route_ref, kernel="routing.route", dtypes=(torch.float32,))
    return run(logits, bias, k, scale)


def group_rows_ref(experts: Tensor, num_experts: int, tile: int) -> RowGroups:
    flat = experts.flatten().to(torch.int64)
    num_rows, device = flat.shape[0], flat.device
    order = torch.argsort(flat, stable=True)
    rows = torch.arange(num_rows, device=device)
    position = torch.empty_like(order).scatter_(0, order, rows)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tiles = (counts + tile - 1) // tile
    last_tile = tiles.cumsum(0)
    tile_ids = torch.arange(max_tiles(num_rows, num_experts, tile), device=device)
    expert = torch.searchsorted(last_tile, tile_ids, right=True)
    is_needed = expert < num_experts
    known = expert.clamp(max=num_experts - 1)
    start = offsets[known] + (tile_ids - (last_tile - tiles)[known]) * tile
    expert, start = expert.masked_fill(~is_needed, NO_EXPERT), start.masked_fill(~is_needed, 0)
    queue = torch.zeros(2, device=device)
    found = (order, position, counts, offsets, expert, start, queue)
    return RowGroups(*(t.to(torch.int32) for t in found))


def group_rows(experts: Tensor, num_experts: int, tile: int) -> RowGroups:
    """Sort rows (token, slot) by expert, stably, and cut each expert's rows into tiles.

    experts int32 or int64 [T, k], each between 0 and num_experts - 1.
    """
    run = select(
        experts, ref=group_rows_ref, kernel="grouping.group_rows",
        dtypes=(torch.int32, torch.int64),
    )  # fmt: skip
    return run(experts, num_experts, tile)


def _own(groups: RowGroups, num_experts: int) -> RowGroups:
    """Leave the last expert out, who stands for others."""
    is_own = groups.tile_expert < num_experts
    return groups._replace(
        counts=groups.counts[:-1],
        offsets=groups.offsets[:-1],
        tile_expert=groups.tile_expert.where(is_own, NO_EXPERT),
        tile_start=groups.tile_start.where(is_own, 0),
    )


def group_tokens_ref(
    x: Quantised | Tensor, experts: Tensor, num_experts: int, tile: int
) -> tuple[RowGroups, Quantised | Tensor]:
    groups = group_rows(experts, num_experts, tile)
    tokens = groups.order // experts.shape[1]
    return groups, x.rows(tokens) if isinstance(x, Quantised) else x[tokens]


def group_tokens(
    x: Quantised | Tensor, experts: Tensor, num_experts: int, tile: int, *, some_elsewhere: bool
) -> tuple[RowGroups, Quantised | Tensor]:
    """Do `group_rows`, and return the token x [T, D] of every sorted row, [T * k, D].

    With `some_elsewhere` this rank holds `num_experts` of all experts, and that number stands for
    those on other ranks. Their rows come last, in no tile and no count: a grouped product leaves
    their results undefined.
    """
    run = group_tokens_ref
    if isinstance(x, Tensor):
        run = select(x, ref=group_tokens_ref, kernel="grouping.group_tokens")
    groups, rows = run(x, experts, num_experts + some_elsewhere, tile)
    return (_own(groups, num_experts) if some_elsewhere else groups), rows


def combine_ref(routed: Tensor, position: Tensor, shared: Tensor) -> Tensor:
    num_tokens = shared.shape[0]
    slots = torch.unflatten(position, 0, (num_tokens, -1))
    total = torch.zeros(shared.shape, dtype=torch.float32, device=shared.device)
    for slot in range(slots.shape[1]):
        total = total + routed[slots[:, slot]].to(torch.float32)
    return (total + shared.to(torch.float32)).to(shared.dtype)


def combine(routed: Tensor, position: Tensor, shared: Tensor) -> Tensor:
    """Add up each token's routed results, then its shared one: [T, D], dtype of `shared`.

    routed [R, D] in `group_rows`' sorted order, position int32 [R] of the same, shared [T, D]. The
    sum is float32, in slot order (experts ascend), and is rounded once.
    """
    run = select(routed, ref=combine_ref, kernel="routing.combine")
    return run(routed, position, shared)
