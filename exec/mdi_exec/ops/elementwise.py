"""Elementwise functions whose result does not depend on where an element stands.

On a CPU, torch computes a tensor's bulk with vector instructions and the last few elements (of each
thread's share) with the C library, which round differently: a row's last bit would depend on how
many rows come after it. In float64, rounded once, both agree. A GPU has one path, used as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def everywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a torch function elementwise to float32 x, position-independently."""
    if x.device.type != "cpu":
        return function(x)
    return function(x.to(torch.float64)).to(x.dtype)
