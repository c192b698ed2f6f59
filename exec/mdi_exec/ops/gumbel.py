"""Counter-based random numbers: a pure function of (seed, position, case, token id).

Nothing here has a state, so a token's number does not depend on the row, the batch or the order
of calls (docs/rules.md, R30). The integer part is bit-exact on every device: int64 arithmetic
that wraps modulo 2^64, with logical shifts built from arithmetic ones. The float64 logarithms of
two devices may differ in the last place; compare tokens only where the best two scores differ by
more than `SCORE_TOLERANCE`. Read next: `sampler.py`.
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select

FRESH, RESAMPLE, ACCEPT = 0, 1, 2  # cases: a fresh token, one after a rejection, an accept test
NUM_CASES = 3
SCORE_TOLERANCE = 1e-9

_UNIFORM_BITS = 53


def signed(value: int) -> int:
    """Return the int64 with the bits of `value` modulo 2^64."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


GOLDEN_RATIO = signed(0x9E3779B97F4A7C15)
FACTOR_1 = signed(0xBF58476D1CE4E5B9)
FACTOR_2 = signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift in zeros; torch's own shift of an int64 repeats the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def mix(z: Tensor) -> Tensor:
    """Return one SplitMix64 step of int64 z, elementwise."""
    z = z + GOLDEN_RATIO
    z = (z ^ _shift_right(z, 30)) * FACTOR_1
    z = (z ^ _shift_right(z, 27)) * FACTOR_2
    return z ^ _shift_right(z, 31)


def stream_key(seeds: Tensor, positions: Tensor, case: int) -> Tensor:
    """Return the int64 key of each (seed, position); both int64 of one shape."""
    assert 0 <= case < NUM_CASES, f"case {case} is not one of fresh, resample, accept"
    return mix(seeds ^ ((NUM_CASES * positions + case) * GOLDEN_RATIO))


def uniform(bits: Tensor) -> Tensor:
    """Turn int64 random bits into float64 between 0 and 1."""
    return (_shift_right(bits, 64 - _UNIFORM_BITS).to(torch.float64) + 0.5) * 2.0**-_UNIFORM_BITS


def gumbel_noise_ref(seeds: Tensor, positions: Tensor, case: int, vocab_size: int) -> Tensor:
    token_ids = torch.arange(vocab_size, device=seeds.device)
    bits = mix(stream_key(seeds, positions, case).unsqueeze(1) + token_ids)
    return -torch.log(-torch.log(uniform(bits)))


def gumbel_noise(seeds: Tensor, positions: Tensor, case: int, vocab_size: int) -> Tensor:
    """Return float64 noise [n, vocab_size]; argmax(logprob + noise) samples the distribution.

    seeds and positions are int64 [n]; a seed of 2^63 or more is its `signed` counterpart.
    """
    run = select(seeds, ref=gumbel_noise_ref)
    return run(seeds, positions, case, vocab_size)
