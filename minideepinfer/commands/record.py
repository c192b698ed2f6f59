"""`mdi record` and `mdi replay`: run a workload or a request trace on the real model and keep the
step trace.

Prompts are random tokens of the lengths the trace names: a trace holds no text.

Read next: `mdi_exec/engine/serve_trace.py`, `mdi_exec/engine/recording.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mdi_shared.errors import ConfigError
from mdi_shared.placement import placement_by_name
from minideepinfer.commands.executor import (
    DeviceOption,
    ModelPath,
    RanksOption,
    SetOptions,
    is_first_rank,
    open_model,
)
from minideepinfer.commands.files import read_requests, require_output
from minideepinfer.commands.screen import progress, show_json, show_table, tell

if TYPE_CHECKING:
    from mdi_traces.requests import RequestTrace

OutOption = Annotated[
    Path, typer.Option(metavar="PREFIX", help="Files of the recorded run.", show_default=False)
]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Draws workload and prompt tokens.")]
LimitOption = Annotated[
    int | None, typer.Option(metavar="N", help="Only the first N requests of a trace.")
]
MostPrompt = Annotated[
    int | None, typer.Option("--max-prompt", metavar="N", help="Cut longer prompts to N tokens.")
]
MostOutput = Annotated[
    int | None, typer.Option("--max-output", metavar="N", help="Cut longer outputs to N tokens.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def record(
    model: ModelPath,
    workload: Annotated[str, typer.Argument(help="Preset; see generate-workload --list.")],
    *,
    out: OutOption,
    requests: Annotated[
        int, typer.Option("--requests", "-n", metavar="N", help="Number of requests.")
    ] = 100,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests (or sessions) per second.")
    ] = None,
    seed: SeedOption = 0,
    max_prompt: MostPrompt = None,
    max_output: MostOutput = None,
    ranks: RanksOption = 1,
    device: DeviceOption = "cpu",
    set_options: SetOptions = None,
    as_json: JsonOption = False,
) -> None:
    """Run a generated workload on the real model and record it."""
    from mdi_traces.generate import generate_workload

    work = generate_workload(workload, num_requests=requests, seed=seed, rate=rate)
    work = _cut(work, max_prompt, max_output)
    _serve(model, work, out, device, set_options, ranks=ranks, seed=seed, as_json=as_json)


def replay(
    model: ModelPath,
    trace: Annotated[Path, typer.Argument(help="Request trace, or a recorded run's requests.")],
    *,
    out: OutOption,
    speed: Annotated[
        float, typer.Option(metavar="X", help="Divide arrival and think times by X.")
    ] = 1.0,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    max_prompt: MostPrompt = None,
    max_output: MostOutput = None,
    ranks: RanksOption = 1,
    device: DeviceOption = "cpu",
    set_options: SetOptions = None,
    as_json: JsonOption = False,
) -> None:
    """Run a request trace on the real model, arrivals honoured, and record it."""
    work = _cut(read_requests(trace, limit=limit), max_prompt, max_output)
    if speed != 1.0:
        work = work.scaled(speed)
    _serve(model, work, out, device, set_options, ranks=ranks, seed=seed, as_json=as_json)


def _cut(work: "RequestTrace", max_prompt: int | None, max_output: int | None) -> "RequestTrace":
    """Return the trace with lengths cut, for machines that could not serve the full ones."""
    for name, most in (("max_prompt", max_prompt), ("max_output", max_output)):
        if most is not None and most < 1:
            raise ConfigError(name, most, "must be at least 1 token")
    from mdi_traces.requests import cut_lengths

    return cut_lengths(work, max_prompt=max_prompt, max_output=max_output)


def _serve(
    model: str,
    work: "RequestTrace",
    out: Path,
    device: str,
    pairs: list[str] | None,
    *,
    ranks: int,
    seed: int,
    as_json: bool,
) -> None:
    require_output("out", out.with_name(f"{out.name}.steps.parquet"))
    with open_model(model, device, pairs, record=str(out), data_parallel_size=ranks) as llm:
        from mdi_exec.engine.serve_trace import TraceClient

        if is_first_rank():
            tell(f"loaded {model} on {device}; serving {len(work):,} requests")
        placement = placement_by_name(llm.options.placement)
        client = TraceClient(llm.engine, work, seed=seed, placement=placement)
        with progress(len(work)) as on_progress:
            client.run(on_progress if is_first_rank() else None)
        llm.save_recording()
    if not is_first_rank():
        return
    tell(f"saved run {out}")
    from mdi_traces.run import load_run
    from minideepinfer.run_summary import summarize

    summary = summarize(load_run(out))
    if as_json:
        show_json({"summary": summary.to_dict()})
    else:
        show_table(summary.table())
