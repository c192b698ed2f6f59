"""How the model rounds: one option, two values. The dtype of an activation carries it into the ops.

`QUANTISED` is the released model: bfloat16 activations, FP8/FP4 casts before every GEMM and cache
write. `FLOAT32` uses the same weights with every cast switched off; it is smooth, so it is what
structure is tested with. An op that gets float32 activations rounds nothing.
"""

from enum import Enum

import torch


class Numerics(Enum):
    """Rounding of activations and caches (docs/model.md, "Number formats")."""

    QUANTISED = "quantised"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations between modules."""
        return torch.bfloat16 if self is Numerics.QUANTISED else torch.float32
