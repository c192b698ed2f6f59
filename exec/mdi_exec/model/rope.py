"""Rotary frequencies: a plain table for window-only layers, a YaRN table for all others.

A layer with compressed entries uses the YaRN table for everything, its window keys included
(docs/model.md, 4).
"""

import math

import torch
from torch import Tensor

from mdi_exec.model.config import ModelConfig


class RopeTables:
    """Frequencies float32 [2, r/2], the plain table's and the YaRN one's, on one device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        plain = _frequencies(config.rope_theta, config.qk_rope_head_dim)
        self.frequencies = torch.stack((plain, yarn_frequencies(config))).to(device)


def _frequencies(theta: float, width: int) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1.0 / (theta**exponents)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Stretch the slow frequencies by `rope_factor`, leave the fast ones, ramp in between."""
    width, theta = config.qk_rope_head_dim, config.compress_rope_theta

    def dimension_of(turns: float) -> float:
        """Dimension whose wave makes this many turns over the original length."""
        length = config.rope_original_length / (2 * math.pi * turns)
        return width * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(config.rope_beta_fast)), 0)
    high = min(math.ceil(dimension_of(config.rope_beta_slow)), width - 1)
    index = torch.arange(width // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = _frequencies(theta, width)
    return plain / config.rope_factor * ramp + plain * (1 - ramp)
