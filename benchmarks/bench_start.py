"""What a user waits for: a first start, a later start, and the prefill step of a short prompt.

Starts are whole processes, `mdi generate MODEL --ids … --max-tokens 8`: the first with an empty
folder of compiled kernels, the second with what the first has left. Steps are those of single
prompts in an engine that serves nothing else, with CUDA graphs and without: the device's time and
the whole request's, medians of --steps. With --kernels the profiler lists
the kernels of one decode step of one sequence, and of one prefill step of 64 rows.

    python benchmarks/bench_start.py [--model random:flash-slice] [--device cuda] [--skip-starts]
        [--rows 20 64 128 256 512 1000] [--steps 12] [--max-model-len 16896] [--kernels]
        [--out FILE]

To try it without a GPU: --device cpu --model random:tiny --skip-starts --rows 20 --steps 2
    --max-model-len 512.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from minideepinfer import LLM, SamplingParams

ENGINE = {"kv_cache_memory_gb": 2.0, "max_num_seqs": 64}
UNTIMED = 3  # steps before those that are timed: a shape's graph is captured at its second use


def first_token_options() -> SamplingParams:
    return SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, seq_seed=1)


def start_seconds(model: str, device: str, folder: str) -> float:
    """Time a whole process that generates eight tokens with kernels kept in `folder`."""
    command = [sys.executable, "-m", "minideepinfer", "generate", model, "--ids", "5,6,7,8",
               "--max-tokens", "8", "--ignore-eos", "--device", device]  # fmt: skip
    begin = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "TILELANG_CACHE_DIR": folder})
    return time.perf_counter() - begin


class Noted:
    """A launched step that keeps its result, which can be asked for only once."""

    def __init__(self, pending: Any) -> None:  # noqa: ANN401
        self.pending = pending
        self.tokens: Any = None

    def result(self) -> Any:  # noqa: ANN401
        self.tokens = self.pending.result()
        return self.tokens


def prompt_steps(llm: LLM, rows: int, steps: int) -> dict[str, float]:
    """Serve prompts of so many tokens one by one; medians of their prefill steps, ms."""
    runner = llm.engine.runner
    launch, launched = runner.launch, list[Noted]()

    def noting(plan: Any, requests: Any) -> Any:  # noqa: ANN401
        pending, handed_ns = launch(plan, requests)
        if not (plan.is_prefill and plan.seq_ids):
            return pending, handed_ns
        launched.append(Noted(pending))
        return launched[-1], handed_ns

    runner.launch = noting
    request_ms = []
    for index in range(steps + UNTIMED):
        prompt = [(7 * index + 13 * i) % 1000 + 3 for i in range(rows)]
        begin = time.perf_counter()
        llm.generate([prompt], first_token_options())
        request_ms.append((time.perf_counter() - begin) * 1e3)
    runner.launch = launch
    timed = [step.tokens for step in launched[UNTIMED:]]
    return {
        "rows": rows, "graph": timed[-1].graph_size,
        "device_ms": statistics.median((t.end_ns - t.start_ns) / 1e6 for t in timed),
        "request_ms": statistics.median(request_ms[UNTIMED:]),
    }  # fmt: skip


def kernels_of(work: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Profile one call of `work`: kernels by name, their number and their time, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    begins, ends = [], []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count[event.name] += 1
            spent[event.name] += event.time_range.elapsed_us()
            begins.append(event.time_range.start)
            ends.append(event.time_range.end)
    span = max(ends) - min(begins) if ends else 0
    total = {"name": "all", "count": sum(count.values()), "us": sum(spent.values()), "span": span}
    return [total, *({"name": name[:90], "count": count[name], "us": us}
                     for name, us in spent.most_common(45))]  # fmt: skip


def show_kernels(llm: LLM, result: dict[str, Any]) -> None:
    """Profile the graphs of one decode row and of a short prompt."""
    shapes = llm.engine.runner.graphs.shapes()
    short = next(s for s in shapes if (s.rows, s.seqs, s.max_k) == (64, 2, 8192))
    for name, shape in (("decode of 1", shapes[-1]), ("prefill of 64 rows", short)):
        result[name] = captured_kernels(llm, shape)
        print(name)
        for row in result[name]:
            print("  ", row)


def captured_kernels(llm: LLM, shape: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    graphs = llm.engine.runner.graphs
    assert graphs is not None, "profiles are of captured graphs"
    return kernels_of(graphs._graph(shape).forward.replay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:flash-slice")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-starts", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[20, 64, 128, 256, 512, 1000])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-model-len", type=int, default=16896)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"model": options.model, "device": options.device, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        if not options.skip_starts:
            result["starts_s"] = [start_seconds(options.model, options.device, folder)
                                  for _ in range(2)]  # fmt: skip
            print("first and later start, s:", *(f"{s:.1f}" for s in result["starts_s"]))
            os.environ["TILELANG_CACHE_DIR"] = folder
        for uses_graphs in (True, False):
            engine = {
                **ENGINE,
                "max_model_len": options.max_model_len,
                "use_cuda_graphs": uses_graphs,
            }
            with LLM(options.model, device=options.device, **engine) as llm:
                for rows in options.rows:
                    one = prompt_steps(llm, rows, options.steps)
                    result["steps"].append(one)
                    print({name: round(value, 2) for name, value in one.items()}, flush=True)
                if uses_graphs and options.kernels:
                    show_kernels(llm, result)
    document = json.dumps(result)
    if options.out is not None:
        options.out.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
