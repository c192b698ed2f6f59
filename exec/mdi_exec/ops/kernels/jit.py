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


def has_known_registers() -> bool:
    """Whether operands may be decoded into the tensor core's registers: their order is sm_90a's."""
    return _current_architecture() == "sm_90a"


def compile_for(architecture: str, sample: Sample) -> Any:
    """Compile a builder's program for an architecture, which need not be at hand."""
    options = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}
    checks_bounds = getattr(sample.builder, "checks_bounds", False)
    return tilelang.compile(
        sample.builder(*sample.args),
        target={"kind": "cuda", "arch": architecture},
        pass_configs=options if checks_bounds else None,
    )


def checks_bounds(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a builder whose program never indexes out of bounds; the compiler adds no checks then.

    It would put one around every gather, which costs more than the gather.
    """
    builder.checks_bounds = True  # type: ignore[attr-defined]
    return builder


@cache
def compiled(builder: Callable[..., Any], *args: Any) -> Any:
    """Return `builder(*args)` compiled for the current GPU; arguments are outputs too."""
    return compile_for(_current_architecture(), Sample(builder, args))


@cache
def _current_architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"
