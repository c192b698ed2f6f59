"""How fast the executor serves a batch of equal requests, and which part takes the time.

Every prompt is prefilled first (a prefill vote at every turn), then all decode together, so the two
phases are timed apart by wall clock, through the engine: tokens/s of what users see. Further runs
with timers around the parts give their share of the model's and the sampler's time; a part's time
excludes the parts inside it. Timers cost time themselves, so shares and speeds come from different
runs. Memory is the process's peak, and the device's when there is one.

    python benchmarks/bench_exec.py [MODEL] [--batch 4] [--prompt 256] [--output 32] [--repeat 3]
        [--numerics quantised] [--device cpu] [--chunk 2048] [--keep 0] [--threads 1] [--set K=V]

MODEL is a checkpoint directory, or a preset that a temporary checkpoint is made of: tiny (the
default), small, or flash-slice (with --layers and --experts). On a CPU, and wherever an op has no
kernel, the plain-torch reference runs: its speed says nothing about the model on a GPU. The last
line of output is one JSON document with everything that was printed.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import numpy as np
import torch

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.model import transformer
from mdi_exec.model.attention import Attention
from mdi_exec.model.engram import Engram, EngramIds
from mdi_exec.model.hyper_connections import HyperConnection
from mdi_exec.model.indexer import Indexer
from mdi_exec.model.moe import Moe
from mdi_exec.model.transformer import Transformer
from mdi_exec.ops.sampler import Sampler
from mdi_exec.weights.make_checkpoint import make_checkpoint
from mdi_exec.weights.presets import PRESETS
from minideepinfer.commands.executor import engine_options

P = ParamSpec("P")
R = TypeVar("R")

REST = "the rest"  # batch layout, row numbers, embedding, norms outside the parts, checks

# What is wrapped: owner, attribute, the part its time counts as. Inner parts are subtracted.
PARTS: tuple[tuple[object, str, str], ...] = (
    (Attention, "__call__", "attention"),
    (Attention, "store_entries", "compressor"),  # entries and index keys of KV-source layers
    (Indexer, "__call__", "indexer and top-k"),
    (Moe, "__call__", "experts"),  # router and shared expert included
    (HyperConnection, "__call__", "hyper-connections"),
    (transformer, "hc_read", "hyper-connections"),
    (transformer, "hc_read_norm", "hyper-connections"),
    (transformer, "hc_write", "hyper-connections"),
    (transformer, "hc_write_read", "hyper-connections"),
    (Engram, "__call__", "engram"),
    (EngramIds, "__call__", "engram"),
    (Transformer, "logits", "head"),
    (Sampler, "__call__", "sampler"),
    (Transformer, "forward", REST),
)
PART_NAMES = list(dict.fromkeys(part for _, _, part in PARTS))


class PartTimer:
    """Marks each moment at which another part begins to run, and adds up the stretches between.

    On a GPU marks are events in the stream, so a stretch is the device's time, waiting included.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.marks: list[tuple[Any, str]] = []
        self.running: list[str] = []

    def mark(self, part: str) -> None:
        now: Any = time.perf_counter_ns()
        if self.is_cuda:
            now = torch.cuda.current_stream(self.device).record_event(
                torch.cuda.Event(enable_timing=True)
            )
        self.marks.append((now, part))

    def wrap(self, function: Callable[P, R], part: str) -> Callable[P, R]:
        def timed(*arguments: P.args, **options: P.kwargs) -> R:
            self.running.append(part)
            self.mark(part)
            try:
                return function(*arguments, **options)
            finally:
                self.running.pop()
                self.mark(self.running[-1] if self.running else "")

        return timed

    def take_ms(self) -> Counter[str]:
        """Return the milliseconds of each part since the last call."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        spent: Counter[str] = Counter()
        for (begin, part), (end, _) in zip(self.marks, self.marks[1:], strict=False):
            if part:  # empty: the device waited for the host
                spent[part] += begin.elapsed_time(end) if self.is_cuda else (end - begin) / 1e6
        self.marks.clear()
        return spent


@contextmanager
def timed_parts(timer: PartTimer) -> Iterator[None]:
    """Put the timer around every part for as long as the context lasts."""
    with ExitStack() as stack:
        for owner, name, part in PARTS:
            wrapped = timer.wrap(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def serve_batch(
    engine: LLMEngine, prompts: list[list[int]], output: int, on_prefilled: Callable[[], None]
) -> tuple[float, float]:
    """Serve the prompts together; return seconds until all have a token, and from there on."""
    begin = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.add_request(prompt, SamplingParams(max_tokens=output, ignore_eos=True, seq_seed=row))
    waiting, prefilled = len(prompts), 0.0
    while engine.has_unfinished_requests():
        waiting -= sum(len(shown.token_ids) == 1 for shown in engine.step())
        if not prefilled and waiting <= 0:
            prefilled = time.perf_counter()
            on_prefilled()
    end = time.perf_counter()
    engine.drain()
    return prefilled - begin, end - prefilled


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """Run once to warm up, `repeat` times for speed (medians), and as often with timers."""
    shape = (options.batch, options.prompt)
    prompts = np.random.default_rng(0).integers(3, llm.config.vocab_size, shape).tolist()

    def run(on_prefilled: Callable[[], None] = lambda: None) -> tuple[float, float]:
        return serve_batch(llm.engine, prompts, options.output, on_prefilled)

    run()
    if llm.rank.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(llm.rank.model.device)
    prefill_s, decode_s = zip(*(run() for _ in range(options.repeat)), strict=True)
    steps = options.output - 1
    prefill, decode = statistics.median(prefill_s), statistics.median(decode_s)
    result: dict[str, Any] = {
        "prefill_s": prefill, "decode_s": decode, "decode_step_ms": 1e3 * decode / steps,
        "prefill_tokens_per_s": options.batch * options.prompt / prefill,
        "decode_tokens_per_s": options.batch * steps / decode,
        "spread": {"prefill_s": sorted(prefill_s), "decode_s": sorted(decode_s)},
        **peak_memory(llm.rank.model.device),
    }  # fmt: skip
    timer, prefills, decodes = PartTimer(llm.rank.model.device), Counter[str](), Counter[str]()
    with timed_parts(timer):
        for _ in range(options.repeat):
            run(lambda: prefills.update(timer.take_ms()))
            decodes.update(timer.take_ms())
    return {**result, "prefill_share": shares_of(prefills), "decode_share": shares_of(decodes)}


def shares_of(spent: Counter[str]) -> dict[str, float]:
    total = sum(spent.values())
    return {part: spent[part] / total for part in PART_NAMES}


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak of the process, mapped weights included, and of the device's allocator; MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    found = {"peak_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if device.type == "cuda":
        found["peak_device_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return found


def conditions(device: torch.device) -> dict[str, Any]:
    """Say what the numbers hold for."""
    hardware = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        hardware = models[0].partition(": ")[2] if models else hardware
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    found: dict[str, Any] = {"cpu": hardware, "cores": os.cpu_count()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return {
        **found, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "commit": commit or "unknown",
        "ops": "reference ops" if device.type == "cpu" else "kernels where an op has one",
    }  # fmt: skip


def pool_options(options: argparse.Namespace) -> dict[str, Any]:
    """Size the engine for exactly this batch, with a prefill vote at every turn."""
    length = options.prompt + options.output
    blocks = options.batch * (-(-(length + 1) // 128) + 1)
    return {
        "device": options.device, "numerics": options.numerics, "replay_keep_tokens": options.keep,
        "max_num_seqs": options.batch, "max_model_len": length, "prefill_attempt_interval": 1,
        "max_num_batched_tokens": max(options.chunk, options.batch),
        "num_blocks": 2 + -(-blocks * 5 // 4), **engine_options(options.set),
    }  # fmt: skip


@contextmanager
def checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """Give the checkpoint directory: the named one, or a temporary one of the named preset."""
    if options.model not in PRESETS:
        yield Path(options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield make_checkpoint(
            Path(folder) / options.model, options.model,
            layers=options.layers, num_experts=options.experts, with_draft=False, with_vision=False,
        )  # fmt: skip


def report(options: argparse.Namespace) -> dict[str, Any]:
    with checkpoint(options) as directory:
        engine = pool_options(options)
        with LLM(directory, **engine) as llm:
            document: dict[str, Any] = {
                "conditions": conditions(llm.rank.model.device), "model": options.model,
                "weights_mib": llm.source.weight_bytes / 2**20, "batch": options.batch,
                "prompt": options.prompt, "output": options.output, "repeat": options.repeat,
                "engine": engine,
            }  # fmt: skip
            show_conditions(document)
            document["result"] = measure(llm, options)
            show_result(document["result"])
            return document


def show_conditions(document: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in document["conditions"].items()))
    print(f"model {document['model']} ({document['weights_mib']:.0f} MiB of weights), "
          f"{document['batch']} requests of {document['prompt']} + {document['output']} tokens, "
          f"median of {document['repeat']}")  # fmt: skip
    print("engine: " + ", ".join(f"{key} {value}" for key, value in document["engine"].items()))


def show_result(result: dict[str, Any]) -> None:
    prefill, decode = result["prefill_tokens_per_s"], result["decode_tokens_per_s"]
    print(f"prefill {prefill:10.1f} tokens/s ({result['prefill_s']:.3f} s)")
    print(f"decode  {decode:10.1f} tokens/s ({result['decode_step_ms']:.1f} ms a step)")
    print("peak memory: " + ", ".join(f"{name.split('_')[1]} {value:.0f} MiB"
          for name, value in result.items() if name.startswith("peak_")))  # fmt: skip
    print(f"{'share of time':20}{'prefill':>9}{'decode':>9}")
    for part in PART_NAMES:
        shares = (result["prefill_share"][part], result["decode_share"][part])
        print(f"{part:20}{shares[0]:9.1%}{shares[1]:9.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="tiny", help="checkpoint directory or preset")
    for name, default, text in (
        ("batch", 4, "requests served together"), ("prompt", 256, "tokens of each prompt"),
        ("output", 32, "tokens generated for each"), ("repeat", 3, "runs that count"),
        ("chunk", 2_048, "prefill tokens of a step"),
        ("keep", 0, "bounded replay: tokens kept (0 = off)"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--numerics", default="quantised", help="quantised or float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--layers", type=int, help="of a flash-slice")
    parser.add_argument("--experts", type=int, help="routed experts of a preset's layers")
    parser.add_argument("--threads", type=int, help="torch threads on the CPU (default: torch's)")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="any engine option")
    options = parser.parse_args()
    for name, least in (("batch", 1), ("prompt", 1), ("output", 2), ("repeat", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(json.dumps(report(options)))


if __name__ == "__main__":
    main()
