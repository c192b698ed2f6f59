"""Traces x loads x settings x placements x policies x seeds: what a lab runs, and its running.

Every run is described before the first one begins, so that a mistake is told at once. Runs of one
seed, trace and load serve the same workload, whatever the policy: differences are paired. The
first of each axis is the baseline.

Read next: `store.py` (results by content), `statistics.py` (what the rows say),
`minideepinfer/lab_result.py` (the measures).
"""

import os
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from mdi_shared.config import SchedulerConfig
from mdi_shared.describe_run import OPTIONS, RunOptions, describe_run
from mdi_shared.errors import ConfigError, require, require_int
from mdi_shared.policies import Policy
from mdi_shared.run_description import RunDescription
from mdi_shared.served import Served
from mdi_sim.executors import Workers
from mdi_sim.many import as_they_end
from mdi_sim.search.rows import MEASURE_NAMES, Row
from mdi_sim.search.slo import ServiceLevel
from mdi_sim.search.store import Store, code_hash, described_json, run_key, trace_hash

AS_RECORDED, DEFAULT = "as recorded", "default"
LOAD_KINDS = ("rate", "speed", "arrivals")
MOST_RUNS = 1_000_000
MOST_SEED = 2**63 - 1  # as the table holds it
_OWN_AXES = ("policy", "placement", "seed", "served")  # no setting changes them


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of a lab: where it stands in the plan, its description, and its result's name.

    `is_kept` is False for a policy of the caller's own, whose code no key knows.
    """

    trace: str
    load: str
    setting: str
    placement: str
    policy: str
    seed: int
    run: RunDescription
    trace_hash: str
    slo: str | None
    key: str
    is_kept: bool
    code: str = field(default_factory=code_hash)

    def row(self, measures: Mapping[str, Any], error: str | None, wall_s: float) -> Row:
        """Return the result as a row; the measures of a failed run are null."""
        values = {name: measures.get(name) for name in MEASURE_NAMES}
        return {**self._identity(), "error": error, "wall_s": wall_s, **values}

    def named(self, row: Row) -> Row:
        """Return a kept row under the names of this plan: another lab may have had others."""
        return {**row, **self._identity()}

    def _identity(self) -> Row:
        return {
            "key": self.key, "trace": self.trace, "trace_hash": self.trace_hash, "load": self.load,
            "setting": self.setting, "placement": self.placement, "policy": self.policy,
            "seed": self.seed, "slo": self.slo, "description": described_json(self.run),
            "code": self.code,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The axes of a lab, each in the order of its values; names stand in the rows.

    A `load` is a text: `rate=6` (or 6) requests a second, `speed=2`, `arrivals=poisson:6`, or "as
    recorded". A setting changes options of the run or the scheduler, by name. `options` are those
    of `describe_run` that all share. Raises `ConfigError` naming axis, value and what is allowed.
    """

    traces: Mapping[str, Served]
    policies: Mapping[str, str | Policy]
    loads: Sequence[str] = (AS_RECORDED,)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {DEFAULT: {}})
    placements: Sequence[str] = ("round_robin",)
    seeds: Sequence[int] = (0,)
    slo: ServiceLevel | None = None
    base: RunDescription | None = None
    options: RunOptions = field(default_factory=lambda: RunOptions())

    def __post_init__(self) -> None:
        for axis in ("traces", "policies", "loads", "settings", "placements", "seeds"):
            values = list(getattr(self, axis))
            if axis == "loads":
                values = [load_name(load) for load in values]
            require(bool(values), axis, values, "must name at least one")
            twice = next((each for each in values if values.count(each) > 1), None)
            require(twice is None, axis, twice, "is given twice")
        for seed in self.seeds:
            require_int("seeds", seed, 0, MOST_SEED)

    @property
    def variants(self) -> list[tuple[str, str, str]]:
        """Every (setting, placement, policy), the baseline first."""
        return list(product(self.settings, self.placements, self.policies))

    def plan(self) -> list[Planned]:
        """Return every run in order: seed, trace, setting, load, placement, policy.

        Where a seed draws nothing (recorded times, no drafts), only the first one is planned.
        """
        slo = self.slo
        require(slo is None or not slo.statistics, "slo", str(slo), "a lab takes bounds on each "
                "request, such as ttft<=300; those on statistics are for mdi capacity")  # fmt: skip
        runs = PlannedRuns(self)
        planned: list[Planned] = []
        for seed, trace, setting, load in product(
            self.seeds, self.traces, self.settings, self.loads
        ):
            if seed == self.seeds[0] or runs.is_drawn(trace, setting, load):
                for placement, policy in product(self.placements, self.policies):
                    planned.append(runs.at(trace, load, (setting, placement, policy), seed))
        require(len(planned) <= MOST_RUNS, "runs", len(planned), f"must be at most {MOST_RUNS:,}")
        return planned

    def to_json(self) -> dict[str, Any]:
        """Return the names on each axis and the bounds, as the table's metadata has them."""
        return {
            "traces": list(self.traces), "loads": [load_name(load) for load in self.loads],
            "settings": {name: dict(changed) for name, changed in self.settings.items()},
            "placements": list(self.placements), "policies": list(self.policies),
            "seeds": list(self.seeds), "slo": None if self.slo is None else str(self.slo),
        }  # fmt: skip


class PlannedRuns:
    """Makes the runs of a lab; its traces are hashed and its settings described once."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._hashes = {name: _hash(served) for name, served in lab.traces.items()}
        self._described = {name: _described(lab, name) for name in lab.settings}

    def is_drawn(self, trace: str, setting: str, load: str) -> bool:
        """Say whether a seed changes anything: workload, arrivals or accepted drafts are drawn."""
        served = served_under(self._lab.traces[trace], load)
        drafts = self._described[setting].scheduler.num_draft_tokens > 0
        return served.workload is not None or served.arrivals is not None or drafts

    def at(self, trace: str, load: str, variant: tuple[str, str, str], seed: int) -> Planned:
        """Return the run of a variant (setting, placement, policy) on a workload."""
        lab, of_trace = self._lab, self._hashes[trace]
        setting, placement, policy = variant
        given = lab.policies[policy]
        run = replace(
            self._described[setting], seed=seed, policy=given, placement=placement,
            served=served_under(lab.traces[trace], load),
        )  # fmt: skip
        slo = None if lab.slo is None else lab.slo.of_requests
        return Planned(
            trace, load_name(load), setting, placement, policy, seed, run, of_trace, slo,
            run_key(run, of_trace, slo), not isinstance(given, Policy),
        )  # fmt: skip


def run_lab(
    planned: Sequence[Planned], job: Callable[[Planned], Row], store: Store, workers: Workers
) -> Iterator[tuple[int, Row]]:
    """Yield the place in the plan and the row of each run as it ends, or is found in `store`.

    `job` makes the row of a run, in the workers. Each row is kept as it comes, and looked for just
    before its run is handed out, so that programs that share the folder share the work: each
    begins at a place of its own. Raises as `as_they_end` does.
    """
    known: list[tuple[int, Row]] = []

    def missing() -> Iterator[tuple[int, Planned]]:
        first = zlib.crc32(f"{platform.node()} {os.getpid()}".encode()) % max(len(planned), 1)
        for index in (*range(first, len(planned)), *range(first)):
            each = planned[index]
            row = store.get(each.key) if each.is_kept else None
            if row is None:
                yield index, each
            else:
                known.append((index, each.named(row)))

    for index, row in as_they_end(workers, job, missing()):
        if planned[index].is_kept:
            store.put(row)
        known.append((index, row))
        yield from known
        known.clear()
    yield from known


def served_under(served: Served, load: str) -> Served:
    """Return what is served under a load. Raises `ConfigError` for what is none."""
    name = load_name(load)
    if name == AS_RECORDED:
        return served
    kind, _, value = name.partition("=")
    given: str | float = value if kind == "arrivals" else float(value)
    return replace(served, **{kind: given})  # type: ignore[arg-type]


def load_name(load: str) -> str:
    """Return a load as it stands in rows: `6` is `rate=6`. Raises `ConfigError`."""
    text = str(load).strip()
    if text == AS_RECORDED:
        return text
    kind, equals, value = text.partition("=")
    if not equals:
        kind, value = "rate", text
    allowed = f"must be a rate, {', '.join(f'{each}=…' for each in LOAD_KINDS)} or {AS_RECORDED}"
    require(kind in LOAD_KINDS and value != "", "loads", load, allowed)
    if kind == "arrivals":
        return f"arrivals={value}"
    try:
        return f"{kind}={float(value):.12g}"
    except ValueError:
        raise ConfigError("loads", load, f"must be a number: {allowed}") from None


def _described(lab: Lab, setting: str) -> RunDescription:
    """Return the run under a setting, without its requests."""
    options, scheduler = _split(setting, lab.settings[setting])
    given: dict[str, Any] = dict(lab.options)
    shared = given.get("scheduler") or {}
    if scheduler:
        if isinstance(shared, SchedulerConfig):
            shared = asdict(shared)
        given["scheduler"] = {**shared, **scheduler}
    try:
        run = describe_run(lab.base, **{**given, **options})
        run.scheduler.require_pool_fits()
    except ConfigError as error:
        if setting == DEFAULT:
            raise
        where = f"setting {setting}: {error.field}"
        raise ConfigError(where, error.value, error.allowed) from error
    return run


def _hash(served: Served) -> str:
    """Return what tells traces apart by content; the code's hash knows the presets."""
    if served.workload is not None:
        return f"preset {served.workload}"
    require(isinstance(served.trace, str), "traces", served.trace, "must be one file or folder")
    return trace_hash(str(served.trace))


def _split(setting: str, changed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a setting's options of the run and those of the scheduler."""
    of_scheduler = [each.name for each in fields(SchedulerConfig)]
    of_run = [name for name in OPTIONS if name not in (*_OWN_AXES, "scheduler")]
    for name, value in changed.items():
        if name not in of_scheduler and name not in of_run:
            near = get_close_matches(name, [*of_scheduler, *of_run], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"setting {setting}: {name}", value,
                              f"unknown option; {hint}known: {', '.join([*of_scheduler, *of_run])}"
                              )  # fmt: skip
    return ({name: v for name, v in changed.items() if name in of_run},
            {name: v for name, v in changed.items() if name in of_scheduler})  # fmt: skip
