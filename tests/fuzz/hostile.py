"""Python values that no function asked for, and calls made of them."""

from array import array
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

from mdi_exec.engine.options import EngineOptions
from mdi_exec.engine.sampling import SamplingParams
from mdi_shared.config import SchedulerConfig


class Unspeakable:
    """A value that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no words")


KNOT: list = []
KNOT.append(KNOT)
VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 0.0, 1.5, -0.5, 1e-6, float("nan"), float("inf"), 1e308,
    2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 10**5_000, "", "x", "0", "1",
    "\ud800", "\0", "a\nb", "x" * 10_000, b"x", bytearray(b"x"), [], [[]], [None], ["a", 1], [True],
    [0.5], [-1], [2**70], [0] * 5_000, ["x"] * 17, [5] * 639, [5] * 640, [5] * 641, {}, {"a": 1},
    (), (1, 2), {1, 2}, frozenset(), range(3), array("i", [1, 2]), np.int64(3), np.float32(0.5),
    np.array([1, 2]), np.bool_(True), torch.tensor([1, 2]), torch.tensor(1), Decimal(1),
    Fraction(1, 2), 1j, object(), object, len, KNOT, Unspeakable(), [Unspeakable()], iter([1]),
    SamplingParams, SamplingParams(), [SamplingParams()], Ellipsis, NotImplemented,
)  # fmt: skip
PARAMS = (*SamplingParams.__dataclass_fields__.keys() - {"rng_seed"}, "seed", "logprobs")
OPTIONS = (*EngineOptions.__dataclass_fields__, *SchedulerConfig.__dataclass_fields__, "nope")


def hostile_params(rng):
    """Return `SamplingParams` with a field or two of any value, or something else altogether."""
    if rng.random() < 0.1:
        return rng.choice(VALUES)
    names = rng.sample(sorted(PARAMS), rng.choice((1, 1, 2)))
    return SamplingParams(**{"max_tokens": 3, **{name: rng.choice(VALUES) for name in names}})


def hostile_prompts(rng):
    """Return prompts, or what somebody takes for them."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(VALUES)
    if kind == 1:
        return [[5, 6], rng.choice(VALUES)]
    if kind == 2:
        return [[5, rng.choice(VALUES), 7]]
    return ["Hello", [5, 6], "x" * rng.choice((0, 3, 3_000))]


def hostile_options(rng):
    """Return options of `LLM.reopen` with one of any value."""
    options = {"max_model_len": 640, "num_blocks": 24, "max_num_seqs": 4}
    return {**options, rng.choice(OPTIONS): rng.choice(VALUES)}
