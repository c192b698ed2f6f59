"""Collectives of one group of ranks, on rows of bytes.

Everything travels as uint8 rows: one collective carries codes, scales, ids and weights of a token
together, dtypes that a backend does not know pass, and nothing is rounded on the way. Read next:
`exchange.py`, which decides what is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PADDING = 0xFF  # every byte of a row that is not there; its integers read -1


def pack(*parts: Tensor) -> Tensor:
    """Lay tensors [T, .] side by side as bytes: uint8 [T, B]."""
    rows = [part.contiguous().view(torch.uint8) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def unpack(rows: Tensor, *like: Tensor) -> list[Tensor]:
    """Undo `pack` for as many rows as there are now; dtypes and widths are those of `like`."""
    if len(like) == 1:
        return [rows.contiguous().view(like[0].dtype)]
    widths = [part.shape[1] * part.itemsize for part in like]
    pieces = torch.split(rows, widths, dim=1)
    # Copied always: a piece of a single row counts as contiguous, but may lie at an odd address.
    return [
        piece.clone(memory_format=torch.contiguous_format).view(part.dtype)
        for piece, part in zip(pieces, like, strict=True)
    ]


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return uint8 rows [num_rows, B], those that are missing filled with `PADDING`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - rows.shape[0]), value=PADDING)


class Collectives:
    """What ranks of `group` do together; every rank makes the same calls in the same order.

    `sent_bytes` counts what this rank has had to send to others, whatever way the backend takes.
    Failures of the network are those of torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sent_bytes = 0

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return everybody's rows [R, B] below one another, [size * R, B], in rank order."""
        out = rows.new_empty(self.size * rows.shape[0], rows.shape[1])
        _named("all_gather_single", "all_gather_into_tensor")(out, rows, group=self.group)
        self.sent_bytes += (self.size - 1) * rows.nbytes
        return out

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Return this rank's part [R, B] of the sum of everybody's rows [size * R, B].

        Where all ranks but one have zeros, the one's bytes arrive unchanged.
        """
        out = rows.new_empty(rows.shape[0] // self.size, rows.shape[1])
        _named("reduce_scatter_single", "reduce_scatter_tensor")(out, rows, group=self.group)
        self.sent_bytes += (self.size - 1) * out.nbytes
        return out

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first sent[0] rows [.., B] to rank 0, the next sent[1] to rank 1, and so on.

        Returns what came from rank 0, then from rank 1: [sum(received), B].
        """
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=self.group)
        self.sent_bytes += (sum(sent) - sent[self.rank]) * rows.shape[1] * rows.itemsize
        return out

    def swap_counts(self, counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Tell each rank its row of counts, int32 [size, n]; returns n lists sent, n received.

        The host learns both, so it waits for the device: once.
        """
        got = torch.empty_like(counts)
        dist.all_to_all_single(got, counts.contiguous(), group=self.group)
        self.sent_bytes += (self.size - 1) * counts[0].nbytes
        sent, received = torch.stack((counts, got)).transpose(1, 2).tolist()
        return sent, received


def _named(new: str, old: str) -> Callable[..., Any]:
    """Return a function of torch.distributed, which renames them from one release to the next."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found
