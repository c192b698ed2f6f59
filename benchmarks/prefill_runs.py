"""The measurements of `bench_prefill.py`: steps of one model, alone or with other ranks.

Every rank runs every function here, with equal arguments, and all wait for each other in it.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_decode import graph_of, wall_ms
from gpu_timing import PartTimer, Table, medians, peak_gb
from prefill_parts import part_times, report
from rank_runs import Stopwatch
from slice_model import build

from mdi_exec.engine.device_timing import Ceilings, synchronize
from mdi_exec.engine.made_up_steps import filled_cache, random_batch
from mdi_exec.engine.memory import StepLimits, estimate_memory
from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.config_reader import read_config
from mdi_exec.model.floors import StepShape
from mdi_exec.model.ranges import watching
from mdi_exec.model.transformer import Transformer
from mdi_exec.ranks.exchange import ExpertExchange, ExpertShard, StepRows
from mdi_exec.ranks.parallel import RankGroup
from mdi_exec.weights.presets import released_config

ALONE = "one GPU"
MB = 1e6
COLUMNS = {
    "rank": 5, "median ms": 9, "mean ms": 9, "p99 ms": 9, "tokens/s": 9, "exchange ms": 11,
    "share": 7, "collectives ms": 14, "MB sent": 9,
}  # fmt: skip


class Sample(NamedTuple):
    """One step: wall ms, ms by part of the model and by part of the exchange, bytes sent."""

    wall_ms: float
    parts: dict[str, float]
    exchange: dict[str, float]
    sent_bytes: int


def forward(model: Transformer, batch: Batch, cache: DeviceCache) -> object:
    """Run a step that all ranks run with as many rows; returns its logits."""
    exchange = model.exchange
    exchange.begin_step([StepRows(batch.num_rows, batch.num_kept)] * exchange.size)
    return model.forward(batch, cache)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements of a process share."""

    options: argparse.Namespace
    group: RankGroup
    device: torch.device
    ceiling: Ceilings
    watch: Stopwatch


class Loaded:
    """A rank's model, or its part of one, and a timer of its parts, off until it is needed."""

    def __init__(self, bench: Bench, shard: ExpertShard, exchange: ExpertExchange) -> None:
        options, device = bench.options, bench.device
        gc.collect()  # a model before this one
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        self.source, self.model = build(options, device, shard, exchange)
        synchronize(device)
        self.load_s = time.perf_counter() - begin
        self.timer = PartTimer(device)
        self.timer.is_on = False
        self.step = StepShape(1, options.new, options.context)
        self.cache = filled_cache(self.model, self.step)
        limits = StepLimits(rows=options.new, seqs=1, context=options.context)
        self.estimate = estimate_memory(
            self.cache.layout, limits, num_blocks=self.cache.num_blocks,
            num_slots=self.cache.num_slots, copies_limit=options.copies_gb * 1e9,
            for_kernels=device.type == "cuda", shard=shard,
        )  # fmt: skip
        print(f"\n{self.source.name}, rank {shard.rank} of {shard.size}: {self.load_s:.3g} s to "
              f"draw and load, estimated {self.estimate.total / 1e9:.4g} GB",
              flush=True)  # fmt: skip

    def batch(self, seed: int) -> Batch:
        """Return the official step's batch with random new tokens."""
        return random_batch(self.model, self.step, seed)


def way_name(model: Transformer, kind: str) -> str:
    """Name a measurement: one GPU, or how many ranks with which exchange."""
    size = model.exchange.size
    return ALONE if size == 1 else f"EP{size} x DP{size}, {kind}"


def measure_prefill(bench: Bench, loaded: Loaded, kind: str) -> dict[str, Any]:
    """Time prefill steps over all ranks; prints them and returns them for the document."""
    options, model = bench.options, loaded.model
    name, size = way_name(model, kind), model.exchange.size
    print(f"\n{name}: {options.new} new tokens at context {options.context}", flush=True)
    runs = [_run_steps(bench, loaded, run) for run in range(options.runs)]
    samples = [sample for run in runs for sample in run]
    own = {"rank": bench.group.rank, "run_mean_ms": [_mean_wall(run) for run in runs],
           "step_ms": [sample.wall_ms for sample in samples],
           **_times(samples, options.new)}  # fmt: skip
    ranks = bench.group.gather_plain(own)
    _print_ranks(name, ranks)
    is_slice = options.preset == "flash-slice"
    target = read_config(released_config()) if is_slice else model.config
    times = part_times(model.config, medians([sample.parts for sample in samples]))
    parts = report(model, times, loaded.step, bench.ceiling, target)
    peak = peak_gb(bench.device)
    print(f"device memory: estimated {loaded.estimate.total / 1e9:.4g} GB, peak {peak}")
    return {
        "way": name, "exchange": kind, "n_gpus": size, "model": loaded.source.name,
        "layers": model.config.num_hidden_layers, **over_ranks(ranks), "ranks": ranks, **parts,
        "load_s": loaded.load_s, "peak_device_gb": peak,
        "estimated_gb": {part: n / 1e9 for part, n in asdict(loaded.estimate).items()},
    }  # fmt: skip


def _run_steps(bench: Bench, loaded: Loaded, run: int) -> list[Sample]:
    """Run warm-up and measured steps; returns the latter. All ranks begin together."""
    options, model = bench.options, loaded.model
    number = options.warmup + options.steps
    batches = [loaded.batch(seed=run * number + step) for step in range(number)]
    bench.group.gather((run,))
    loaded.timer.is_on = bench.watch.is_on = True
    samples = []
    for step, batch in enumerate(batches):
        sent = model.exchange.sent_bytes
        synchronize(bench.device)
        begin = time.perf_counter()
        loaded.timer.mark("the rest")
        with watching(loaded.timer.range):
            forward(model, batch, loaded.cache)
        loaded.timer.mark("")
        synchronize(bench.device)
        wall = 1e3 * (time.perf_counter() - begin)
        sample = Sample(wall, loaded.timer.take_ms(), bench.watch.take_ms(),
                        model.exchange.sent_bytes - sent)  # fmt: skip
        print(f"step {step}: {wall:.4g} ms", flush=True)
        if step >= options.warmup:
            samples.append(sample)
    loaded.timer.is_on = bench.watch.is_on = False
    return samples


def _mean_wall(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.wall_ms for sample in samples)


def _times(samples: Sequence[Sample], rows: int) -> dict[str, float]:
    walls = [sample.wall_ms for sample in samples]
    mean = statistics.fmean(walls)
    spent = {name: statistics.fmean(sample.exchange.get(name, 0.0) for sample in samples)
             for name in ("exchange", "experts", "collectives")}  # fmt: skip
    return {
        "mean_ms": mean, "p50_ms": statistics.median(walls),
        "p99_ms": float(np.percentile(walls, 99)), "input_tok_s_gpu": 1e3 * rows / mean,
        **exchange_times(spent, mean),
        "sent_bytes": statistics.fmean(sample.sent_bytes for sample in samples),
    }  # fmt: skip


def exchange_times(spent: dict[str, float], step_ms: float) -> dict[str, float]:
    """Return the exchange's ms of a step, and its share, from what a stopwatch has counted."""
    own = spent.get("exchange", 0.0) - spent.get("experts", 0.0)
    collectives = spent.get("collectives", 0.0)
    return {"exchange_ms": own, "exchange_share": own / step_ms, "collectives_ms": collectives,
            "collectives_share": collectives / step_ms}  # fmt: skip


def over_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean over ranks of every number, and of every number in a list, in its place."""
    return {
        key: np.mean([rank[key] for rank in ranks], axis=0).tolist()
        for key in ranks[0] if key != "rank"
    }  # fmt: skip


def _print_ranks(name: str, ranks: Sequence[dict[str, Any]]) -> None:
    table = Table(f"{name}, by rank", COLUMNS)
    table.head()
    for rank in (*ranks, {"rank": "mean", **over_ranks(ranks)}):
        table.add(rank["rank"], rank["p50_ms"], rank["mean_ms"], rank["p99_ms"],
                  rank["input_tok_s_gpu"], rank["exchange_ms"], f"{rank['exchange_share']:.1%}",
                  rank["collectives_ms"], rank["sent_bytes"] / MB)  # fmt: skip


def measure_decode(bench: Bench, loaded: Loaded, kind: str) -> list[dict[str, Any]]:
    """Time decode steps over all ranks, op by op, and as a CUDA graph where there can be one."""
    options, model = bench.options, loaded.model
    count, context = options.decode_batch, options.decode_context
    step = StepShape(count, 1, context)
    cache, batch = filled_cache(model, step), random_batch(model, step, seed=bench.group.rank)
    calls: dict[str, Callable[[], object]] = {"eager": lambda: forward(model, batch, cache)}
    calls["eager"]()  # compiles
    if model.is_capturable:
        calls["graph"] = graph_of(model, batch, cache)
    found = []
    for how, call in calls.items():
        ranks = bench.group.gather_plain(_time_decode(bench, model, call))
        name, means = way_name(model, kind), over_ranks(ranks)
        found.append({
            "way": name, "exchange": kind, "n_gpus": model.exchange.size,
            "model": loaded.source.name, "layers": model.config.num_hidden_layers, "how": how,
            "batch": count, "context": context, **means, "ranks": ranks,
        })  # fmt: skip
        print(f"{name}, {how}: decode of {count} at {context} {means['step_ms']:.4g} "
              f"ms, {means['output_tok_s_gpu']:.5g} tokens/s per GPU, in exchange "
              f"{means['exchange_share']:.1%} (collectives {means['collectives_share']:.1%}), "
              f"{means['sent_bytes'] / MB:.4g} MB sent", flush=True)  # fmt: skip
    return found


def _time_decode(bench: Bench, model: Transformer, call: Callable[[], object]) -> dict[str, float]:
    """Time steps launched one after another: once undisturbed, once with the stopwatch on."""
    steps = bench.options.decode_steps
    bench.group.gather((steps,))
    ms = wall_ms(call, bench.device, steps)
    sent = model.exchange.sent_bytes
    bench.watch.is_on = True
    watched_ms = wall_ms(call, bench.device, steps)  # and one call before it counts
    bench.watch.is_on = False
    each = {name: spent / (steps + 1) for name, spent in bench.watch.take_ms().items()}
    return {
        "step_ms": ms, "tok_s_user": 1e3 / ms,
        "output_tok_s_gpu": 1e3 * bench.options.decode_batch / ms,
        **exchange_times(each, watched_ms),
        "sent_bytes": (model.exchange.sent_bytes - sent) / (steps + 1),
    }  # fmt: skip
