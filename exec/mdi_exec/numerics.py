"""How the model rounds: one option. The dtype of an activation carries it into the ops.

`QUANTISED` is the released model: bfloat16 activations, FP8/FP4 casts before every GEMM and cache
write. `FLOAT32` uses the same weights with every cast switched off; it is smooth, so it is what
structure is tested with. An op that gets float32 activations rounds nothing. `FOLDED` is
`QUANTISED` with routed experts multiplied as FP8 (`ops/folding.py`): faster on Hopper, and as near
to the released arithmetic as rounding to bfloat16 is, but not the same bits.
"""

from enum import Enum

import torch


class Numerics(Enum):
    """Rounding of activations and caches (docs/model.md, "Number formats")."""

    QUANTISED = "quantised"
    FLOAT32 = "float32"
    FOLDED = "folded"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations between modules."""
        return torch.float32 if self is Numerics.FLOAT32 else torch.bfloat16
