"""Engram's operations: n-grams, hashing them to table rows, and gating what was looked up.

Hashing is exact int64 arithmetic (docs/model.md, 1); the gate is float32.
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.elementwise import everywhere
from mdi_exec.ops.step_rows import StepTables

BLOCKED = -1  # in place of a compressed id: no token there, or an image's
GATE_FLOOR = 1e-6
STATISTIC_EPS = 1e-20


def engram_rows_ref(
    ids: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    is_blocked = (ids == BLOCKED).cumsum(dim=1) > 0  # sticky: what lies behind a gap is not seen
    products = ids.masked_fill(is_blocked, pad_id) * multipliers
    mixed, rows = products[:, 0], []
    for i in range(primes.shape[0]):
        mixed = mixed ^ products[:, i + 1]
        rows.append(mixed.unsqueeze(1) % primes[i] + offsets[i])
    return torch.cat(rows, dim=1)


def engram_rows(
    ids: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Hash each position's n-grams to table rows: int64 [T, sizes * heads], size-major.

    ids int64 [T, N]: compressed ids at shifts 0 .. N-1 back, -1 = blocked. multipliers [N],
    primes and offsets [N-1, heads], all int64. Products stay below 2^63 by construction.
    """
    run = select(ids, ref=engram_rows_ref, kernel="engram.engram_rows", dtypes=(torch.int64,))
    return run(ids, pad_id, multipliers, primes, offsets)


def ids_before_ref(ids: Tensor, history: Tensor, step: StepTables, depth: int) -> Tensor:
    slots = step.slots[step.seq_of_row]
    rows, found = torch.arange(len(ids), device=ids.device), [ids]
    for back in range(1, depth):
        at = step.positions - back
        kept = history[slots, at % history.shape[1]]
        new = ids[(rows - back).clamp(min=0)]
        seen = torch.where(at >= step.starts[step.seq_of_row], new, kept.to(torch.int64))
        found.append(seen.masked_fill(at < 0, BLOCKED))
    return torch.stack(found, dim=1)


def ids_before(ids: Tensor, history: Tensor, step: StepTables, depth: int) -> Tensor:
    """Return ids int64 [T] at shifts 0 .. depth-1 back, [T, depth]; -1 where no token is.

    history int32 [slots, length] keeps earlier steps' ids, position x at x mod length.
    """
    run = select(ids, ref=ids_before_ref, kernel="engram.ids_before", dtypes=(torch.int64,))
    return run(ids, history, step, depth)


def _rstd(values: Tensor) -> Tensor:
    return torch.rsqrt(values.square().mean(dim=-1) + STATISTIC_EPS)


def engram_add_ref(
    streams: Tensor, looked_up: Tensor, q_weight: Tensor, k_weight: Tensor, is_open: Tensor | None
) -> Tensor:
    n, width = streams.shape[1:]
    x = streams.to(torch.float32)
    keys = torch.unflatten(looked_up[:, : n * width].to(torch.float32), 1, (n, width))
    value = looked_up[:, n * width :].to(torch.float32).unsqueeze(1)
    weighted = x * q_weight.to(torch.float32) * k_weight.to(torch.float32)
    dots = (weighted * keys).sum(dim=-1) * _rstd(x) * _rstd(keys) * width**-0.5
    roots = torch.copysign(dots.abs().clamp(min=GATE_FLOOR).sqrt(), dots)
    gate = everywhere(torch.sigmoid, roots)
    if is_open is not None:
        gate = gate * is_open.unsqueeze(1)
    return (x + gate.unsqueeze(-1) * value).to(streams.dtype)


def engram_add(
    streams: Tensor, looked_up: Tensor, q_weight: Tensor, k_weight: Tensor,
    is_open: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add the gated value to every stream; returns streams [T, n, D].

    looked_up [T, (n+1)D] is one key per stream, then the shared value; q_weight and k_weight
    [n, D]; is_open bool [T] closes the gate at image tokens (None = all open).
    """
    run = select(streams, ref=engram_add_ref, kernel="engram.engram_add")
    return run(streams, looked_up, q_weight, k_weight, is_open)
