"""`mdi profile`: where the time of a step goes, by layer and part, and how near its floor it is.

Read next: `mdi_exec/engine/profiling.py`, `mdi_exec/model/floors.py`.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdi_shared.errors import ConfigError
from minideepinfer.commands import options as o
from minideepinfer.commands.executor import engine_options, require_executor
from minideepinfer.commands.files import require_output
from minideepinfer.commands.screen import show_json, show_table, tell

if TYPE_CHECKING:
    from rich.table import Table

    from mdi_exec.engine.device_timing import Ceilings
    from mdi_exec.engine.profiling import StepProfile
    from mdi_exec.model.floors import StepShape
    from mdi_exec.model.transformer import Transformer

CONTEXT, PREFILL = 16_384, 4_096  # by default, where the model has as many positions
MOST_KERNELS = 40  # of a step, in the JSON document


def profile(
    model: o.ModelPath,
    *,
    prefill: Annotated[
        int | None,
        typer.Option(metavar="N", help="New tokens of a prefill step, 0: none (default: 4096)."),
    ] = None,
    decode: Annotated[
        int, typer.Option(metavar="N", help="Sequences of a decode step, 0: none.")
    ] = 64,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of each sequence, new ones in (default: 16384)."),
    ] = None,
    device: o.Device = "cpu",
    set_options: o.Pairs = None,
    perfetto: o.Perfetto = None,
    as_json: o.Json = False,
) -> None:
    """Run made-up steps of a model and show what each part of a layer takes, beside its floor.

    The steps are a prefill of one sequence and a decode of many, on a cache of random rows, without
    scheduler and sampler. They are launched op by op, so that every kernel has the part that
    launched it; a part's time is that of its kernels. Floors hold for this device: its own product
    and copy are measured first.
    """
    if perfetto is not None:
        require_output("perfetto", perfetto, (".json", ".json.gz"))
    require_executor()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # of the profiler's own lines
    import torch

    from mdi_exec.engine.device_timing import ceilings
    from mdi_exec.engine.profiling import profile_step
    from mdi_exec.weights.source import open_model

    options = engine_options(set_options)
    positions = open_model(model, "cpu", options.get("revision")).config.max_position_embeddings
    steps = _steps(prefill, decode, context, positions)
    ceiling = ceilings(torch.device(device))
    transformer = _load(model, {"device": device, **options}, steps)
    with torch.inference_mode():
        profiles = [profile_step(transformer, step) for step in steps]
    if perfetto is not None:
        _write_trace(profiles, perfetto)
    if as_json:
        found = [_document(profile, ceiling) for profile in profiles]
        show_json({"ceilings": ceiling._asdict(), "steps": found})
        return
    show_table(f"{model} on {device}: {ceiling}", *(_table(p, ceiling) for p in profiles))


def _steps(
    prefill: int | None, decode: int, context: int | None, positions: int
) -> "list[StepShape]":
    from mdi_exec.model.floors import StepShape

    if context is None:
        context = min(CONTEXT, positions)
    if not 2 <= context <= positions:
        raise ConfigError("context", context, f"must be from 2 to the model's {positions:,}")
    if prefill is None:
        prefill = min(PREFILL, context)
    if not 0 <= prefill <= context or prefill == 1:
        raise ConfigError("prefill", prefill, f"must be 0, or from 2 to the context of {context}")
    if decode < 0 or prefill + decode == 0:
        raise ConfigError("decode", decode, "must be at least 0, or 1 without a prefill step")
    steps = [StepShape(1, prefill, context)] if prefill else []
    return steps + ([StepShape(decode, 1, context)] if decode else [])


def _load(model: str, options: dict[str, Any], steps: "list[StepShape]") -> "Transformer":
    """Load a model for these steps, after a look at the memory that it will take."""
    from mdi_exec.engine.loaded import LoadedModel
    from mdi_exec.engine.made_up_steps import blocks_for
    from mdi_exec.engine.options import split_options
    from mdi_exec.ranks.parallel import RankGroup

    rows, seqs = max(s.total_rows for s in steps), max(s.num_seqs for s in steps)
    blocks = seqs * blocks_for(steps[0].context)
    limits = {"max_num_batched_tokens": rows, "max_num_seqs": seqs,
              "max_model_len": steps[0].context - 1, "num_blocks": 2 + blocks * 5 // 4}  # fmt: skip
    given, scheduler = split_options({**limits, **options})
    return LoadedModel(model, given, scheduler, RankGroup(), tell).transformer


def _write_trace(profiles: "list[StepProfile]", path: Path) -> None:
    from mdi_analysis.perfetto import write_events
    from mdi_exec.engine.profiling import trace_events

    write_events(trace_events(profiles), path)
    tell(f"wrote {path}; open it at ui.perfetto.dev")


def _table(profile: "StepProfile", ceiling: "Ceilings") -> "Table":
    from rich.table import Table

    table = Table(
        title=f"{profile.step}: {profile.step_ms:.4g} ms, kernels {profile.busy_ms:.4g} ms",
        title_justify="left",
    )
    table.add_column("part")
    for name in ("ms", "launches", "share", "floor ms", "of floor"):
        table.add_column(name, justify="right")
    rows = profile.rows(ceiling)
    for row in rows:
        table.add_row(row.part, f"{row.ms:.4g}", str(row.launches), f"{row.share:.1%}",
                      *_floor(row.floor_ms, row.ms))  # fmt: skip
    floor = sum(row.floor_ms or 0.0 for row in rows)
    table.add_row("in all", f"{profile.busy_ms:.4g}", str(len(profile.kernels)), "",
                  *_floor(floor, profile.busy_ms), style="bold")  # fmt: skip
    return table


def _floor(floor_ms: float | None, ms: float) -> tuple[str, str]:
    return ("-", "-") if floor_ms is None else (f"{floor_ms:.4g}", f"{floor_ms / ms:.2f}")


def _document(profile: "StepProfile", ceiling: "Ceilings") -> dict[str, Any]:
    return {
        "step": profile.step._asdict(), "step_ms": profile.step_ms, "busy_ms": profile.busy_ms,
        "parts": [row._asdict() for row in profile.rows(ceiling)],
        "kernels": [row._asdict() for row in profile.by_kernel()[:MOST_KERNELS]],
    }  # fmt: skip
