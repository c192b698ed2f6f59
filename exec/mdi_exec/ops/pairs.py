"""Gated average of two neighbouring tokens' values, of which the first may be an earlier step's."""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.step_rows import StepTables


class Tail(NamedTuple):
    """Values and gates kept of earlier tokens: float32 [slots * length, 2, d], a ring a slot."""

    values: Tensor
    length: int


def pool_pairs_ref(
    product: Partial, gates: Partial, tail: Tail, step: StepTables
) -> tuple[Partial, Tensor]:
    own = torch.stack((product.total(), gates.total()), dim=1)
    before, row = (step.positions - 1).clamp(min=0), torch.arange(len(own), device=own.device)
    kept = step.slots[step.seq_of_row] * tail.length + before % tail.length
    is_new = (before >= step.starts[step.seq_of_row]).view(-1, 1, 1)
    new = own[(row - (step.positions - before)).clamp(min=0)]
    members = torch.stack((torch.where(is_new, new, tail.values[kept]), own), dim=1)
    weights = torch.softmax(members[:, :, 1], dim=1)
    pooled = (members[:, :, 0] * weights).sum(dim=1)
    return Partial(pooled.unsqueeze(0), product.dtype), own


def pool_pairs(
    product: Partial, gates: Partial, tail: Tail, step: StepTables
) -> tuple[Partial, Tensor]:
    """Average the values [T, d] of each row's token and the one before, weighted by a softmax.

    The softmax runs over the two tokens' gates [T, d], for each value; the first token's pair is
    itself twice. Also returns each row's own values and gates, float32 [T, 2, d], for the tail.
    """
    run = select(product.like, ref=pool_pairs_ref, kernel="pairs.pool_pairs")
    return run(product, gates, tail, step)
