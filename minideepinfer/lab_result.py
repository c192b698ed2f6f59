"""`lab` for users: traces, policies, loads, settings and seeds in; a table and its meaning out.

Read next: `mdi_sim/search/lab.py` (the plan), `measures.py` (one run), `lab_report.py` (what is
shown), docs/lab.md.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mdi_shared.describe_run import RunOptions
from mdi_shared.errors import ConfigError, require_int
from mdi_shared.policies import Policy
from mdi_shared.run_description import RunDescription
from mdi_shared.served import Served
from mdi_sim.executors import open_workers
from mdi_sim.search.lab import AS_RECORDED, DEFAULT, Lab, Planned, run_lab, served_under
from mdi_sim.search.rows import FILE_NAME, Row, load_rows, rows_frame, save_rows
from mdi_sim.search.settings import DEFAULT_SEEDS
from mdi_sim.search.slo import parse_service_level
from mdi_sim.search.statistics import Standing, paired_differences, ranking
from mdi_sim.search.store import Store

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "lab"
FRONT = ("e2e_ms_mean", "e2e_ms_p99")  # mean against tail: what a size-based order gains and pays


@dataclass(frozen=True)
class LabResult:
    """The rows of a lab in the order of its plan, and the plan's names.

    `frame` has a column for each of `mdi_sim.search.rows.COLUMNS`. `missing` counts the runs that
    an interrupt left out.
    """

    frame: "pd.DataFrame"
    plan: Mapping[str, Any]
    missing: int = 0

    @cached_property
    def measure(self) -> str:
        """What ranks unless another measure is named: goodput with bounds, else mean latency."""
        return "e2e_ms_mean" if self.plan["slo"] is None else "goodput_share"

    @property
    def baseline(self) -> tuple[str, str, str]:
        """The variant (setting, placement, policy) that others are compared with."""
        plan = self.plan
        return next(iter(plan["settings"])), plan["placements"][0], plan["policies"][0]

    def ranking(
        self,
        measure: str | None = None,
        *,
        front: tuple[str, str] = FRONT,
        shown: Sequence[str] = (),
    ) -> list[Standing]:
        """Return the variants, best first; see `mdi_sim.search.statistics.ranking`."""
        return ranking(self.frame, measure or self.measure, front, self.baseline, shown)

    def differences(self, measure: str | None = None) -> "pd.DataFrame":
        """Return what each variant changes in each workload, with 95 % intervals."""
        return paired_differences(self.frame, measure or self.measure, self.baseline)

    def sentence(self, measure: str | None = None) -> str:
        """Say which variant is best, by how much, how sure that is, and what its tail pays."""
        from minideepinfer.lab_report import verdict

        return verdict(self, measure or self.measure)

    def table(self, measure: str | None = None) -> str:
        """Return the ranked table and the sentence as text."""
        from minideepinfer.lab_report import as_text

        return as_text(self, measure or self.measure)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LabResult":
        """Read `lab.parquet`, or the folder that holds it. Raises `ConfigError`."""
        found = Path(path)
        return cls(*load_rows(found / FILE_NAME if found.is_dir() else found))


def lab(
    traces: Sequence[str] | Mapping[str, Served],
    policies: Sequence[str] | Mapping[str, str | Policy],
    *,
    loads: Sequence[str | float] = (AS_RECORDED,),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    placements: Sequence[str] = ("round_robin",),
    seeds: int | Sequence[int] = DEFAULT_SEEDS,
    requests: int | None = None,
    slo: str | None = None,
    out: str | os.PathLike[str] = FOLDER,
    jobs: int = 1,
    cluster: str | None = None,
    on_run: Callable[[int], None] | None = None,
    description: RunDescription | None = None,
    **options: Unpack[RunOptions],
) -> LabResult:
    """Run every policy on every trace, load, setting and seed; keep the rows in the folder `out`.

    `traces` are workload presets (of `requests` requests) and files, or named `Served`. `policies`
    are specifications, or named ones and objects of your own (run anew each time). `seeds` are
    replicates, or how many; `slo` is a text as in docs/lab.md. What `out` holds already is not run
    again. `jobs` processes work, or the workers of `cluster`. `on_run` is called with 1 for each
    run that is there. Other options are those of `simulate`. Raises `ConfigError` before anything
    runs; a run that fails is a row with its `error`.
    """
    given = None if slo is None else parse_service_level(slo)
    wanted = Lab(
        traces=named_traces(traces, Served(), requests),
        policies=named_policies(policies), loads=[str(load) for load in loads],
        settings=settings or {DEFAULT: {}}, placements=tuple(placements), seeds=replicates(seeds),
        slo=given, base=description, options=options,
    )  # fmt: skip
    return perform(wanted, Path(out), jobs=jobs, cluster=cluster, on_run=on_run)


def perform(
    wanted: Lab,
    folder: Path,
    *,
    planned: Sequence[Planned] | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    on_run: Callable[[int], None] | None = None,
) -> LabResult:
    """Run a lab that is described already; an interrupt ends it early, with what there is.

    `planned` is its plan, where that was made before.
    """
    from minideepinfer.measures import run_planned

    if planned is None:
        planned = wanted.plan()
        check_traces(wanted)
    rows: dict[int, Row] = {}
    try:
        with open_workers(jobs, cluster) as workers:
            for index, row in run_lab(planned, run_planned, Store(folder), workers):
                rows[index] = row
                if on_run is not None:
                    on_run(1)
    except KeyboardInterrupt:
        if not rows:
            raise
    kept = [rows[index] for index in sorted(rows)]
    plan = wanted.to_json()
    folder.mkdir(parents=True, exist_ok=True)
    save_rows(folder / FILE_NAME, kept, plan)
    return LabResult(rows_frame(kept), plan, len(planned) - len(kept))


def named_traces(
    traces: Sequence[str] | Mapping[str, Served], shared: Served, requests: int | None = None
) -> Mapping[str, Served]:
    """Return what is served by name: presets of workloads, or files. Raises `ConfigError`.

    `shared` is what is done to all; options that only one kind takes go to that kind.
    """
    from mdi_traces.generate import WORKLOADS

    if isinstance(traces, Mapping):
        return traces
    given = shared.to_json()
    of_trace = {name: given.pop(name) for name in ("format", "limit", "sort") if name in given}
    found = {}
    for name in traces:
        if name in WORKLOADS:
            found[name] = Served(workload=name, requests=requests, **given)
        else:
            found[name] = Served(trace=str(name), **of_trace, **given)
    if len(found) < len(traces):
        raise ConfigError("traces", list(traces), "one is given twice")
    return found


def replicates(seeds: int | Sequence[int]) -> Sequence[int]:
    """Return the seeds, given as they are or as how many. Raises `ConfigError` for none."""
    if not isinstance(seeds, int):
        return seeds
    require_int("seeds", seeds, 1)
    return range(seeds)


def check_traces(wanted: Lab) -> None:
    """Load each trace once under its loads, so that one that is broken is told before any run.

    Of a file, whose times do not decide whether it can be read, only the first load is tried.
    """
    from minideepinfer.commands.describing import load_served

    for served in wanted.traces.values():
        loads = wanted.loads if served.workload is not None else wanted.loads[:1]
        for load in loads:
            load_served(served_under(served, load), wanted.seeds[0])


def named_policies(
    policies: Sequence[str] | Mapping[str, str | Policy],
) -> Mapping[str, str | Policy]:
    """Return specifications by name. Raises `ConfigError` for one that is given twice."""
    if isinstance(policies, Mapping):
        return policies
    found: dict[str, str | Policy] = {policy: policy for policy in policies}
    if len(found) < len(policies):
        raise ConfigError("policies", list(policies), "one is given twice")
    return found
