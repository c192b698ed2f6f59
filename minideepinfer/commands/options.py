"""Every option that more than one verb has, declared once: flag, type, help.

A verb names them as annotations, of its parameters or of a dataclass of options; so an option is
spelt alike wherever it is.

Read next: `declare.py` (dataclasses of options), `results.py` (options of what comes out).
"""

# fmt: off
from pathlib import Path
from typing import Annotated

import typer

REQUESTS, ENGINE, CONFIG, RESULTS = "Requests", "Engine", "Configuration", "Results"


def option(*flags: str, help: str, metavar: str | None = None, panel: str | None = None) -> object:
    """Declare an option whose help states its default."""
    return typer.Option(
        *flags, help=help, metavar=metavar, rich_help_panel=panel, show_default=False
    )


# What a verb is about

TRACE_HELP = "Request trace in any known format, or a run's prefix; several files are one trace."
TracePath = Annotated[list[Path], typer.Argument(help=TRACE_HELP)]
MaybeTrace = Annotated[list[Path] | None, typer.Argument(help=TRACE_HELP, show_default=False)]
WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="Preset; see: mdi generate-workload --list.")
]
ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, hub id, or random:PRESET (tiny, small, flash-slice) for weights "
        "made up on the device.",
    ),
]
RunPath = Annotated[Path, typer.Argument(help="Run, by its prefix or one of its files.")]

# What is served

Workload = Annotated[str | None, option(
    "--workload", metavar="PRESET", panel=REQUESTS,
    help="Generated requests instead of a trace; see: mdi generate-workload --list.")]
Requests = Annotated[int | None, option(
    "--requests", "-n", metavar="N", panel=REQUESTS,
    help="Size of the workload (default: 1000).")]
Rate = Annotated[float | None, option(
    "--rate", metavar="R", panel=REQUESTS,
    help="Requests (or sessions) per second, instead of the preset's or the trace's own times.")]
Arrivals = Annotated[str | None, option(
    "--arrivals", metavar="PROCESS", panel=REQUESTS,
    help="Arrival times instead of the preset's or the trace's own: poisson:5, gamma:5:2, "
    "burst, …")]
Format = Annotated[str | None, option(
    "--format", metavar="NAME", panel=REQUESTS,
    help="Format of the trace, instead of recognising it.")]
Limit = Annotated[int | None, option(
    "--limit", metavar="N", panel=REQUESTS,
    help="First N rows of the trace only.")]
Sort = Annotated[bool | None, option(
    "--sort", panel=REQUESTS,
    help="Order the trace by arrival first.")]
ClosedLoop = Annotated[bool | None, option(
    "--closed-loop/--open-loop", panel=REQUESTS,
    help="Turns of a session wait for the turn before, or come at their recorded time.")]
Speed = Annotated[float | None, option(
    "--speed", metavar="X", panel=REQUESTS,
    help="Divide all times of the requests by X.")]
MaxPrompt = Annotated[int | None, option(
    "--max-prompt", metavar="N", panel=REQUESTS,
    help="Cut longer prompts to N tokens.")]
MaxOutput = Annotated[int | None, option(
    "--max-output", metavar="N", panel=REQUESTS,
    help="Cut longer outputs to N tokens.")]

# How, and on what

Cost = Annotated[Path | None, option(
    "--cost", metavar="MODEL", panel=ENGINE,
    help="Fitted or predicted step times: a file FILE.json, or a model of the package such as "
    "h200-flash-slice.")]
Ranks = Annotated[int | None, option(
    "--ranks", metavar="N", panel=ENGINE,
    help="Data-parallel ranks (default: in a simulation the fewest that hold the model, else "
    "1; under torchrun leave it out).")]
PolicySpec = Annotated[str | None, option(
    "--policy", metavar="SPEC", panel=ENGINE,
    help="Scheduling policy: fcfs (the default), srpt:sigma=0.5, "
    "phase=mixed:budget=512+order=sjf+victim=newest, …; docs/policies.md has all.")]
PlacementName = Annotated[str | None, option(
    "--placement", metavar="SPEC", panel=ENGINE,
    help="Which rank serves a request: round_robin (the default), least_tokens, jsq, balance, "
    "power_of_two:seed=1, …; docs/policies.md has all.")]
KVMemory = Annotated[float | None, option(
    "--kv-cache-memory-gb", metavar="GB", panel=ENGINE,
    help="Size of the KV pool, 10^9 bytes, instead of what memory leaves.")]
Utilization = Annotated[float | None, option(
    "--gpu-memory-utilization", metavar="SHARE", panel=ENGINE,
    help="Share of the device's memory for weights and KV pool (simulated: 0.9).")]
Seed = Annotated[int | None, option(
    "--seed", metavar="N", panel=ENGINE,
    help="Of all that is drawn: workload, arrivals, prompts (default: 0).")]
Device = Annotated[str, option(
    "--device", metavar="NAME", panel=ENGINE,
    help="cpu (the default), cuda or cuda:N.")]
ConfigFile = Annotated[Path | None, option(
    "--config", metavar="FILE.toml", panel=CONFIG,
    help="A file with a table [scheduler], and one named like the verb for its other options; "
    "for a simulation also a saved run, or its description, to start from.")]
Pairs = Annotated[list[str] | None, option(
    "--set", metavar="KEY=VALUE", panel=CONFIG,
    help="Option of the scheduler (or of the engine, where one runs), such as max_num_seqs=64;"
    " repeatable.")]

# On what it is simulated

ShapeName = Annotated[str | None, option(
    "--model", metavar="NAME", panel=ENGINE,
    help="v41-flash or tiny (default: what --cost was fitted for, or v41-flash).")]
HardwareName = Annotated[str | None, option(
    "--hardware", metavar="NAME", panel=ENGINE,
    help="Roofline of h100, h200 (the default), b200, b300, or FILE.json of peak rates.")]
ExpertRanks = Annotated[int | None, option(
    "--ep", metavar="N", panel=ENGINE,
    help="Ranks the roofline splits the experts over (default: all).")]
AcceptRate = Annotated[float | None, option(
    "--draft-accept-rate", metavar="P", panel=ENGINE,
    help="Chance that a draft token is accepted (default: 0.7); needs num_draft_tokens.")]
Until = Annotated[float | None, option(
    "--until", metavar="S", panel=ENGINE,
    help="Stop at S virtual seconds; what is open then is reported unfinished.")]

# How it is done

Jobs = Annotated[int | None, option(
    "--jobs", "-j", metavar="N",
    help="Processes that simulate at the same time (default: all cores).")]

# What comes out

Out = Annotated[Path, option(
    "--out", "-o", metavar="PREFIX", panel=RESULTS,
    help="Save the run: PREFIX.steps.parquet, …")]
MaybeOut = Annotated[Path | None, option(
    "--out", "-o", metavar="PREFIX", panel=RESULTS,
    help="Save the run: PREFIX.steps.parquet, …")]
Plots = Annotated[Path | None, option(
    "--plots", metavar="FOLDER", panel=RESULTS,
    help="Draw pictures into FOLDER, made if needed.")]
Perfetto = Annotated[Path | None, option(
    "--perfetto", metavar="FILE.json", panel=RESULTS,
    help="Write a timeline for ui.perfetto.dev (also .json.gz).")]
Html = Annotated[Path | None, option(
    "--html", metavar="FILE.html", panel=RESULTS,
    help="Write pictures and tables as one page.")]
Bounds = Annotated[str | None, option(
    "--slo", metavar="BOUNDS", panel=RESULTS,
    help="Bounds for goodput, ms: ttft=2000,tpot=50 (also e2e).")]
Json = Annotated[bool, option(
    "--json", panel=RESULTS,
    help="Print one JSON document, no tables.")]
