"""Compiling kernels: once per process and arguments, for the architecture of the current GPU.

A *builder* returns a TileLang program for given static sizes; row counts stay dynamic. A *launcher*
allocates outputs and calls the compiled program on torch's current stream.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import tilelang
import torch

ARCHITECTURES = ("sm_90a", "sm_100a")  # H100/H200, B200


class Sample(NamedTuple):
    """A builder and arguments it is used with; every sample is compiled by the checks."""

    builder: Callable[..., Any]
    args: tuple[Any, ...] = ()


def target_of(architecture: str) -> dict[str, str]:
    """Return TileLang's name of a CUDA architecture, which it compiles for without having one."""
    return {"kind": "cuda", "arch": architecture}


@cache
def compiled(builder: Callable[..., Any], *args: Any) -> Any:
    """Return `builder(*args)` compiled for the current GPU; arguments are outputs too."""
    return tilelang.compile(builder(*args), target=target_of(_current_architecture()))


@cache
def _current_architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"
