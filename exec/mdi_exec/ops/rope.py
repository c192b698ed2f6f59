"""Rotary position embedding of the last dimensions, interleaved pairs, float32 maths.

Keys double as values in this model, so the attention output is rotated back by `inverse`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.quantise import round_fp4_ref


class Rotation(NamedTuple):
    """Cosines and sines, float32 [T, r/2], of the rows' positions."""

    cos: Tensor
    sin: Tensor


def rotate_ref(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    half = rotation.cos.shape[-1]
    shape = (x.shape[0], *([1] * (x.dim() - 2)), half)
    cos, sin = rotation.cos.view(shape), rotation.sin.view(shape)
    if inverse:
        sin = -sin
    pairs = torch.unflatten(x[..., -2 * half :].to(torch.float32), -1, (half, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., : -2 * half], turned.to(x.dtype)), dim=-1)


def rotate(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Rotate the last r of x [T, d] or [T, heads, d] by its rows' angles; returns x's dtype.

    A kernel rotates in place: x must not be used afterwards.
    """
    return select(x, ref=rotate_ref, kernel="rope.rotate")(x, rotation, inverse)


def rotate_round_ref(x: Tensor, rotation: Rotation) -> Tensor:
    turned = rotate_ref(x, rotation, inverse=False)
    return turned if x.dtype == torch.float32 else round_fp4_ref(turned)


def rotate_round(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x [T, heads, d] rotated and rounded as `round_fp4` does; float32 is not rounded."""
    return select(x, ref=rotate_round_ref, kernel="rope.rotate_round")(x, rotation)
