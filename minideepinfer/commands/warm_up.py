"""`mdi warm-up`: compile the kernels of a model now, so that its first start finds them.

Read next: `mdi_exec/engine/kernels_ahead.py`.
"""

from typing import Annotated

import typer

from minideepinfer.commands import options as o
from minideepinfer.commands.executor import engine_options, require_executor
from minideepinfer.commands.screen import tell


def warm_up(
    model: o.ModelPath,
    *,
    architecture: Annotated[
        str | None,
        typer.Option("--arch", metavar="ARCH", help="sm_90a or sm_100a; by default this GPU's."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Compile so many at once; default: all processors."),
    ] = None,
    set_options: o.Pairs = None,
) -> None:
    """Compile all kernels that a model can reach, for images and first starts; loads no weights.

    With --arch it needs nvcc, but no GPU. Options that change which kernels are reached, such as
    max_num_batched_tokens, are given as for the verbs that run the model.
    """
    require_executor()
    from rich.progress import Progress

    from mdi_exec.engine.kernels_ahead import compile_ahead, reach_of
    from mdi_exec.ops.kernels.jit import cache_folder, require_architecture

    architecture = require_architecture(architecture)
    reach = reach_of(model, engine_options(set_options))
    folder, note = cache_folder()
    if note is not None:
        tell(f"note: {note}")
    with Progress(transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        number = compile_ahead(
            reach, architecture,
            lambda done, total: bar.update(task, completed=done, total=total), processes,
        )  # fmt: skip
    tell(f"compiled {number} kernels for {architecture} into {folder}" if number else
         f"nothing to compile: {folder} holds all kernels for {architecture}")  # fmt: skip
