"""Elementwise functions whose result does not depend on where an element stands.

On a CPU, torch computes the bulk of a tensor, or of each thread's share of it, with vector
instructions and the last few elements with the C library, which round differently: a row's last bit
would depend on how many rows come after it. A GPU has one path, used as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

VECTOR = 64  # elements: a multiple of what any processor's loop takes at a time
PIECE = 2**14  # elements; torch shares no fewer than twice as many among threads


def everywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a torch function elementwise to float32 x by whole vectors, and nothing else.

    It keeps the function's own float32 steps. A float64 sigmoid rounded once would depend on the
    position as little, but it differs in four elements of ten, which the layers behind magnify.
    """
    if x.device.type != "cpu":
        return function(x)
    whole = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % VECTOR))
    pieces = [function(piece) for piece in torch.split(whole, PIECE)]
    return torch.cat(pieces)[: x.numel()].view(x.shape)


def rounded_once(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a torch function elementwise to float32 x in float64 and round: the nearest float32."""
    if x.device.type != "cpu":
        return function(x)
    return function(x.to(torch.float64)).to(x.dtype)
