"""What a policy may believe of an output's length, with an error of a stated size.

The prediction of a request is `Hints.predicted_len` (in a simulation the trace's own output, an
oracle), and where there is none its `max_tokens`. Noise makes a real predictor of it: the
same for a request each time it is asked, in every world.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import cos, exp, log, pi, sin, sqrt

from mdi_shared.policies.base import Policy, number
from mdi_shared.request import Sequence

_UNIT = 2.0**-64


def hashed(text: str) -> int:
    """Return 64 bits that look random and are the same everywhere."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def normal(text: str) -> float:
    """Return a standard normal number that is a function of `text` (Box and Muller)."""
    radius = sqrt(-2 * log((hashed(f"{text} r") + 1) * _UNIT))
    return radius * cos(2 * pi * hashed(f"{text} a") * _UNIT)


def sigma_of_tau(tau: float, spread: float) -> float:
    """Return the log-normal noise that leaves a rank correlation `tau` (Kendall's).

    For outputs whose logarithms are normal with standard deviation `spread`: the correlation of
    the logarithms is rho = sin(pi tau / 2), and noise adds `spread^2 (1 / rho^2 - 1)` to their
    variance.
    """
    rho = sin(pi * tau / 2)
    return spread * sqrt(1 / (rho * rho) - 1)


@lru_cache(maxsize=1 << 16)
def _error(sigma: float, req_id: str) -> float:
    return exp(sigma * normal(req_id))


@dataclass(eq=False)
class Predicting(Policy):
    """Base of policies that go by predicted outputs.

    A prediction is o * exp(sigma * Z), with Z a standard normal hash of the request's id: `sigma`
    0 is the oracle. `tau` gives the noise as a rank correlation instead, of outputs whose
    logarithms spread by `spread`; 1 is "none given".
    """

    sigma: float = number(0.0, most=10)
    tau: float = number(1.0, above=0, most=1)
    spread: float = number(1.0, above=0)

    def predicted(self, seq: Sequence) -> int:
        """Return the predicted output of a request, tokens; at most its `max_tokens`."""
        request = seq.request
        known = request.hints.predicted_len or request.max_tokens
        if self.sigma or self.tau < 1:
            sigma = self.sigma if self.tau == 1 else sigma_of_tau(self.tau, self.spread)
            known = max(int(known * _error(sigma, request.req_id) + 0.5), 1)
        return min(known, request.max_tokens)

    def left(self, seq: Sequence) -> int:
        """Return the tokens it is still expected to put out, at least one."""
        return max(self.predicted(seq) - seq.output_len, 1)
