"""Decode steps: time, tokens/s, and how near the least bytes that a step must read.

Batches of --batches sequences at contexts --contexts, one new token each, on a model of random
weights; the contexts' caches are random too. A step is captured as a CUDA graph and replayed, where
nothing in it waits for the host; otherwise it is launched op by op ("eager"). The floor is bytes
over the copy rate: every dense weight once, the experts that the step's routing really chose, and
the cache rows that attention and indexer must read. Time is the device's (median of --steps); wall
time is that of launching steps one after another, as a server would. No sampling, no scheduler.

    python benchmarks/bench_decode.py [--device cuda] [--preset flash-slice] [--layers 6]
        [--batches 1 8 64 256] [--contexts 4096 131072] [--steps 20] [--no-graph] [--out FILE]
        [--out-dir DIR]                                 # adds to DIR/pareto.csv and draws it

To try it without a GPU: --device cpu --preset tiny --batches 1 4 --contexts 256 --steps 2. The last
line of output is one JSON document with everything that was printed.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Table, add_common_options, finish, peak_gb, start
from pareto import Point, add_points, decode_point
from slice_model import build
from torch import Tensor

from mdi_exec.engine.device_timing import Ceilings, median_ms, synchronize
from mdi_exec.engine.made_up_steps import filled_cache, random_batch
from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.floors import StepShape, step_work, sum_of
from mdi_exec.model.moe import Router
from mdi_exec.model.transformer import Transformer

COLUMNS = {
    "batch": 6, "context": 8, "how": 6, "ms": 9, "wall ms": 9, "tokens/s": 9, "GB read": 8,
    "experts": 8, "floor ms": 9, "of floor": 9,
}  # fmt: skip


def active_experts(model: Transformer, batch: Batch, cache: DeviceCache) -> list[int]:
    """Run a step and return how many experts each layer's routing chose."""
    chosen: list[Tensor] = []
    original = Router.__call__

    def watched(router: Router, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        routing = original(router, *arguments, **options)
        chosen.append(routing[0])  # experts [T, k]
        return routing

    Router.__call__ = watched  # type: ignore[method-assign]
    try:
        model.forward(batch, cache)
    finally:
        Router.__call__ = original  # type: ignore[method-assign]
    return [len(torch.unique(experts)) for experts in chosen]


def graph_of(model: Transformer, batch: Batch, cache: DeviceCache) -> Callable[[], object]:
    """Capture a step, return its replay. Raises `RuntimeError` when it waits for the host."""
    side = torch.cuda.Stream(model.device)
    side.wait_stream(torch.cuda.current_stream(model.device))
    with torch.cuda.stream(side):
        for _ in range(2):  # lazily made handles and workspaces must exist before the capture
            model.forward(batch, cache)
    torch.cuda.current_stream(model.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward(batch, cache)
    return graph.replay


def runnable(
    model: Transformer, batch: Batch, cache: DeviceCache, *, wants_graph: bool
) -> tuple[str, Callable[[], object]]:  # fmt: skip
    """Return how a step runs, "graph" or "eager", and what runs it."""
    if wants_graph and model.device.type == "cuda":
        try:
            return "graph", graph_of(model, batch, cache)
        except RuntimeError as error:
            print(f"no graph: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize(model.device)
    return "eager", lambda: model.forward(batch, cache)


def wall_ms(call: Callable[[], object], device: torch.device, steps: int) -> float:
    """Return the milliseconds from one launch to the next, of steps launched without waiting."""
    call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / steps


def measure(
    model: Transformer, num_seqs: int, context: int, ceiling: Ceilings, options: argparse.Namespace
) -> list[Any]:  # fmt: skip
    """Return the table row of one batch at one context; one that does not fit says so."""
    step = StepShape(num_seqs, 1, context)
    try:
        cache, batch = filled_cache(model, step), random_batch(model, step, seed=num_seqs)
        experts = active_experts(model, batch, cache)
        how, call = runnable(model, batch, cache, wants_graph=not options.no_graph)
        ms = median_ms(call, model.device, repeat=options.steps)
        wall = wall_ms(call, model.device, options.steps)
    except torch.OutOfMemoryError:
        return [num_seqs, context, "memory", *[None] * 7]
    work = sum_of(step_work(model.config, step, experts).values())
    floor = ceiling.floor_ms(*work)
    return [num_seqs, context, how, ms, wall, 1e3 * num_seqs / wall, work.num_bytes / 1e9,
            sum(experts) / len(experts), floor, floor / ms]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser, preset="flash-slice")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4_096, 131_072])
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--no-graph", action="store_true", help="launch op by op")
    parser.add_argument("--out-dir", type=Path, help="folder for pareto.csv and pareto.png")
    options = parser.parse_args()
    for name in ("batches", "contexts"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def points_of(rows: Iterable[Mapping[str, Any]], model: Transformer, name: str) -> list[Point]:
    """Return the table's rows as points of the Pareto plot; those that did not fit are none."""
    layers = model.config.num_hidden_layers
    return [
        decode_point("one GPU", row["how"], (name, layers), (row["batch"], row["context"]),
                     (1e3 / row["wall ms"], row["tokens/s"]), 1)
        for row in rows if row["wall ms"] is not None
    ]  # fmt: skip


@torch.inference_mode()
def main() -> None:
    options = parse()
    device, document, ceiling = start(options)
    source, model = build(options, device)
    print(f"{source.name}: {model.config.num_hidden_layers} layers, "
          f"{source.weight_bytes / 1e9:.4g} GB of weights")  # fmt: skip
    table = Table("one decode step; experts: chosen by some token, mean over layers", COLUMNS)
    table.head()
    for context in options.contexts:
        for num_seqs in options.batches:
            table.add(*measure(model, num_seqs, context, ceiling, options))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    document |= {"steps": table.rows, "peak_device_gb": peak_gb(device)}
    if options.out_dir is not None:
        add_points(options.out_dir, points_of(table.rows, model, source.name))
    finish(options, document)


if __name__ == "__main__":
    main()
