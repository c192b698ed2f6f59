"""Service levels as one text: `ttft.p99<=300,tpot.mean<=20` or `ttft<=300,tpot<=20,share>=0.95`.

Bounds are joined by commas; all must hold. Latencies are in ms.

- `METRIC.STATISTIC<=MS` bounds a statistic of all completed requests: METRIC is ttft, tpot, itl,
  e2e or queue, STATISTIC mean, p50, p90, p99 or max.
- `METRIC<=MS`, or `METRIC=MS`, bounds each request; METRIC is ttft, tpot or e2e.
- `share>=S`: at least this share of all requests (0.9 unless given) completes, and within the
  bounds on each request.

Read next: `capacity.py` (the highest rate at which one holds), `mdi_analysis/metrics.py` (`SLO`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from mdi_shared.errors import ConfigError
from mdi_sim.search.rows import LATENCY_NAMES, STATISTICS

PER_REQUEST = ("ttft", "tpot", "e2e")
DEFAULT_SHARE = 0.9
_BOUND = re.compile(r"(?P<metric>\w+)(?:\.(?P<statistic>\w+))?(?P<sign><=|>=|=)(?P<value>[^=<>]+)")
_ALLOWED = (
    f"must be METRIC.STATISTIC<=MS ({', '.join(LATENCY_NAMES)}; {', '.join(STATISTICS)}), "
    f"METRIC<=MS ({', '.join(PER_REQUEST)}) or share>=S"
)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Bounds: of statistics (by column of a row, ms), of each request (by metric, ms), a share."""

    statistics: tuple[tuple[str, float], ...]
    per_request: tuple[tuple[str, float], ...]
    share: float

    def __str__(self) -> str:
        parts = [f"{_spelt(column)}<={limit:g}" for column, limit in self.statistics]
        own = self.of_requests
        parts += [own] if own is not None else []
        return ",".join([*parts, f"share>={self.share:g}"])

    @property
    def of_requests(self) -> str | None:
        """The bounds on each request as a text; None without any."""
        return ",".join(f"{name}<={limit:g}" for name, limit in self.per_request) or None

    def strain(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return for each bound how near a run is to it: at most 1 where it holds.

        Latency over its limit; of the share, wanted over found. A statistic of a latency that no
        request has is 0, such as TPOT where all outputs have one token.
        """
        nobody = not row["completed"]
        found = {
            f"{_spelt(column)}<={limit:g}": inf if nobody else (row[column] or 0.0) / limit
            for column, limit in self.statistics
        }
        share = row["goodput_share"] or 0.0
        found[self._share_bound(row)] = self.share / share if share else inf
        return found

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Say whether a run keeps every bound."""
        return all(strain <= 1 for strain in self.strain(row).values())

    def breaks(self, row: Mapping[str, Any]) -> str:
        """Return the bound that a run is furthest beyond, or nearest to."""
        strain = self.strain(row)
        return max(strain, key=lambda bound: strain[bound])

    def _share_bound(self, row: Mapping[str, Any]) -> str:
        """Return the bound on each request that the fewest meet, or the share itself."""
        if not self.per_request:
            return f"share>={self.share:g}"
        name, limit = min(self.per_request, key=lambda each: row[f"within_{each[0]}_share"] or 0.0)
        return f"{name}<={limit:g} for {self.share:.0%}"


def parse_service_level(text: str) -> ServiceLevel:
    """Read bounds as described above. Raises `ConfigError`."""
    statistics: dict[str, float] = {}
    per_request: dict[str, float] = {}
    share: float | None = None
    for part in text.split(","):
        bound = _BOUND.fullmatch("".join(part.split()))
        if bound is None:
            raise ConfigError("slo", part, _ALLOWED)
        metric, statistic, sign, value = bound.groups()
        number = _number(part, value)
        if metric == "share" and statistic is None and sign == ">=":
            if share is not None or not 0 < number <= 1:
                why = "is set twice" if share is not None else "must be above 0 and at most 1"
                raise ConfigError("slo", part, why)
            share = number
        elif metric in LATENCY_NAMES and statistic in STATISTICS and sign == "<=":
            _put(statistics, f"{metric}_ms_{statistic}", number, part)
        elif metric in PER_REQUEST and statistic is None and sign != ">=":
            _put(per_request, metric, number, part)
        else:
            raise ConfigError("slo", part, _ALLOWED)
    return ServiceLevel(
        tuple(statistics.items()), tuple((name, per_request[name]) for name in PER_REQUEST
                                         if name in per_request),
        DEFAULT_SHARE if share is None else share,
    )  # fmt: skip


def _put(bounds: dict[str, float], name: str, limit: float, part: str) -> None:
    if name in bounds:
        raise ConfigError("slo", part, "is set twice")
    if limit <= 0:
        raise ConfigError("slo", part, "must be a number of ms above 0")
    bounds[name] = limit


def _number(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError("slo", part, "must be a number of ms, without a unit") from None
    if not isfinite(value):
        raise ConfigError("slo", part, "must be a finite number")
    return value


def _spelt(column: str) -> str:
    return column.replace("_ms_", ".")
