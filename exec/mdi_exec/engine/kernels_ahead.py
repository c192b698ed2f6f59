"""Compiles, before a model is served, every kernel that its options can reach.

Compiled one after another as steps first need them, the kernels of the released dimensions take
minutes on a new machine. Here the model is built on the meta device and walked through at every
size of step, which names the kernels; processes side by side compile those that TileLang's cache
on disk does not have yet. A mark beside the cache says that all is done, so that the next start
skips even the walk. Read next: `ops/kernels/jit.py`, `graphs.py`.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from joblib import Parallel, delayed
from torch import Tensor

from mdi_exec.engine.draft_options import require_drafts
from mdi_exec.engine.options import (
    DEFAULT_COPIES_GB,
    DEFAULT_KV_CACHE_GB,
    GB,
    cache_layout,
    scheduler_config,
    split_options,
)
from mdi_exec.engine.step_inputs import GraphShape, StepInputs, placeholder_prompt, sizes_up_to
from mdi_exec.engine.step_program import StepProgram
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.staging import Packing
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.sampler import Sampler
from mdi_exec.weights.names import expected_tensors
from mdi_exec.weights.random import DTYPES
from mdi_exec.weights.source import open_model
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.graph_sizes import graph_sizes

if TYPE_CHECKING:
    from mdi_exec.ops.kernels.jit import Sample

LONGEST_WAIT_S = 900.0  # for another process that compiles

Progress = Callable[[int, int], None]  # kernels compiled so far, and in all


@dataclass(frozen=True, slots=True)
class Reach:
    """What decides which kernels a model can need: its dimensions, and how large steps get.

    `expanded_bytes` bounds unpacked copies of weights, which have kernels of their own.
    """

    layout: CacheLayout
    max_rows: int
    max_num_seqs: int
    max_model_len: int
    expanded_bytes: float

    @classmethod
    def of(cls, layout: CacheLayout, config: SchedulerConfig, expanded_bytes: float) -> "Reach":
        """Return the reach of an engine with these options."""
        rows = min(config.token_budget, config.max_model_len)
        return cls(layout, rows, config.max_num_seqs, config.max_model_len, expanded_bytes)


def reach_of(model: str | Path, options: Mapping[str, Any]) -> Reach:
    """Return the reach of an `LLM` with these options on a GPU; none is needed here."""
    engine_options, scheduler_options = split_options(dict(options))
    source = open_model(model, "cpu", engine_options.revision)
    layout = cache_layout(source.config, engine_options, scheduler_options)
    config = scheduler_config(
        scheduler_options, layout, DEFAULT_KV_CACHE_GB * GB,
        eos_token_id=source.config.eos_token_id,
        max_positions=source.config.max_position_embeddings,
    )  # fmt: skip
    require_drafts(config.num_draft_tokens, source.config, device="a GPU")
    copies_gb = engine_options.expanded_weights_memory_gb
    return Reach.of(layout, config, (DEFAULT_COPIES_GB if copies_gb is None else copies_gb) * GB)


class _Shapes:
    """A `TensorSource` of a model's tensors without their values."""

    def __init__(self, layout: CacheLayout) -> None:
        self.specs = expected_tensors(layout.config)

    def get(self, name: str) -> Tensor:
        spec = self.specs[name]
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.get(name)[start:stop]


def reachable_kernels(reach: Reach, architecture: str) -> "list[Sample]":
    """Return every kernel that a step within `reach` can run, each once."""
    from mdi_exec.ops.kernels.jit import collecting  # a machine without kernels has no compiler

    config = reach.layout.config
    with collecting(architecture) as samples, torch.inference_mode():
        folds = reach.layout.numerics is Numerics.FOLDED
        budget = ExpansionBudget(reach.expanded_bytes, for_kernels=True, folds_experts=folds)
        weights = Weights(_Shapes(reach.layout), "meta", budget=budget)
        token_map = torch.zeros(config.vocab_size, dtype=torch.int64)
        model = Transformer(config, weights, token_map=token_map, numerics=reach.layout.numerics)
        cache = DeviceCache(reach.layout, num_blocks=2, num_slots=reach.max_num_seqs + 1,
                            device="meta")  # fmt: skip
        sampler = Sampler(config.vocab_size, eos_token_id=config.eos_token_id, device="meta")
        program = StepProgram(model, cache, sampler, max_rows=cache.num_slots,
                              measures_experts=True)  # fmt: skip
        for inputs, max_k in _steps(reach):
            packing = Packing.of(inputs.arrays)
            tensors = packing.views(
                torch.empty(packing.num_bytes, dtype=torch.uint8, device="meta")
            )
            program.sample(program.forward(inputs.host, tensors, max_k=max_k), tensors,
                           inputs.needs)  # fmt: skip
    return list(samples)


def _steps(reach: Reach) -> Iterator[tuple[StepInputs, int]]:
    """Yield a step of each size that kernels could tell apart, and its longest context."""
    for rows in sizes_up_to(reach.max_rows):
        yield placeholder_prompt(rows), reach.max_model_len
    for rows in graph_sizes(reach.max_num_seqs):
        yield GraphShape(rows, rows, reach.max_model_len).placeholders(), reach.max_model_len


def compile_ahead(
    reach: Reach, architecture: str, on_progress: Progress, num_processes: int | None = None
) -> int:
    """Compile what `reach` needs and the cache does not have; return how many kernels that was.

    `num_processes` is by default the number of processors. Of several processes that want kernels
    at once one compiles, and the others wait for it, at most `LONGEST_WAIT_S`.
    """
    from mdi_exec.ops.kernels.jit import cache_folder, sources_digest

    folder = cache_folder()[0] / f"minideepinfer-{sources_digest()}-{architecture}"
    mark = folder / _digest(repr(reach))
    if mark.exists():
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / "lock"):
        marks = {sample: folder / _digest(_name(sample))
                 for sample in reachable_kernels(reach, architecture)}  # fmt: skip
        missing = [sample for sample, done in marks.items() if not done.exists()]
        on_progress(0, len(missing))
        for count, sample in enumerate(_compile_all(missing, architecture, num_processes), 1):
            marks[sample].touch()
            on_progress(count, len(missing))
        mark.touch()
    return len(missing)


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock between processes; go on without it when its holder takes too long."""
    end = time.monotonic() + LONGEST_WAIT_S
    with lock.open("w") as file:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def told_in_lines(tell: Callable[[str], None]) -> Progress:
    """Return what turns progress into a line at the start and at every tenth of the way."""

    def on_progress(done: int, total: int) -> None:
        if total and (done == 0 or done * 10 // total > (done - 1) * 10 // total):
            tell(f"compiling kernels: {done} of {total}")

    return on_progress


def _compile_all(
    samples: "list[Sample]", architecture: str, num_processes: int | None
) -> "Iterable[Sample]":
    workers = min(num_processes or os.cpu_count() or 1, max(len(samples), 1))
    jobs = (delayed(_compile_one)(architecture, sample) for sample in samples)
    run = Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)
    done: Iterable[Sample] = run(jobs)
    return done


def _compile_one(architecture: str, sample: "Sample") -> "Sample":
    """Put one kernel into the cache; the work of a process of its own."""
    from mdi_exec.ops.kernels.jit import compile_for

    compile_for(architecture, sample)
    return sample


def _name(sample: "Sample") -> str:
    return f"{sample.builder.__module__}.{sample.builder.__qualname__}{sample.args!r}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
