"""The production engine's own scheduler, built for the CPU from its source distribution, as a rank.

`fetch` gets the distribution from the package index by its name, `build` compiles its scheduler
with `probe.cpp` into a Python module; nothing of it is kept in this repository. `UpstreamRank`
drives it turn by turn in the order of the engine's own step.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import MiniDeepInferError
from mdi_shared.request import Request

NAME, VERSION = "deepinfer", "0.1.0"
HERE = Path(__file__).parent
MODULE = "upstream_probe"
LONGEST_COMMAND_S = 900.0
NO_DRAFT = -1

Row = dict[str, Any]


class UpstreamMissingError(MiniDeepInferError):
    """The engine's scheduler cannot be had here; the message says why."""


def fetch(folder: Path) -> Path:
    """Return the unpacked source distribution under `folder`, downloading it when it is not there.

    pip unpacks it and then fails, because its metadata wants a GPU; the files stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = list(folder.glob(f"pip-*/{NAME}*/csrc/engine/scheduler.hpp"))
    if not unpacked:
        command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps",
                   "--no-build-isolation", "--ignore-requires-python", "--no-binary", NAME,
                   f"{NAME}=={VERSION}"]  # fmt: skip
        told = _run(command, cwd=folder, TMPDIR=str(folder))
        unpacked = list(folder.glob(f"pip-*/{NAME}*/csrc/engine/scheduler.hpp"))
        if not unpacked:
            raise UpstreamMissingError(f"{NAME} {VERSION} cannot be downloaded: {told}")
    return unpacked[0].parents[2]


def build(sources: Path, folder: Path) -> ModuleType:
    """Compile the scheduler into `folder` unless that was done, and import it; half a minute."""
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise UpstreamMissingError(f"torch has no headers to compile with: {error}") from error
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    library, probe = folder / f"{MODULE}{suffix}", HERE / "probe.cpp"
    if not library.exists() or library.stat().st_mtime < probe.stat().st_mtime:
        own = [] if _has_header("format") else [str(HERE)]
        places = [*own, str(sources / "csrc"), *include_paths(), sysconfig.get_paths()["include"]]
        part = library.with_suffix(".part")
        told = _run([
            "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
            f"-DTORCH_EXTENSION_NAME={MODULE}", *(f"-I{place}" for place in places), str(probe),
            *(f"-L{place}" for place in library_paths()),
            *(f"-Wl,-rpath,{place}" for place in library_paths()),
            "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", "-o", str(part),
        ])  # fmt: skip
        if not part.exists():
            raise UpstreamMissingError(f"its scheduler does not compile: {told}")
        part.replace(library)
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None, library
    assert spec.loader is not None, library
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _has_header(name: str) -> bool:
    source = f"#include <{name}>\n"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        return subprocess.run(command, input=source, text=True, capture_output=True,
                              timeout=LONGEST_COMMAND_S, check=False).returncode == 0  # fmt: skip
    except OSError as error:
        raise UpstreamMissingError(f"there is no C++ compiler: {error}") from error


def _run(command: list[str], cwd: Path | None = None, **environment: str) -> str:
    """Run a command; return the last line it said."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **environment}, text=True, capture_output=True,
            timeout=LONGEST_COMMAND_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UpstreamMissingError(str(error)) from error
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
    return lines[0].strip() if lines else f"{command[0]} ended with {done.returncode}"


def make_groups(size: int) -> list[dist.ProcessGroup]:
    """Return the process groups of `size` ranks in this process, one for each."""
    store, groups = dist.HashStore(), []
    for rank in range(size):
        group = dist.ProcessGroup(store, rank, size)
        groups.append(group)
    kind = dist.ProcessGroup.BackendType.GLOO

    def connect(rank: int) -> None:
        backend = dist.ProcessGroupGloo(store, rank, size)
        groups[rank]._register_backend(torch.device("cpu"), kind, backend)
        groups[rank]._set_default_backend(kind)

    in_threads([lambda rank=rank: connect(rank) for rank in range(size)])
    return groups


def in_threads(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Run tasks that wait for each other; return their results or raise the first error."""
    if len(tasks) == 1:
        return [tasks[0]()]
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


class UpstreamRank:
    """One rank of the production engine. `turn` is one engine step, with what it left behind.

    `tokens(name, step, q, output_len, is_prefill)` is what the device produces for a request.
    """

    def __init__(
        self,
        module: ModuleType,
        config: SchedulerConfig,
        group: dist.ProcessGroup,
        tokens: Callable[[str, int, int, int, bool], tuple[int, ...]],
    ) -> None:
        self.module = module
        self.config = config
        self.tokens = tokens
        os.environ["DEEPINFER_USE_NEXTN_DECODE"] = str(config.num_draft_tokens)  # read when made
        os.environ["DEEPINFER_CPP_LOG_LEVEL"] = "error"
        self.blocks = module.BlockManager(config.num_blocks)
        self.slots = module.BlockManager(config.num_slots)
        names = ("max_model_len", "runtime_max_model_len", "max_num_seqs", "chunked_prefill",
                 "stop_preempted_request", "prefill_attempt_interval",
                 "prefill_any_attempt_interval")  # fmt: skip
        options = SimpleNamespace(**{name: getattr(config, name) for name in names})
        options.max_num_batched_tokens, options.engine_type = config.token_budget, 0
        self.scheduler = module.make_scheduler(
            self.blocks, self.slots, group, options, config.block_size, config.eos_token_id,
            config.lookahead, config.prefill_max_sum_seqlen_k, config.context_parallel_size,
        )  # fmt: skip
        self.pool = module.SequenceMetadataPool()
        self.step = 0
        self.before: tuple[int, Any, Any] | None = None  # the step in flight: number, rows, outputs
        self.added: list[Any] = []  # all, for the engine must not drop the last reference to one
        self.seen: dict[str, int] = {}

    def add(self, request: Request) -> None:
        """Queue a request."""
        params = SimpleNamespace(
            temperature=1.0, top_p=1.0, top_k=-1, seq_seed=0, top_logprobs=0, eos_id=1,
            prompt_logprobs=False, first_n_token_no_eos=0, ignore_eos=request.ignore_eos,
            max_tokens=request.max_tokens,
        )  # fmt: skip
        prompt = np.full(request.prompt_len, 5, dtype=np.int32)
        seq = self.module.Sequence(
            len(self.added), prompt, prompt, None, self.config.block_size, request.req_id, "",
            params, 0.0, None,
        )  # fmt: skip
        seq.num_cached_tokens = request.cached_len
        seq.chunk_checkpoints = list(request.chunk_checkpoints)
        self.added.append(seq)
        self.scheduler.add_sequence(seq)

    def abort(self, req_id: str) -> None:
        """End a request."""
        self.scheduler.abort_sequence([req_id])

    def has_unfinished(self) -> bool:
        """Say whether a further step is due."""
        return bool(self.scheduler.has_unfinished_seqs())

    def turn(self) -> Row:
        """Run one engine step: schedule, correct by the step before, process that, free, process.

        Ranks of a group are called at once, each in a thread of its own.
        """
        module, scheduler, self.seen = self.module, self.scheduler, {}
        decode_step, preempted = scheduler.decode_step, scheduler.get_num_preempted_seqs()
        metadata, step = scheduler.schedule(self.pool)
        self.step += 1
        seqs = step.scheduled_seqs
        row = {
            "kind": "P" if step.prompt_run else "D",
            "batch": [
                (seq.request_id, data.seqlen_q, data.seqlen_k, seq.state_id,
                 module.block_table(seq))
                for seq, data in zip(seqs, metadata, strict=True)
            ],
            "finished": [seq.request_id for seq in step.finished_seqs],
            "ignored": [(seq.request_id, module.reason(seq)) for seq in module.ignored(step)],
            "preempted": scheduler.get_num_preempted_seqs() - preempted,
            "decode_step": decode_step,
            "batched_tokens": step.num_batched_tokens,
            "free": (self.blocks.get_num_free_blocks(), self.slots.get_num_free_blocks()),
        }  # fmt: skip
        remap = None
        if self.before is not None and metadata and self.before[1]:
            nextn = self.config.num_draft_tokens
            remap, q, _, _ = module.prepare_zos_inputs(metadata, self.before[1], len(metadata),
                                                       nextn)  # fmt: skip
        self.process_before()
        if remap is not None:
            step.update_metadata_for_sampling_zos(metadata, q, remap, nextn)
        for seq in step.finished_seqs:
            scheduler.free_seq(seq)
        self.before = (self.step, metadata, step)
        if step.prompt_run or not self.config.enable_zos:
            self.process_before()
        row["visible"] = self.seen
        row["waiting"] = [(seq.request_id, *module.counters(seq)) for seq in scheduler.waiting]
        row["running"] = [(seq.request_id, *module.counters(seq)) for seq in scheduler.running]
        row["free_after"] = self.blocks.get_num_free_blocks()
        return row

    def process_before(self) -> None:
        """Process the step in flight, if there is one."""
        if self.before is None:
            return
        number, metadata, step = self.before
        self.before = None
        nextn, drafts, sampled = self.config.num_draft_tokens, [], []
        lengths = [seq.get_len() for seq in step.scheduled_seqs]
        for seq, q in zip(step.scheduled_seqs, self.module.rows(step), strict=True):
            done = seq.get_len() - seq.get_prompt_len()
            *accepted, last = self.tokens(seq.request_id, number, q, done, step.prompt_run)
            drafts += [*accepted, *[NO_DRAFT] * (q - len(accepted))]
            sampled.append(last)
        nothing = torch.empty(0, dtype=torch.int32)
        next_drafts = torch.full((len(sampled), nextn), 7, dtype=torch.int32)
        self.module.process_MTPInfo(step, nextn > 0, next_drafts, None)
        is_verified = nextn > 0 and not step.prompt_run
        self.scheduler.process_outputs(
            step, torch.tensor(drafts, dtype=torch.int32) if is_verified else nothing,
            torch.tensor(sampled, dtype=torch.int32), None,
        )  # fmt: skip
        for seq, length in zip(step.scheduled_seqs, lengths, strict=True):
            if seq.get_len() > length:
                seen = self.seen.get(seq.request_id, 0) + seq.get_len() - length
                self.seen[seq.request_id] = seen
        self.pool.release(metadata)
