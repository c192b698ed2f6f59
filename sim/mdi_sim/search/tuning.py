"""What a tuning found: its trials, the best of them, and how sure the gain is.

Read next: `tune.py` (the search), docs/tuning.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mdi_shared.config import SchedulerConfig

THROUGHPUT, GOODPUT = "throughput", "goodput"
OBJECTIVES = (THROUGHPUT, GOODPUT)
TOKENS_S = "tokens_s"


@dataclass(frozen=True, slots=True)
class Measured:
    """What counts of one simulated run.

    `tokens_s` is input and output tokens per second over the run's span, all ranks together,
    `goodput` the share of requests within the SLO (None without one), latencies are ms.
    `extrapolated` counts steps outside what a fitted model has seen (None for another model).
    """

    tokens_s: float
    goodput: float | None
    completed: int
    requests: int
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    steps: int
    extrapolated: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting and how it did; `error` says why it could not run."""

    config: SchedulerConfig
    measured: Measured | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A setting with the step times all longer, and all shorter, by the model's error."""

    slower: Measured
    faster: Measured

    @property
    def ends(self) -> tuple[Measured, Measured]:
        return self.slower, self.faster


@dataclass(frozen=True, slots=True)
class Gain:
    """What `best` gains over the default in `metric`, "goodput" or "tokens_s".

    Of goodput it is a difference of shares, of tokens_s a ratio less 1. `low` and `high` hold if
    the model is off in opposite directions for the two settings, whose steps differ; `alike` if it
    is off in the same direction, both slower and both faster. None when its error is not known.
    """

    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    alike: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """All trials in the order they were chosen, the default first, and the best of them.

    `interrupted` means that the search, or the runs for the error bars, did not end.
    """

    objective: str
    trials: tuple[Trial, ...]
    best: Trial
    default_range: Range | None
    best_range: Range | None
    interrupted: bool
    notes: tuple[str, ...]

    @property
    def default(self) -> Trial:
        return self.trials[0]

    @property
    def gain(self) -> Gain:
        """Return the gain; of goodput, unless both are equal and throughput decided."""
        best, base = self.best.measured, self.default.measured
        assert best is not None, "the best trial ran"
        if base is None:
            return Gain(TOKENS_S, float("inf"))
        by_goodput = self.objective == GOODPUT and best.goodput != base.goodput
        metric = GOODPUT if by_goodput else TOKENS_S
        value = _difference(metric, best, base)
        if self.best is self.default:
            return Gain(metric, 0.0, 0.0, 0.0, (0.0, 0.0))
        if self.default_range is None or self.best_range is None:
            return Gain(metric, value)
        # The middle too: with bounds on latency it need not lie between the ends.
        own, other = (*self.best_range.ends, best), (*self.default_range.ends, base)
        every = [_difference(metric, a, b) for a in own for b in other]
        alike = [_difference(metric, a, b) for a, b in zip(own, other, strict=True)]
        return Gain(metric, value, min(every), max(every), (min(alike), max(alike)))

    @property
    def is_beyond_error(self) -> bool | None:
        """Say whether the gain exceeds the model's error; None when that error is not known."""
        low = self.gain.low
        return None if low is None else low > 0

    def pareto(self) -> list[Trial]:
        """Return the trials that no other beats in all of: objective, P99 of TTFT, P99 of TPOT.

        The best objective comes first.
        """
        ran = [trial for trial in self.trials if trial.measured is not None]
        costs = [_costs(self.objective, trial) for trial in ran]
        front = [
            index
            for index, own in enumerate(costs)
            if not any(_dominates(other, own) or (other == own and at < index)
                       for at, other in enumerate(costs))
        ]  # fmt: skip
        return [ran[index] for index in sorted(front, key=lambda index: costs[index])]


def merit(objective: str, measured: Measured | None) -> tuple[float, ...]:
    """Return what is maximised, the first entry before the second."""
    assert measured is not None, "only trials that ran are compared"
    if objective == THROUGHPUT:
        return (measured.tokens_s,)
    assert measured.goodput is not None, "goodput needs an SLO"
    return measured.goodput, measured.tokens_s


def _costs(objective: str, trial: Trial) -> tuple[float, float, float]:
    """Return what is minimised on the Pareto front; a latency nobody has is 0."""
    measured = trial.measured
    value = merit(objective, measured)[0]
    assert measured is not None, "only trials that ran are compared"
    return -value, measured.ttft_p99_ms or 0.0, measured.tpot_p99_ms or 0.0


def _dominates(a: Iterable[float], b: Iterable[float]) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def _value(metric: str, measured: Measured) -> float:
    value = measured.goodput if metric == GOODPUT else measured.tokens_s
    assert value is not None, "goodput needs an SLO"
    return value


def _difference(metric: str, a: Measured, b: Measured) -> float:
    """Return what `a` has over `b`: a difference of shares, or a ratio less 1."""
    if metric == GOODPUT:
        assert a.goodput is not None, "goodput needs an SLO"
        assert b.goodput is not None, "goodput needs an SLO"
        return a.goodput - b.goodput
    return a.tokens_s / b.tokens_s - 1.0 if b.tokens_s > 0 else float("inf")
