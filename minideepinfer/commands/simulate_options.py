"""Options of `mdi simulate` and `mdi tune`: the command line over a TOML file over defaults.

A file has a table named like the verb, with its options under their field names, and
`[scheduler]`, with those of `SchedulerConfig`; `--set` overrides the latter. Paths count from the
current folder.

Read next: `simulate.py` and `tune.py`, which run them.
"""
# ruff: noqa: RUF009 - `option` returns a dataclass field, as `dataclasses.field` does

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.hardware import HARDWARE
from mdi_shared.cost.shape import SHAPES
from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_shared.placement import PLACEMENTS
from minideepinfer.commands.declare import Given, argument, option
from minideepinfer.commands.values import parse_pairs, read_config

REQUESTS, ENGINE, CONFIG, RESULTS = "Requests", "Engine", "Configuration", "Results"
DEFAULT_REQUESTS = 1_000
DEFAULT_HARDWARE = "h200"
DEFAULT_MODEL = "v41-flash"
DEFAULT_ACCEPT_RATE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What is served, and on what: shared by the verbs that simulate; None is "not given"."""

    trace: Path | None = argument(help="Request trace in any known format.")
    workload: str | None = option(
        None, "--workload", metavar="PRESET", panel=REQUESTS,
        help="Generated requests instead of a trace; see: mdi generate-workload --list.",
    )  # fmt: skip
    requests: int | None = option(
        None, "--requests", "-n", metavar="N", panel=REQUESTS,
        help=f"Size of the workload (default: {DEFAULT_REQUESTS}).",
    )  # fmt: skip
    rate: float | None = option(
        None, "--rate", metavar="R", panel=REQUESTS,
        help="Requests (or sessions) per second of the workload, instead of the preset's.",
    )  # fmt: skip
    arrivals: str | None = option(
        None, "--arrivals", metavar="PROCESS", panel=REQUESTS,
        help="Arrival times for a workload or for a trace without any: poisson:5, burst, …",
    )  # fmt: skip
    format: str | None = option(
        None, "--format", metavar="NAME", panel=REQUESTS,
        help="Format of the trace, instead of recognising it.",
    )  # fmt: skip
    limit: int | None = option(
        None, "--limit", metavar="N", panel=REQUESTS, help="First N rows of the trace only."
    )
    sort: bool | None = option(
        None, "--sort", panel=REQUESTS, help="Order the trace by arrival first."
    )
    closed_loop: bool | None = option(
        None, "--closed-loop/--open-loop", panel=REQUESTS,
        help="Turns of a session wait for the turn before, or come at their recorded time.",
    )  # fmt: skip
    speed: float | None = option(
        None, "--speed", metavar="X", panel=REQUESTS, help="Divide all times of the requests by X."
    )
    model: str | None = option(
        None, "--model", panel=ENGINE,
        help=f"One of {', '.join(SHAPES)} (default: what --cost was fitted for, or "
        f"{DEFAULT_MODEL}).",
    )  # fmt: skip
    hardware: str | None = option(
        None, "--hardware", panel=ENGINE,
        help=f"Roofline of one of {', '.join(HARDWARE)} (default: {DEFAULT_HARDWARE}).",
    )  # fmt: skip
    cost: Path | None = option(
        None, "--cost", metavar="FILE.json", panel=ENGINE,
        help="Fitted or predicted step-time model instead of the roofline.",
    )  # fmt: skip
    ranks: int = option(1, "--ranks", metavar="N", help="Data-parallel ranks.", panel=ENGINE)
    ep: int | None = option(
        None, "--ep", metavar="N", panel=ENGINE,
        help="Ranks the roofline splits the experts over (default: all).",
    )  # fmt: skip
    placement: str = option(
        "round_robin", "--placement", help=f"One of {', '.join(PLACEMENTS)}.", panel=ENGINE
    )
    kv_cache_memory_gb: float | None = option(
        None, "--kv-cache-memory-gb", metavar="GB", panel=ENGINE,
        help="Size of the KV pool, 10^9 bytes, instead of num_blocks.",
    )  # fmt: skip
    draft_accept_rate: float | None = option(
        None, "--draft-accept-rate", metavar="P", panel=ENGINE,
        help="Chance that a draft token is accepted "
        f"(default: {DEFAULT_ACCEPT_RATE}); needs num_draft_tokens.",
    )  # fmt: skip
    seed: int = option(0, "--seed", metavar="N", help="Of workload and acceptance.", panel=ENGINE)
    until_s: float | None = option(
        None, "--until", "--until-s", metavar="S", panel=ENGINE,
        help="Stop at S virtual seconds; what is open then is reported unfinished.",
    )  # fmt: skip
    config: Path | None = option(
        None, "--config", metavar="FILE.toml", panel=CONFIG, in_file=False,
        help="A file with tables scheduler and simulate.",
    )  # fmt: skip
    set: list[str] = option(
        (), "--set", metavar="KEY=VALUE", panel=CONFIG, in_file=False,
        help="Scheduler option, such as max_num_batched_tokens=4096; may be repeated.",
    )  # fmt: skip
    json: bool | None = option(
        None, "--json", panel=RESULTS, in_file=False, help="Print one JSON document, no tables."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(ServingOptions):
    """What `mdi simulate` can be asked for."""

    fast_forward: bool = option(
        True, "--fast-forward/--no-fast-forward", panel=ENGINE,
        help="Advance unchanging decode batches as one event; the result is the same.",
    )  # fmt: skip
    slo_ttft_ms: float | None = option(
        None, "--slo-ttft-ms", metavar="MS", panel=RESULTS, help="Bound on TTFT for goodput."
    )
    slo_tpot_ms: float | None = option(
        None, "--slo-tpot-ms", metavar="MS", panel=RESULTS, help="Bound on TPOT for goodput."
    )
    out: Path | None = option(
        None, "--out", "-o", metavar="PREFIX", panel=RESULTS,
        help="Save the run's tables as PREFIX.steps.parquet and so on.",
    )  # fmt: skip
    plots: Path | None = option(
        None, "--plots", metavar="DIR", panel=RESULTS, help="Draw the run as PNG files."
    )
    perfetto: Path | None = option(
        None, "--perfetto", metavar="FILE.json", panel=RESULTS,
        help="Export for ui.perfetto.dev, .json or .json.gz.",
    )  # fmt: skip


SCHEDULER_TYPES = get_type_hints(SchedulerConfig)
Options = TypeVar("Options", bound=ServingOptions)


def settle(
    given: Given, kind: type[Options], verb: str = "simulate"
) -> tuple[Options, dict[str, Any]]:
    """Return the options and the scheduler's, from the command line and the file it names.

    The file's table is named by the `verb`. Raises `ConfigError` for an unknown or mistyped
    option, and for two that contradict each other.
    """
    types = {
        name: declared
        for name, declared in get_type_hints(kind).items()
        if kind.__dataclass_fields__[name].metadata["in_file"]
    }
    tables = {"scheduler": SCHEDULER_TYPES, verb: types}
    from_file = read_config(given["config"], tables) if "config" in given else {}
    options = kind(**{**from_file.get(verb, {}), **given})
    scheduler = {
        **from_file.get("scheduler", {}),
        **parse_pairs(given.get("set", ()), SCHEDULER_TYPES),
    }
    _check_source(options)
    _check_engine(options, scheduler)
    return options, scheduler


def _check_source(options: ServingOptions) -> None:
    trace, workload = options.trace, options.workload
    if trace is None and workload is None:
        raise MiniDeepInferError("nothing to simulate: give a request trace, or --workload PRESET "
                                 "(mdi generate-workload --list shows the presets)")  # fmt: skip
    if trace is not None and workload is not None:
        raise ConfigError("workload", workload, f"contradicts the trace {trace}: give one of them")
    if trace is not None:
        _refuse(options, ("requests", "rate"), "belongs to --workload; a trace takes limit, speed")
    else:
        _refuse(options, ("format", "limit", "sort"), "belongs to a trace file, not to --workload")


def _check_engine(options: ServingOptions, scheduler: Mapping[str, Any]) -> None:
    if options.cost is not None:
        _refuse(options, ("hardware", "ep"), "belongs to the roofline, which --cost replaces")
    rate = options.draft_accept_rate
    if rate is not None and not 0 <= rate <= 1:
        raise ConfigError("draft_accept_rate", rate, "must be between 0 and 1")
    if rate is not None and not scheduler.get("num_draft_tokens"):
        raise ConfigError("draft_accept_rate", rate, "changes nothing without drafts: give "
                          "--set num_draft_tokens=N, too")  # fmt: skip
    if options.kv_cache_memory_gb is not None and "num_blocks" in scheduler:
        raise ConfigError("kv_cache_memory_gb", options.kv_cache_memory_gb,
                          f"contradicts num_blocks = {scheduler['num_blocks']}: "
                          "give one of them")  # fmt: skip


def _refuse(options: ServingOptions, names: tuple[str, ...], why: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise ConfigError(name, value, why)
