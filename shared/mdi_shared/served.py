"""What a run serves: a request trace in a file, or a generated workload, and what is done to it.

Plain data with its rules; nothing is read or drawn here.

Read next: `run_description.py`, of which this is a part; `minideepinfer/requests.py` (reads it).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from mdi_shared.errors import ConfigError, require, require_int

OF_WORKLOAD = ("requests",)
OF_TRACE = ("format", "limit", "sort")
DEFAULT_REQUESTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The requests of a run; None is "as they are". Without trace and workload: given as data.

    `requests` belong to a workload, `format`, `limit` (rows) and `sort` to a trace. `rate` (per
    second) and `arrivals` replace a preset's times, or a trace's own. `closed_loop` False drops
    think times. `speed` divides all times; prompts and outputs are cut to `max_prompt`
    and `max_output` tokens. Raises `ConfigError` for values out of range and those that contradict
    each other.
    """

    trace: str | None = None
    workload: str | None = None
    requests: int | None = None
    rate: float | None = None
    arrivals: str | None = None
    format: str | None = None
    limit: int | None = None
    sort: bool | None = None
    closed_loop: bool | None = None
    speed: float | None = None
    max_prompt: int | None = None
    max_output: int | None = None

    def __post_init__(self) -> None:
        given = self.to_json()
        for name in ("requests", "limit", "max_prompt", "max_output"):
            require_int(name, given.get(name, 1), 1)
        for name in ("rate", "speed"):
            holds = 0 < given.get(name, 1) < inf
            require(holds, name, given.get(name), "must be a finite number above 0")
        require(self.trace is None or self.workload is None, "workload", self.workload,
                f"contradicts the trace {self.trace}: give one of them")  # fmt: skip
        require(self.rate is None or self.arrivals is None, "rate", self.rate,
                f"contradicts arrivals = {self.arrivals}: give one of them")  # fmt: skip
        for source, others, why in (
            ("trace", OF_WORKLOAD, "belongs to a workload; a trace takes limit"),
            ("workload", OF_TRACE, "belongs to a trace file, not to a workload"),
        ):
            for name in others if source in given else ():
                require(name not in given, name, given.get(name), why)

    def to_json(self) -> dict[str, Any]:
        """Return what was given; `from_json` inverts it."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Served":
        """Build from names and values; an unknown name is an error that lists the known ones."""
        known = [field.name for field in fields(cls)]
        for name, value in data.items():
            if name not in known:
                raise ConfigError(f"served.{name}", value, f"unknown; known: {', '.join(known)}")
        return cls(**data)
