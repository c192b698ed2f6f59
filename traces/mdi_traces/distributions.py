"""Arrival processes and length distributions, each a small value with one method.

They hold parameters and no state: the random stream is an argument, so equal streams give equal
draws. Correlation between prompt and output lengths is not modelled.

Read next: `generate.py` (presets made of these).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, log
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from mdi_shared.errors import ConfigError, require
from mdi_traces.columns import Ints

_NS_PER_S = 1e9


class ArrivalProcess(Protocol):
    """When requests arrive."""

    def draw_ns(self, count: int, rng: Generator) -> Ints:
        """Return `count` ascending times in ns, the first at 0."""


class LengthDistribution(Protocol):
    """How long prompts or outputs are."""

    def draw(self, count: int, rng: Generator) -> Ints:
        """Return `count` lengths of at least 1 token."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, `rate` requests per second on average."""

    rate: float

    def __post_init__(self) -> None:
        _positive(self, "rate")

    def draw_ns(self, count: int, rng: Generator) -> Ints:
        return _from_gaps(rng.exponential(1 / self.rate, count))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps; `cv` is their deviation over mean: 1 is Poisson, more is burstier."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _positive(self, "rate", "cv")

    def draw_ns(self, count: int, rng: Generator) -> Ints:
        shape = 1 / self.cv**2
        return _from_gaps(rng.gamma(shape, 1 / (self.rate * shape), count))


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps of 1/`rate` seconds."""

    rate: float

    def __post_init__(self) -> None:
        _positive(self, "rate")

    def draw_ns(self, count: int, rng: Generator) -> Ints:
        return _whole_ns(np.arange(count) / self.rate)


@dataclass(frozen=True, slots=True)
class Burst:
    """Everything at time 0: an offline batch."""

    def draw_ns(self, count: int, rng: Generator) -> Ints:
        return np.zeros(count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson at `rate` for `on_s` seconds, then nothing for `off_s` seconds, over and over."""

    rate: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _positive(self, "rate", "on_s", "off_s")

    def draw_ns(self, count: int, rng: Generator) -> Ints:
        busy_s = np.cumsum(rng.exponential(1 / self.rate, count))
        busy_s -= busy_s[0]
        pauses = np.floor(busy_s / self.on_s)
        return _whole_ns(busy_s + pauses * self.off_s)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _lengths(self, "tokens")

    def draw(self, count: int, rng: Generator) -> Ints:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `low` to `high` tokens alike, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _lengths(self, "low", "high")

    def draw(self, count: int, rng: Generator) -> Ints:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with `median` tokens and `sigma` of the logarithm, cut to `low`..`high`."""

    median: float
    sigma: float
    low: int = 1
    high: int = 2**31 - 1

    def __post_init__(self) -> None:
        _positive(self, "median", "sigma")
        _lengths(self, "low", "high")

    def draw(self, count: int, rng: Generator) -> Ints:
        drawn = np.rint(rng.lognormal(log(self.median), self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of several distributions, chosen by weight for each length."""

    parts: tuple[tuple[float, LengthDistribution], ...]

    def __post_init__(self) -> None:
        weights = [weight for weight, _ in self.parts]
        if not weights or min(weights) < 0 or not 0 < sum(weights) < inf:
            raise ConfigError("parts", weights, "weights must be at least 0, and not all 0")

    def draw(self, count: int, rng: Generator) -> Ints:
        weights = np.array([weight for weight, _ in self.parts])
        chosen = rng.choice(len(self.parts), size=count, p=weights / weights.sum())
        drawn = np.stack([part.draw(count, rng) for _, part in self.parts])
        return np.asarray(drawn[chosen, np.arange(count)], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Log-linear between given quantiles: pairs of (share of lengths at or below, tokens).

    The first share is 0 (the shortest length) and the last 1 (the longest).
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        first, last = self.points[:1], self.points[-1:]
        ends_fit = [share for share, _ in first + last] == [0, 1] and first[0][1] >= 1
        ascending = all(p < q and a <= b for (p, a), (q, b) in pairwise(self.points))
        require(ends_fit and ascending, "points", self.points, "must ascend from share 0 to "
                "share 1, with lengths of at least 1 token")  # fmt: skip

    @property
    def mean(self) -> float:
        """Mean length, tokens, before rounding: each piece has mean (b - a) / ln(b / a)."""
        total = 0.0
        for (p, a), (q, b) in pairwise(self.points):
            total += (q - p) * (a if a == b else (b - a) / log(b / a))
        return total

    def draw(self, count: int, rng: Generator) -> Ints:
        shares, tokens = np.array(self.points).T
        drawn = np.exp(np.interp(rng.random(count), shares, np.log(tokens)))
        lengths: Ints = np.maximum(np.rint(drawn), 1).astype(np.int64)
        return lengths


_ARRIVALS: dict[str, tuple[Callable[..., ArrivalProcess], str]] = {
    "poisson": (Poisson, "rate"),
    "gamma": (Gamma, "rate:cv"),
    "constant": (Constant, "rate"),
    "burst": (Burst, ""),
    "onoff": (OnOff, "rate:on_s:off_s"),
}
_LENGTHS: dict[str, tuple[Callable[..., LengthDistribution], str]] = {
    "fixed": (Fixed, "tokens"),
    "uniform": (Uniform, "low:high"),
    "lognormal": (LogNormal, "median:sigma"),
}


def parse_arrivals(text: str) -> ArrivalProcess:
    """Return the process that a text such as `poisson:2.5` or `gamma:2.5:3` names."""
    make, numbers = _parse("arrivals", text, _ARRIVALS)
    process: ArrivalProcess = make(*map(float, numbers))
    return process


def parse_lengths(text: str) -> LengthDistribution:
    """Return the distribution that a text such as `fixed:512` or `lognormal:800:1.1` names."""
    make, numbers = _parse("lengths", text, _LENGTHS)
    whole = make in (Fixed, Uniform)
    try:
        distribution: LengthDistribution = make(*[int(n) if whole else float(n) for n in numbers])
    except ValueError as error:
        raise ConfigError("lengths", text, "lengths must be whole numbers of tokens") from error
    return distribution


def _parse(
    field: str, text: str, known: dict[str, tuple[Callable[..., Any], str]]
) -> tuple[Callable[..., Any], list[str]]:
    name, *numbers = text.split(":")
    forms = [f"{key}:{names}".rstrip(":") for key, (_, names) in known.items()]
    wanted = known[name][1].split(":") if name in known and known[name][1] else []
    if name not in known or len(numbers) != len(wanted) or not all(map(_is_number, numbers)):
        raise ConfigError(field, text, f"must be one of {', '.join(forms)}")
    return known[name][0], numbers


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _from_gaps(gaps_s: NDArray[np.float64]) -> Ints:
    """Return times from gaps; the first gap lies before the trace begins."""
    times_s = np.cumsum(gaps_s)
    return _whole_ns(times_s - times_s[0])


def _whole_ns(times_s: NDArray[np.float64]) -> Ints:
    times_ns: Ints = np.rint(times_s * _NS_PER_S).astype(np.int64)
    return times_ns


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(0 < value < inf, name, value, "must be a finite number above 0")


def _lengths(owner: object, *names: str) -> None:
    least = 1
    for name in names:
        value = getattr(owner, name)
        require(type(value) is int and least <= value < 2**31, name, value,
                f"must be a whole number of tokens from {least} on")  # fmt: skip
        least = value
