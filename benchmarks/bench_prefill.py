"""Prefill of long contexts, on one GPU or over ranks: whole steps, kinds of layers, the exchange.

The geometry is the official one (docs/rules.md, R36): one sequence per rank whose context
of 131,072 tokens is 126,976 cached and 4,096 new, 3 steps to warm up and 10 that count, every layer
computing every row (full replay), real routing. The cached part is random, as the weights are. Only
as many layers are built as --layers says; a full model's step is implied by adding up the medians
by kind of layer: no 40-layer model runs here, and Engram's tables are smaller than released.

    python benchmarks/bench_prefill.py [--device cuda] [--preset flash-slice] [--layers 6]
        [--context 131072] [--new 4096] [--steps 10] [--warmup 3] [--runs 1] [--profile]
        [--out FILE] [--out-dir DIR]
    torchrun --nproc-per-node 2 benchmarks/bench_prefill.py ...    # or: python ... --ranks 2

Over N ranks experts are split N ways (EP N x DP N), both exchanges are measured, and so is each GPU
for itself with all experts. A decode step of --decode-batch sequences per rank is timed on the way.
--out-dir gets bench_prefill.json, pareto.csv and pareto.png, after each measurement.

To try it without a GPU: --device cpu --preset tiny --context 512 --new 64 --steps 2 --warmup 1.
The last line of output is one JSON document with everything that was printed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_timing import Table, add_common_options, finish, start
from pareto import Point, add_points, decode_point, prefill_point
from prefill_runs import Bench, Loaded, forward, measure_decode, measure_prefill
from rank_runs import Stopwatch, own_group, start_ranks, timed_exchanges

from mdi_exec.engine.profiling import StepProfile, kernels_of
from mdi_exec.ranks.exchange import KINDS, NO_EXCHANGE, WHOLE, ExpertExchange, ExpertShard
from mdi_exec.ranks.meeting import RankAddress
from mdi_exec.ranks.parallel import RankGroup, own_device, require_even_experts
from mdi_exec.weights.source import random_config
from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_traces.saving import atomic_file

SCHEMA = 1  # of bench_prefill.json
Measured = tuple[str, list[dict[str, Any]]]  # "prefill", "decode" or "kernels", and what it took


def measure(
    bench: Bench, shard: ExpertShard, exchanges: Mapping[str, ExpertExchange]
) -> Iterator[Measured]:
    """Load a model once and measure it with every exchange, prefill first."""
    options = bench.options
    loaded = Loaded(bench, shard, next(iter(exchanges.values())))
    if options.profile:
        yield "kernels", profile(bench, loaded)
    for kind, exchange in exchanges.items():
        loaded.model.exchange = exchange
        yield "prefill", [measure_prefill(bench, loaded, kind)]
    if options.decode_batch:
        for kind, exchange in exchanges.items():
            loaded.model.exchange = exchange
            yield "decode", measure_decode(bench, loaded, kind)


def profile(bench: Bench, loaded: Loaded) -> list[dict[str, Any]]:
    """Print one step by part, and its longest kernels; return the kernels."""
    batch = loaded.batch(seed=0)
    forward(loaded.model, batch, loaded.cache)  # compiles
    kernels = kernels_of(lambda: forward(loaded.model, batch, loaded.cache), bench.device)
    found = StepProfile(loaded.step, 0.0, kernels, {})
    parts = Table("one step by part", {"ms": 9, "calls": 6, "share": 6, "part": -24})
    parts.head()
    for row in found.rows(bench.ceiling):
        parts.add(row.ms, row.launches, f"{row.share:.1%}", row.part)
    table = Table("one step by kernel", {"ms": 9, "calls": 6, "part": -16, "kernel": -70})
    table.head()
    for kernel in found.by_kernel()[:40]:
        table.add(kernel.ms, kernel.launches, kernel.part, kernel.kernel[:110])
    return table.rows  # type: ignore[return-value]


def prefill_record(document: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return one way's entry of bench_prefill.json."""
    options, size = document["options"], found["n_gpus"]
    about = document["conditions"]
    same = ("model", "n_gpus", "step_ms", "input_tok_s_gpu", "mean_ms", "p50_ms", "p99_ms")
    return {
        "schema": SCHEMA, "engine": "mini-deepinfer", "commit": about["commit"],
        "hardware": about["device"], "ep": size, "dp": size, "cp": 1,
        "context": options["context"], "cached": options["context"] - options["new"],
        "new_per_rank_step": options["new"], "warmup": options["warmup"],
        "measured": options["steps"], **{name: found[name] for name in same},
        "settings": {"exchange": found["exchange"], "layers": found["layers"],
                     "runs": options["runs"], "conditions": about},
        "ranks": found["ranks"],
    }  # fmt: skip


def points_of(document: Mapping[str, Any]) -> list[Point]:
    """Return what was measured as points of the Pareto plot."""
    options = document["options"]
    prefill = [
        prefill_point(found["way"], (found["model"], found["layers"]),
                      (options["new"], options["context"]),
                      (found["mean_ms"], found["input_tok_s_gpu"]), found["n_gpus"])
        for found in document["prefill"]
    ]  # fmt: skip
    return prefill + [
        decode_point(found["way"], found["how"], (found["model"], found["layers"]),
                     (found["batch"], found["context"]),
                     (found["tok_s_user"], found["output_tok_s_gpu"]), found["n_gpus"])
        for found in document["decode"]
    ]  # fmt: skip


def save(folder: Path, document: Mapping[str, Any]) -> None:
    """Write bench_prefill.json, a list with an entry per way, and the Pareto files."""
    add_points(folder, points_of(document))
    records = [prefill_record(document, found) for found in document["prefill"]]
    with atomic_file(folder / "bench_prefill.json") as out:
        out.write(json.dumps(records, indent=1).encode())


def run(options: argparse.Namespace, group: RankGroup) -> None:
    """Measure all ways, the ranks together first; the first rank prints and writes."""
    options.device = own_device(options.device, group)
    device, document, ceiling = start(options)
    document |= {"prefill": [], "decode": []}
    bench = Bench(options, group, device, ceiling, Stopwatch(device))
    plans: list[tuple[ExpertShard, dict[str, ExpertExchange]]] = [(WHOLE, {"none": NO_EXCHANGE})]
    if group.size > 1:
        ways = timed_exchanges(group, bench.watch)
        wanted = {kind: ways[kind] for kind in KINDS if options.exchange in (kind, "both")}
        plans.insert(0, (ExpertShard(group.rank, group.size), wanted))
    for shard, exchanges in plans:
        for what, found in measure(bench, shard, exchanges):
            document.setdefault(what, []).extend(found)
            if options.out_dir is not None and group.rank == 0:
                save(options.out_dir, document)
    if group.rank:
        options.out = None
    finish(options, document)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser, preset="flash-slice")
    for name, default, text in (
        ("context", 131_072, "context length at the step's end"), ("new", 4_096, "rows of a step"),
        ("steps", 10, "steps of a run that count"), ("warmup", 3, "steps before them"),
        ("runs", 1, "runs, each with warm-up"),
        ("decode-context", 4_096, "context of decode steps"), ("decode-steps", 20, "decode steps"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--decode-batch", type=int,
                        help="sequences per rank of decode steps, 0: none "
                        "(default 64 over ranks, else 0)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="start so many ranks on this machine")
    parser.add_argument("--exchange", choices=(*KINDS, "both"), default="both",
                        help="how ranks reach each other's experts")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="also list one step's kernels")
    parser.add_argument("--out-dir", type=Path, help="folder for bench_prefill.json and pareto.*")
    options = parser.parse_args()
    at_least = {"new": 1, "context": options.new, "steps": 1, "warmup": 0, "runs": 1, "ranks": 1,
                "decode_context": 1, "decode_steps": 1}  # fmt: skip
    for name, least in at_least.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.decode_batch is not None and options.decode_batch < 0:
        parser.error("--decode-batch must be at least 0")
    return options


def main() -> None:
    options = parse()
    try:
        address = RankAddress.from_environment()
        size = address.size if address is not None else options.ranks
        if options.ranks not in (1, size):
            raise ConfigError("--ranks", options.ranks, f"but {size} were started")
        config = random_config(options.preset, layers=options.layers, experts=options.experts)
        require_even_experts(config.n_routed_experts, size)
        if options.decode_batch is None:
            options.decode_batch = 64 if size > 1 else 0
        if size > 1 and address is None:
            sys.exit(start_ranks(size))
        with own_group() as group:
            run(options, group)
    except MiniDeepInferError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
