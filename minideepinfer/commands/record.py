"""`mdi record` and `mdi replay`: run a workload or a request trace on the real model and keep the
step trace.

Prompts are random tokens of the lengths the trace names: a trace holds no text.

Read next: `mdi_exec/engine/serve_trace.py`, `mdi_exec/engine/recording.py`.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from mdi_shared.placement import new_placement
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import FileOptions, scheduler_options, takes_options
from minideepinfer.commands.describing import (
    MEMORY,
    RequestOptions,
    TraceOptions,
    WorkloadOptions,
    load_served,
    notes_on,
    served_by,
)
from minideepinfer.commands.executor import is_first_rank, open_model, require_executor
from minideepinfer.commands.files import make_folder
from minideepinfer.commands.results import RunResults, report_run
from minideepinfer.commands.screen import progress, tell

if TYPE_CHECKING:
    from mdi_shared.served import Served
    from mdi_traces.requests import RequestTrace


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that runs; its argument comes first."""

    model: o.ModelPath
    device: o.Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class RecordOptions(RunResults, WorkloadOptions, RequestOptions, FileOptions, ModelOptions):
    """What `mdi record` can be asked for."""

    workload: o.WorkloadName
    out: o.Out = field()  # without a default, unlike the one it replaces


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(RunResults, TraceOptions, RequestOptions, FileOptions, ModelOptions):
    """What `mdi replay` can be asked for."""

    trace: o.TracePath
    out: o.Out = field()  # without a default, unlike the one it replaces


@takes_options(RecordOptions)
def record(options: RecordOptions) -> None:
    """Run a generated workload on the real model and record it."""
    _serve(options)


@takes_options(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Run a request trace on the real model, arrivals honoured, and record it."""
    _serve(options)


def _serve(options: RecordOptions | ReplayOptions) -> None:
    options.check()
    served = served_by(options)
    work = load_served(served, options.seed)
    from mdi_traces.pacing import due_note, require_bearable_waits

    require_bearable_waits(work)
    make_folder(options.out)
    with open_model(options.model, options.device, None, **_engine_options(options)) as llm:
        from mdi_exec.engine.serve_trace import TraceClient
        from mdi_traces.hints import with_predictions

        if is_first_rank():
            tell(f"loaded {options.model} on {options.device}; serving {len(work):,} requests, "
                 f"{due_note(work)}")  # fmt: skip
        placement = new_placement(llm.options.placement)
        client = TraceClient(llm.engine, with_predictions(work, llm.options.policy),
                             seed=options.seed or 0, placement=placement)  # fmt: skip
        with progress(len(work)) as on_progress:
            client.run(on_progress if is_first_rank() else None)
        llm.save_recording()
    if is_first_rank():
        _report(options, served, work)


def _engine_options(options: RecordOptions | ReplayOptions) -> dict[str, Any]:
    """Return the options of `LLM`: those of the engine and of the scheduler, `--set` over flags."""
    require_executor()
    from mdi_exec.engine.options import EngineOptions

    flags = {
        "record": str(options.out),
        "data_parallel_size": options.ranks,
        "policy": options.policy,
        "placement": options.placement,
        "cost_model": None if options.cost is None else str(options.cost),
        **{name: getattr(options, name) for name in MEMORY},
    }
    given = {name: value for name, value in flags.items() if value is not None}
    return {**given, **scheduler_options(options, get_type_hints(EngineOptions))}


def _report(
    options: RecordOptions | ReplayOptions, served: "Served", work: "RequestTrace"
) -> None:  # fmt: skip
    """Put what was served into the run's metadata, beside what the engine knows, and sum it up."""
    from mdi_traces.run import Run, load_run

    found = load_run(options.out)
    config = {**found.metadata.config, "served": served.to_json()}
    metadata = replace(found.metadata, config=config, seed=options.seed or 0)
    run = Run(found.steps_table, found.requests_table, metadata, found.items_table)
    # The engine has saved it already, so that an interrupt loses nothing.
    notes = notes_on(work, config["policy"])
    report_run(run, options, notes, verb="saved")
