"""`mdi lab`: which policy, setting or placement serves which workloads best, and how sure that is.

Everything is described and every trace looked at before the first run. Results are kept one by one
in the folder `--out`: a killed lab goes on where it was, and a changed one runs what is new.

Read next: `minideepinfer/lab_result.py` (the same in Python), docs/lab.md,
`minideepinfer/lab_report.py` (what is shown).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mdi_shared.config import SchedulerConfig
from mdi_shared.describe_run import RunOptions
from mdi_shared.errors import ConfigError
from mdi_shared.policies import NO_POLICY
from mdi_shared.served import Served
from mdi_sim.search.settings import DEFAULT_SEEDS
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import FileOptions, scheduler_options, takes_options
from minideepinfer.commands.describing import MEMORY
from minideepinfer.commands.files import make_folder, require_folder, require_output
from minideepinfer.commands.screen import INTERRUPTED, progress, show_json, show_table, tell
from minideepinfer.commands.values import num_jobs, parse_pairs

if TYPE_CHECKING:
    from mdi_sim.search.lab import Lab
    from minideepinfer.lab_result import LabResult

AXES = "Axes"
FOLDER = Path("lab")
OF_SETTING = {"cost": str | None, "hardware": str | None, "ranks": int, "ep": int,
              "draft_accept_rate": float, "until_s": float, **MEMORY}  # fmt: skip

Slo = Annotated[str | None, o.option(
    "--slo", metavar="BOUNDS", panel=o.RESULTS,
    help="Bounds on each request, ms: ttft<=300,tpot<=30 (also e2e); of mdi capacity also on "
    "statistics, ttft.p99<=300, and share>=0.9.")]  # fmt: skip
Folder = Annotated[Path, o.option(
    "--out", "-o", metavar="FOLDER", panel=o.RESULTS,
    help="Where results are kept and found again (default: lab).")]  # fmt: skip
Cluster = Annotated[str | None, o.option(
    "--cluster", metavar="ADDRESS", help="Workers of a cluster instead of --jobs: "
    "dask://HOST:PORT or ray://HOST:PORT.")]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions(FileOptions):
    """Of any experiment of many runs: what varies, and what all runs share."""

    policies: Annotated[list[str] | None, o.option(
        "--policy", metavar="SPEC", panel=AXES,
        help="Scheduling policy; repeatable, the first is the baseline (default: fcfs).",
    )] = None  # fmt: skip
    settings: Annotated[list[str] | None, o.option(
        "--setting", metavar="NAME:KEY=VALUE,…", panel=AXES,
        help="Options of the scheduler or the run under a name; repeatable. The first is the "
        "baseline; `default:` changes nothing.")] = None  # fmt: skip
    placements: Annotated[list[str] | None, o.option(
        "--placement", metavar="NAME", panel=AXES,
        help="Which rank gets a request; repeatable (default: round_robin).")] = None  # fmt: skip
    seeds: Annotated[int, o.option(
        "--seeds", metavar="N", panel=AXES,
        help=f"Replicates: seeds 0 to N-1 (default: {DEFAULT_SEEDS}).",
    )] = DEFAULT_SEEDS  # fmt: skip
    requests: o.Requests = None
    format: o.Format = None
    limit: o.Limit = None
    sort: o.Sort = None
    closed_loop: o.ClosedLoop = None
    max_prompt: o.MaxPrompt = None
    max_output: o.MaxOutput = None
    cost: o.Cost = None
    ranks: o.Ranks = None
    kv_cache_memory_gb: o.KVMemory = None
    gpu_memory_utilization: o.Utilization = None
    model: o.ShapeName = None
    hardware: o.HardwareName = None
    ep: o.ExpertRanks = None
    draft_accept_rate: o.AcceptRate = None
    until_s: o.Until = None
    jobs: o.Jobs = None
    cluster: Cluster = None
    slo: Slo = None
    out: Folder = FOLDER
    json: o.Json = False


@dataclass(frozen=True, kw_only=True)
class LabOptions(ExperimentOptions):
    """What `mdi lab` can be asked for."""

    traces: Annotated[list[str] | None, typer.Argument(
        metavar="TRACE…", show_default=False,
        help="Workload presets (mdi generate-workload --list) and trace files.",
    )] = None  # fmt: skip
    loads: Annotated[list[str] | None, o.option(
        "--load", metavar="LOAD", panel=AXES,
        help="A rate, rate=6, speed=2, arrivals=poisson:6, or 'as recorded' (the default); "
        "repeatable.")] = None  # fmt: skip
    rank_by: Annotated[str | None, o.option(
        "--rank-by", metavar="COLUMN", panel=o.RESULTS,
        help="Column of the table that ranks (default: goodput_share with --slo, else "
        "e2e_ms_mean).")] = None  # fmt: skip
    html: o.Html = None


@takes_options(LabOptions)
def lab(options: LabOptions) -> None:
    """Run traces x loads x settings x placements x policies x seeds, and say which is best.

    One row per run, with its whole description, in FOLDER/lab.parquet. What FOLDER holds already
    is not run again.
    """
    require_folder("out", options.out)
    if options.html is not None:
        require_output("html", options.html, (".html",))
    jobs = num_jobs(options.jobs)
    from mdi_sim.executors import require_cluster
    from mdi_sim.search.statistics import require_measure
    from minideepinfer.lab_result import check_traces, perform

    require_cluster(options.cluster)
    if options.rank_by is not None:
        require_measure(options.rank_by, "rank_by")
    wanted = described_lab(options, options.traces, options.loads)
    planned = wanted.plan()
    check_traces(wanted)
    with progress(len(planned), "runs") as on_run:
        found = perform(wanted, options.out, planned=planned, jobs=jobs,
                        cluster=options.cluster, on_run=on_run)  # fmt: skip
    from minideepinfer.lab_report import document, tables

    tell(f"wrote {options.out / 'lab.parquet'} ({len(found.frame)} runs)")
    measure = options.rank_by or found.measure
    if options.html is not None:
        _save_page(found, measure, options.html)
    if options.json:
        show_json(document(found, measure))
    else:
        show_table(*tables(found, measure))
    if found.missing:
        raise typer.Exit(INTERRUPTED)


def _save_page(found: "LabResult", measure: str, path: Path) -> None:
    from mdi_analysis import save_page
    from minideepinfer.lab_page import lab_page

    make_folder(path)
    save_page(lab_page(found, measure), path)
    tell(f"wrote {path}")


def described_lab(
    options: ExperimentOptions, traces: list[str] | None, loads: list[str] | None
) -> "Lab":
    """Return the lab that the options describe. Raises `ConfigError`."""
    from mdi_sim.search.lab import AS_RECORDED, DEFAULT, Lab
    from mdi_sim.search.slo import parse_service_level
    from minideepinfer.lab_result import named_policies, named_traces, replicates

    if not traces:
        raise ConfigError("traces", None, "name at least one: a workload preset or a trace file")
    shared = Served(
        format=options.format, limit=options.limit, sort=options.sort,
        closed_loop=options.closed_loop, max_prompt=options.max_prompt,
        max_output=options.max_output,
    )  # fmt: skip
    return Lab(
        traces=named_traces(traces, shared, options.requests),
        policies=named_policies(options.policies or [NO_POLICY]), loads=loads or [AS_RECORDED],
        settings=_settings(options.settings) if options.settings else {DEFAULT: {}},
        placements=options.placements or ["round_robin"], seeds=replicates(options.seeds),
        slo=None if options.slo is None else parse_service_level(options.slo),
        base=options.base, options=_run_options(options),
    )  # fmt: skip


def _run_options(options: ExperimentOptions) -> RunOptions:
    """Return what all runs share, as `describe_run` takes it."""
    scheduler = scheduler_options(options, MEMORY)
    memory: dict[str, Any] = {}
    for name in MEMORY:
        flag = getattr(options, name)
        if flag is not None and name in scheduler:
            raise ConfigError(name, flag, "is set twice")
        memory[name] = scheduler.pop(name, flag)
    return RunOptions(
        scheduler=scheduler or None, shape=options.model, hardware=options.hardware,
        ep=options.ep, cost=options.cost, ranks=options.ranks, until_s=options.until_s,
        draft_accept_rate=options.draft_accept_rate,
        kv_cache_memory_gb=memory["kv_cache_memory_gb"],
        gpu_memory_utilization=memory["gpu_memory_utilization"],
    )  # fmt: skip


def _settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Read `NAME:KEY=VALUE,KEY=VALUE`. Raises `ConfigError`."""
    types = {**get_type_hints(SchedulerConfig), **OF_SETTING}
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, colon, pairs = text.partition(":")
        name = name.strip()
        if not colon or not name:
            raise ConfigError("setting", text, "must be NAME:KEY=VALUE,KEY=VALUE")
        if name in found:
            raise ConfigError("setting", text, f"{name} is given twice")
        given = [pair for pair in pairs.split(",") if pair.strip()]
        try:
            found[name] = parse_pairs(given, types)
        except ConfigError as error:
            where = f"setting {name}: {error.field}"
            raise ConfigError(where, error.value, error.allowed) from error
    return found
