"""The one place that chooses how an op runs: its plain-torch reference, or a kernel.

References run on every device torch runs on, which makes a new device's first backend free.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def select(device: torch.device, *, ref: F, cuda: F | None = None) -> F:
    """Return what runs for tensors on `device`; `cuda` is None for an op without a kernel."""
    return cuda if cuda is not None and device.type == "cuda" else ref
