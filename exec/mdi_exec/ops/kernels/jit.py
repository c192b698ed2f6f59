"""Compiling kernels: once per process and arguments, for the architecture of the current GPU.

A *builder* returns a TileLang program for given static sizes; row counts stay dynamic. A *launcher*
allocates outputs and calls the compiled program on torch's current stream. TileLang keeps compiled
kernels on disk, safely for several processes. While `collecting`, nothing is compiled or run:
launchers are walked through on the meta device to see which kernels a model can reach.

Read next: `mdi_exec/engine/kernels_ahead.py`, which compiles what was collected.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from mdi_shared.errors import ConfigError

# TileLang reads these when it is imported or compiles.
os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")

import tilelang
import tilelang.language as T
from tvm import tirx

logging.getLogger("tilelang").setLevel(logging.WARNING)

F = TypeVar("F", bound=Callable[..., Any])
ARCHITECTURES = ("sm_90a", "sm_100a")  # H100/H200, B200


class Sample(NamedTuple):
    """A builder and arguments it is used with; the checks compile it for what is named."""

    builder: Callable[..., Any]
    args: tuple[Any, ...] = ()
    architectures: tuple[str, ...] = ARCHITECTURES


class _Collection(NamedTuple):
    architecture: str
    samples: dict[Sample, None]  # in the order of their first use


_collection: _Collection | None = None


@contextmanager
def collecting(architecture: str) -> Iterator[dict[Sample, None]]:
    """Let launchers note the kernels they would run, instead of compiling and running them."""
    global _collection
    assert _collection is None, "collections do not nest"
    _collection = _Collection(architecture, {})
    try:
        yield _collection.samples
    finally:
        _collection = None


def has_known_registers() -> bool:
    """Whether operands may be decoded into the tensor core's registers: their order is sm_90a's."""
    return current_architecture() == "sm_90a"


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
    """Compile a builder's program for an architecture, which need not be at hand.

    The kernel has its builder's name, which is what profilers show.
    """
    options = {_BY_HAND[aspect]: True for aspect in getattr(sample.builder, "by_hand", ())}
    program = started_early(sample.builder(*sample.args))
    return tilelang.compile(
        program.with_attr("global_symbol", sample.builder.__name__),
        target={"kind": "cuda", "arch": architecture},
        pass_configs=options,
    )


def started_early(program: Any) -> Any:
    """Let a program be launched while the one before it still runs, and the next one likewise.

    Its blocks come up, and then wait until all that was launched before is done and written:
    programmatic dependent launch, which takes the time between two small kernels. A program
    launched the usual way waits for its predecessors as ever.
    """

    def begin(block: Any) -> Any:
        if block.name_hint != "tilelang_root":
            return None
        start = [tirx.Evaluate(T.pdl_trigger()), tirx.Evaluate(T.pdl_sync())]
        body = tirx.SeqStmt([*start, block.body])
        return tirx.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body,
                           block.init, block.alloc_buffers, block.match_buffers,
                           block.annotations)  # fmt: skip

    changed = tirx.stmt_functor.ir_transform(program.body, None, begin, ["tirx.SBlock"])
    return program.with_body(changed)


def compiled(builder: Callable[..., Any], *args: Any) -> Any:
    """Return `builder(*args)` compiled for the current GPU; arguments are outputs too."""
    if _collection is not None:
        _collection.samples[Sample(builder, args)] = None
        return _skip
    return _compiled(builder, *args)


def _skip(*tensors: torch.Tensor) -> None:
    """Stand for a kernel while kernels are collected."""


@cache
def _compiled(builder: Callable[..., Any], *args: Any) -> Any:
    return compile_for(current_architecture(), Sample(builder, args))


def current_architecture() -> str:
    """Return the architecture to compile for: the GPU's, or the one kernels are collected for."""
    return _gpu_architecture() if _collection is None else _collection.architecture


def require_architecture(name: str | None) -> str:
    """Return `name`, or the GPU's architecture; raises `ConfigError` where there is neither."""
    known = " or ".join(ARCHITECTURES)
    if name is None and not torch.cuda.is_available():
        raise ConfigError("--arch", name, f"must be {known}, since this machine has no GPU")
    if name is not None and name not in ARCHITECTURES:
        raise ConfigError("--arch", name, f"must be {known}")
    return _gpu_architecture() if name is None else name


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 1 where kernels are only collected."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def _gpu_architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


@cache
def cache_folder() -> tuple[Path, str | None]:
    """Return the folder that compiled kernels are kept in, and a note when it is a makeshift.

    It is `TILELANG_CACHE_DIR`, or TileLang's own below the home directory. Where that cannot be
    written, a folder of the system's temporary ones takes its place for this process and those it
    starts.
    """
    wanted = Path(tilelang.env.TILELANG_CACHE_DIR)
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted, None
    except OSError as error:
        instead = Path(tempfile.gettempdir()) / f"minideepinfer-kernels-{os.getuid()}"
        instead.mkdir(mode=0o700, exist_ok=True)
        os.environ["TILELANG_CACHE_DIR"] = str(instead)
        note = f"compiled kernels are kept in {instead}: {wanted} cannot be written"
        return instead, f"{note} ({error.strerror}); TILELANG_CACHE_DIR names another folder"


@cache
def sources_digest() -> str:
    """Return a hash of all that compiled kernels depend on beside their arguments."""
    digest = hashlib.sha256(f"{tilelang.__version__} {torch.version.cuda}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
