"""Compiling kernels: once per process and arguments, for the architecture of the current GPU.

A *builder* returns a TileLang program for given static sizes; row counts stay dynamic. A *launcher*
allocates outputs and calls the compiled program on torch's current stream.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import tilelang
import torch

F = TypeVar("F", bound=Callable[..., Any])
ARCHITECTURES = ("sm_90a", "sm_100a")  # H100/H200, B200


class Sample(NamedTuple):
    """A builder and arguments it is used with; the checks compile it for what is named."""

    builder: Callable[..., Any]
    args: tuple[Any, ...] = ()
    architectures: tuple[str, ...] = ARCHITECTURES


def has_known_registers() -> bool:
    """Whether operands may be decoded into the tensor core's registers: their order is sm_90a's."""
    return _current_architecture() == "sm_90a"


_BY_HAND = {
    "bounds": tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS,
    "barriers": tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC,
}


def by_hand(*aspects: str) -> Callable[[F], F]:
    """Mark a builder whose program sees to some aspects itself; the compiler leaves them alone.

    "bounds": no index is ever out of bounds; a check around every gather costs more than the
    gather. "barriers": warpgroups with roles of their own wait for each other by hand; a barrier
    put into one role's branch would wait for threads that never come.
    """

    def mark(builder: F) -> F:
        builder.by_hand = aspects  # type: ignore[attr-defined]
        return builder

    return mark


def compile_for(architecture: str, sample: Sample) -> Any:
    """Compile a builder's program for an architecture, which need not be at hand."""
    options = {_BY_HAND[aspect]: True for aspect in getattr(sample.builder, "by_hand", ())}
    return tilelang.compile(
        sample.builder(*sample.args),
        target={"kind": "cuda", "arch": architecture},
        pass_configs=options,
    )


@cache
def compiled(builder: Callable[..., Any], *args: Any) -> Any:
    """Return `builder(*args)` compiled for the current GPU; arguments are outputs too."""
    return compile_for(_current_architecture(), Sample(builder, args))


@cache
def _current_architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"
