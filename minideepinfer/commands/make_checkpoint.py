"""`mdi make-checkpoint`: a random-weight checkpoint in the released format.

Read next: `mdi_exec/weights/make_checkpoint.py`, `mdi_exec/weights/presets.py`.
"""

from pathlib import Path
from typing import Annotated

import typer

from minideepinfer.commands.executor import require_executor
from minideepinfer.commands.screen import tell


def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="Folder to make; must not hold anything.")],
    *,
    preset: Annotated[str, typer.Option(help="tiny, small or flash-slice.")] = "tiny",
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers of a flash-slice.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(metavar="N", help="Routed experts, to make it smaller.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds, equal bytes.")] = 0,
) -> None:
    """Write a checkpoint with random weights, for machines that cannot download the real one."""
    require_executor()
    from mdi_exec.weights.make_checkpoint import make_checkpoint as make

    made = make(directory, preset, layers=layers, seed=seed, num_experts=experts)
    size = sum(file.stat().st_size for file in made.iterdir())
    tell(f"wrote {made}: preset {preset}, seed {seed}, {size / 1e6:,.1f} MB")
