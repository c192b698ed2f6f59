"""Attention of each query over its own list of keys: window, selected entries, and a sink.

One vector is key and value at once, shared by all heads. The softmax runs online over blocks of 64
keys in list order, probabilities are rounded to the activation dtype before they multiply values,
and the sink adds to the denominator only (docs/model.md, 4).

Keys come from pools, which stay quantised (`sparse_attention`), or decoded, "staged", for all rows
and layers that use them (`attend_staged`). Both give the same bits.
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import runs_kernels, select
from mdi_exec.ops.elementwise import everywhere
from mdi_exec.ops.rope import Rotation, rotate_ref
from mdi_exec.ops.row_pool import RowPool

KEY_BLOCK = 64
NONE = -1  # in place of a row: no key there, but a place in the list of keys
NO_COLUMN = -2  # no place either: the list of window keys has ended before
FIRST_MAX = -1e30  # the running maximum's start: finite, so that an empty row stays defined
MAX_GATHERED_VALUES = 2**24  # bounds what the reference holds at once (64 MiB of float32)
# A one-pass softmax instead of blocks of 64 with rounded probabilities moves bfloat16 outputs by
# this much at an output rms of 0.09.
ATTENTION_MAX_ABS = 0.02
ATTENTION_MEAN_ABS = 6e-4


def attend_ref(q: Tensor, keys: Tensor, is_valid: Tensor, sink: Tensor) -> Tensor:
    """Attend q [T, H, d] over keys [T, n, d] where is_valid [T, n]; sink [H]. Returns [T, H, d]."""
    queries = q.to(torch.float32)
    shape = (*q.shape[:2], 1)
    top = torch.full(shape, FIRST_MAX, dtype=torch.float32, device=q.device)
    total = torch.zeros(shape, dtype=torch.float32, device=q.device)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for start in range(0, keys.shape[1], KEY_BLOCK):
        block = keys[:, start : start + KEY_BLOCK].to(torch.float32)
        scores = torch.bmm(queries, block.transpose(1, 2)) * q.shape[-1] ** -0.5
        valid = is_valid[:, None, start : start + KEY_BLOCK]
        scores = scores.masked_fill(~valid, -torch.inf)
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        fade = everywhere(torch.exp, top - new_top)
        weights = everywhere(torch.exp, scores - new_top)
        total = total * fade + weights.sum(dim=-1, keepdim=True)
        out = out * fade + torch.bmm(weights.to(q.dtype).to(torch.float32), block)
        top = new_top
    total = total + everywhere(torch.exp, sink.view(1, -1, 1) - top)
    return (out / total).to(q.dtype)


def sparse_attention_ref(
    q: Tensor,
    window: RowPool,
    window_rows: Tensor,
    sink: Tensor,
    *,
    entries: RowPool | None,
    entry_rows: Tensor | None,
    rotation: Rotation | None,
) -> Tensor:
    if rotation is not None:
        turned = rotate_ref(q, rotation, inverse=False)
        found = sparse_attention_ref(turned, window, window_rows, sink, entries=entries,
                                     entry_rows=entry_rows, rotation=None)  # fmt: skip
        return rotate_ref(found, rotation, inverse=True)
    num_keys = window_rows.shape[1] + (0 if entry_rows is None else entry_rows.shape[1])
    step = max(1, MAX_GATHERED_VALUES // (num_keys * q.shape[-1]))
    out = torch.empty_like(q)
    columns = (window_rows != NO_COLUMN).sum(dim=1)
    for width in sorted(set(columns.tolist())):
        for rows in torch.split((columns == width).nonzero().squeeze(1), step):
            listed = window_rows[rows, :width]
            keys, is_valid = window.gather(listed), listed >= 0
            if entries is not None and entry_rows is not None:
                keys = torch.cat((keys, entries.gather(entry_rows[rows])), dim=1)
                is_valid = torch.cat((is_valid, entry_rows[rows] >= 0), dim=1)
            keys = keys.masked_fill(~is_valid.unsqueeze(-1), 0.0)
            out[rows] = attend_ref(q[rows], keys, is_valid, sink)
    return out


def sparse_attention(
    q: Tensor,
    window: RowPool,
    window_rows: Tensor,
    sink: Tensor,
    *,
    entries: RowPool | None = None,
    entry_rows: Tensor | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """Attend each query over its window and its selected entries.

    q [T, H, d]; window holds window keys, window_rows int32 [T, W] says which of them each query
    sees; entry_rows int32 [T, K] are rows of the pool `entries` (both None in window-only layers);
    -1 = none. Trailing columns of -2 are not in a row's list of keys at all: entries follow before
    them, and blocks of the softmax fall accordingly (kernels count them as -1). sink float32 [H].
    Returns [T, H, d] in q's dtype. With a `rotation`, queries are rotated first, and the result is
    rotated back; without one they are what they should be, and the result is still rotated.
    """
    run = select(q, ref=sparse_attention_ref, kernel="sparse_attention.sparse_attention")
    return run(q, window, window_rows, sink, entries=entries, entry_rows=entry_rows,
               rotation=rotation)  # fmt: skip


def can_stage(q: Tensor) -> bool:
    """Say whether `attend_staged` has a kernel for queries like q here: one for sm_90a."""
    if not runs_kernels(q):
        return False
    from mdi_exec.ops.kernels.jit import has_known_registers

    return has_known_registers()


def attend_staged_ref(q: Tensor, keys: Tensor, key_rows: Tensor, sink: Tensor) -> Tensor:
    step = max(1, MAX_GATHERED_VALUES // (key_rows.shape[1] * q.shape[-1]))
    out = torch.empty_like(q)
    is_column = key_rows != NO_COLUMN
    columns = is_column.sum(dim=1)
    for width in torch.unique(columns).tolist():
        for rows in torch.split((columns == width).nonzero().squeeze(1), step):
            listed = key_rows[rows][is_column[rows]].view(len(rows), width)
            is_valid = listed >= 0
            found = keys[listed.clamp(min=0)].masked_fill(~is_valid.unsqueeze(-1), 0.0)
            out[rows] = attend_ref(q[rows], found, is_valid, sink)
    return out


def attend_staged(q: Tensor, keys: Tensor, key_rows: Tensor, sink: Tensor) -> Tensor:
    """Attend each query over rows of decoded keys; worth it when rows share keys.

    q [T, H, d]; keys [N, d] in q's dtype; key_rows int32 [T, n], -1 = none, -2 = not even a place
    in the row's list (as in `sparse_attention`; kernels count it as -1). Blocks of the softmax are
    64 places. sink float32 [H]. Returns [T, H, d] in q's dtype, still rotated by the query's
    position: the bits of `sparse_attention` for the same keys at the same places.
    """
    run = select(q, ref=attend_staged_ref, kernel="staged_attention.attend_staged")
    return run(q, keys, key_rows, sink)
