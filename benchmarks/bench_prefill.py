"""Prefill of long contexts: time of each kind of layer, and what all 40 layers would take.

The geometry is the official one (engine-semantics §8.2, §8.3): one sequence whose context of
131,072 tokens is 126,976 cached and 4,096 new, 3 steps to warm up and 10 that count, every layer
computing every row (full replay), real routing. The cached part is random, as the weights are. Only
as many layers are built as --layers says; kinds of layers follow the released plan, so the full
model's step is implied by adding up the medians of its 40 layers: no 40-layer model runs here,
Engram's tables are smaller than released, and all experts of a layer are on one GPU.

    python benchmarks/bench_prefill.py [--device cuda] [--preset flash-slice] [--layers 6]
        [--context 131072] [--new 4096] [--steps 10] [--warmup 3] [--profile] [--out FILE]

To try it without a GPU: --device cpu --preset tiny --context 512 --new 64 --steps 2 --warmup 1.
The last line of output is one JSON document with everything that was printed.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from gpu_timing import (
    Ceilings,
    PartTimer,
    Table,
    add_common_options,
    finish,
    medians,
    peak_gb,
    random_ids,
    start,
    synchronize,
)
from slice_model import (
    StepShape,
    Work,
    batch_of,
    blocks_for,
    build,
    engram_work,
    filled_cache,
    head_work,
    layer_work,
    time_parts,
)

from mdi_exec.cache import DeviceCache
from mdi_exec.memory import StepLimits, estimate_memory
from mdi_exec.model.config import ModelConfig
from mdi_exec.model.transformer import Transformer
from mdi_exec.presets import layer_kinds, released_config

ENGRAM = "+engram"
OTHERS = ("embedding", "engram", "head", "the rest")


def run_steps(
    model: Transformer, cache: DeviceCache, options: argparse.Namespace, timer: PartTimer
) -> tuple[list[float], list[dict[str, float]]]:
    """Run all steps; returns wall milliseconds and parts of those that count."""
    walls, parts = [], []
    for number in range(options.warmup + options.steps):
        ids = random_ids(options.new, model.config.vocab_size, seed=number)
        batch = batch_of(1, options.new, options.context, ids, model.device)
        synchronize(model.device)
        begin = time.perf_counter()
        timer.mark("the rest")
        model.forward(batch, cache)
        timer.mark("")
        synchronize(model.device)
        wall = 1e3 * (time.perf_counter() - begin)
        spent = timer.take_ms()
        if number >= options.warmup:
            walls.append(wall)
            parts.append(spent)
        print(f"step {number}: {wall:.4g} ms", flush=True)
    return walls, parts


def part_times(config: ModelConfig, found: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of one layer of each kind and of one of each other part."""
    by_kind: dict[str, list[float]] = {}
    for layer, kind in enumerate(layer_kinds(config)):
        by_kind.setdefault(kind.removesuffix(ENGRAM), []).append(found[f"layer {layer}"])
    times = {kind: statistics.median(values) for kind, values in by_kind.items()}
    for part in OTHERS:
        count = len(config.engram_layer_ids) if part == "engram" else 1
        times[part] = found.get(part, 0.0) / max(count, 1)
    return times


def part_floors(config: ModelConfig, step: StepShape) -> dict[str, Work]:
    """Return the least work of one layer of each kind and of the parts that have any."""
    floors: dict[str, Work] = {}
    for layer, kind in enumerate(layer_kinds(config)):
        work = layer_work(config, config.layer_plan(layer), step)
        floors.setdefault(kind.removesuffix(ENGRAM), work)
    if config.engram_layer_ids:
        floors["engram"] = engram_work(config, step)
    floors["head"] = head_work(config, step.num_seqs)
    return floors


def implied(config: ModelConfig, times: dict[str, float]) -> dict[str, Any]:
    """Add the kinds' times up over the plan of `config`."""
    kinds = layer_kinds(config)
    counts = {kind: 0 for kind in times}
    for kind in kinds:
        counts[kind.removesuffix(ENGRAM)] += 1
    counts["engram"] = sum(kind.endswith(ENGRAM) for kind in kinds)
    counts |= {part: 1 for part in OTHERS if part != "engram"}
    return {"layers": len(kinds), "counts": counts,
            "step_ms": sum(counts[part] * times[part] for part in times)}  # fmt: skip


def report(
    model: Transformer, times: dict[str, float], step: StepShape, ceiling: Ceilings,
    target: ModelConfig,
) -> dict[str, Any]:  # fmt: skip
    """Print a line for each part and the implied step; returns both for the document."""
    floors, whole = part_floors(model.config, step), implied(target, times)
    table = Table(
        f"one layer of each kind, {step.rows} rows at context {step.context}",
        {"part": -24, "ms": 9, "floor ms": 9, "of floor": 9, "TFLOP/s": 9, "in model": 9,
         "share": 7},
    )  # fmt: skip
    table.head()
    floor_sum = 0.0
    for part, ms in times.items():
        work, count = floors.get(part, Work()), whole["counts"][part]
        floor = ceiling.floor_ms(work.flops, work.num_bytes)
        floor_sum += count * floor
        table.add(part, ms, floor or None, floor / ms if ms and floor else None,
                  work.flops / ms / 1e9 if ms and work.flops else None, count,
                  f"{count * ms / whole['step_ms']:.1%}")  # fmt: skip
    whole["floor_ms"] = floor_sum
    whole["input_tok_s_gpu"] = 1e3 * step.total_rows / whole["step_ms"]
    print(f"implied step of {whole['layers']} layers: {whole['step_ms']:.4g} ms, "
          f"{whole['input_tok_s_gpu']:.5g} tokens/s, floor {floor_sum:.4g} ms "
          "(added up from the table, not run)")  # fmt: skip
    return {"parts": table.rows, "implied": whole}


def profile(
    model: Transformer, cache: DeviceCache, options: argparse.Namespace
) -> list[dict[str, Any]]:  # fmt: skip
    """Print and return the kernels of one step by the time they take."""
    ids = random_ids(options.new, model.config.vocab_size, seed=0)
    batch = batch_of(1, options.new, options.context, ids, model.device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        model.forward(batch, cache)
        synchronize(model.device)
    events = profiler.key_averages()
    field = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    spent = {event.key: (getattr(event, field) / 1e3, event.count) for event in events}
    table = Table("one step by kernel", {"ms": 9, "calls": 6, "kernel": -80})
    table.head()
    for key, (ms, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:40]:
        table.add(ms, count, key[:120])
    return table.rows  # type: ignore[return-value]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser, preset="flash-slice")
    for name, default, text in (
        ("context", 131_072, "context length at the step's end"), ("new", 4_096, "rows of a step"),
        ("steps", 10, "steps that count"), ("warmup", 3, "steps before them"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--profile", action="store_true", help="also list one step's kernels")
    options = parser.parse_args()
    for name, least in (("new", 1), ("context", options.new), ("steps", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return options


def main() -> None:
    options = parse()
    device, document, ceiling = start(options)
    begin = time.perf_counter()
    source, model = build(options, device)
    cache = filled_cache(model, num_blocks=1 + blocks_for(options.context), num_slots=2)
    synchronize(device)
    document["load_s"] = time.perf_counter() - begin
    limits = StepLimits(rows=options.new, seqs=1, context=options.context)
    needed = estimate_memory(
        cache.layout, limits, num_blocks=cache.num_blocks, num_slots=cache.num_slots,
        copies_limit=options.copies_gb * 1e9, for_kernels=device.type == "cuda",
    )  # fmt: skip
    document["estimated_gb"] = {part: size / 1e9 for part, size in asdict(needed).items()}
    print(f"{source.name}: {source.weight_bytes / 1e9:.4g} GB of weights, "
          f"{document['load_s']:.3g} s to draw and load", flush=True)  # fmt: skip
    if options.profile:
        model.forward(batch_of(1, options.new, options.context, random_ids(
            options.new, model.config.vocab_size, 0), device), cache)  # fmt: skip
        document["kernels"] = profile(model, cache, options)
    timer = PartTimer(device)
    time_parts(model, timer)
    walls, parts = run_steps(model, cache, options, timer)
    step = StepShape(1, options.new, options.context)
    is_slice = options.preset == "flash-slice"
    target = ModelConfig.from_dict(released_config()) if is_slice else model.config
    times = part_times(model.config, medians(parts))
    document |= report(model, times, step, ceiling, target)
    document |= {"wall_ms": walls, "median_wall_ms": statistics.median(walls),
                 "peak_device_gb": peak_gb(device)}  # fmt: skip
    in_parts = sum(medians(parts).values())
    print(f"measured step of {model.config.num_hidden_layers} layers: median "
          f"{document['median_wall_ms']:.4g} ms wall, {in_parts:.4g} ms in parts")  # fmt: skip
    print(
        f"device memory: estimated {needed.total / 1e9:.4g} GB, peak {document['peak_device_gb']}"
    )
    finish(options, document)


if __name__ == "__main__":
    main()
