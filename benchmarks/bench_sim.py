"""How fast the simulator replays a public trace, as a whole process and by itself.

Workload: the first 1,000, 10,000 and all rows of Azure's 2023 conversation trace (any trace can
be named), one rank, 256 seats, a 2,048-token budget, more KV memory than it needs, an H200
roofline for V4.1-Flash. Each size runs several times in a fresh interpreter; medians are shown.
Ratios say more than seconds on a shared machine: time per request against the smallest size
(linear if near 1), single steps against fast-forward, and the time of a step with thousands of
requests waiting (or finished) against one with few.

    python benchmarks/bench_sim.py [TRACE] [--rows 1000 10000 0] [--repeat 5] [--profile]

TRACE defaults to azure_conv_2023.csv in the folder MDI_PUBLIC_TRACES names. The last line of
output is one JSON document with everything that was printed.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run_once(trace: Path, rows: int, *, fast_forward: bool) -> dict[str, Any]:
    """Replay `rows` requests (0 = all) in this process; times in seconds, memory in MiB."""
    from mdi_shared.config import SchedulerConfig
    from mdi_sim.simulate import simulate
    from mdi_traces.formats import load_requests

    requests = load_requests(trace, limit=rows or None)
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2_048)
    begin = time.perf_counter()
    run = simulate(requests, scheduler=config, ranks=1, fast_forward=fast_forward)
    seconds = time.perf_counter() - begin
    return {
        "requests": len(requests),
        "steps": run.steps_table.num_rows,
        "simulation_s": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(trace: Path, rows: int, repeat: int, *, fast_forward: bool = True) -> dict[str, Any]:
    """Run in fresh interpreters; return medians, whole-process time included."""
    command = [sys.executable, __file__, str(trace), "--child", str(rows)]
    command += [] if fast_forward else ["--single-steps"]
    results = []
    for _ in range(repeat):
        begin = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append({**json.loads(done.stdout), "process_s": time.perf_counter() - begin})
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def hottest(trace: Path, rows: int, count: int = 3) -> list[str]:
    """Name the functions with the most time of their own, with their share."""
    profile = cProfile.Profile()
    profile.runcall(run_once, trace, rows, fast_forward=True)
    stats = pstats.Stats(profile).get_stats_profile()
    ranked = sorted(stats.func_profiles.items(), key=lambda item: -item[1].tottime)
    return [
        f"{Path(entry.file_name).name}:{name} {entry.tottime / stats.total_tt:.0%}"
        for name, entry in ranked[:count]
    ]


def queue_ratio(trace: Path, repeat: int, few: int = 400, many: int = 4_000) -> float:
    """Time per step with up to `many` requests waiting or finished, over that with `few`.

    All requests arrive at time zero and share 16 seats, so that the batch is the same size
    throughout; every step goes through the loop.
    """
    import pyarrow as pa

    from mdi_shared.config import SchedulerConfig
    from mdi_sim.simulate import simulate
    from mdi_traces.formats import load_requests
    from mdi_traces.requests import RequestTrace, put_column

    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2_048)

    def per_step(rows: int) -> float:
        requests = load_requests(trace, limit=rows)
        at_once = put_column(requests.table, "arrival_ns", pa.array([0] * rows, pa.int64()))
        begin = time.perf_counter()
        run = simulate(
            RequestTrace(at_once, requests.metadata),
            scheduler=config,
            ranks=1,
            fast_forward=False,
        )
        return (time.perf_counter() - begin) / run.steps_table.num_rows

    per_step(few)  # warm up
    return statistics.median(per_step(many) / per_step(few) for _ in range(repeat))


def conditions(trace: Path) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(": ")[2] if models else cpu
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    return {
        "trace": trace.name, "python": platform.python_version(), "cpu": cpu,
        "cores": os.cpu_count(), "commit": commit or "unknown",
    }  # fmt: skip


def report(trace: Path, sizes: list[int], repeat: int, *, profile: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"conditions": conditions(trace), "repeat": repeat, "sizes": []}
    print(", ".join(f"{key} {value}" for key, value in document["conditions"].items()))
    print("requests    steps  process s  simulation s  requests/s   steps/s  peak MiB  "
          "us/step  s/request vs first")  # fmt: skip
    for rows in sizes:
        result = measure(trace, rows, repeat)
        document["sizes"].append(result)
        first = document["sizes"][0]
        each = result["simulation_s"] / result["requests"]
        result["linearity"] = each / (first["simulation_s"] / first["requests"])
        print(
            f"{result['requests']:8.0f} {result['steps']:8.0f} {result['process_s']:10.2f} "
            f"{result['simulation_s']:13.2f} {1 / each:11.0f} "
            f"{result['steps'] / result['simulation_s']:9.0f} {result['peak_mib']:9.0f} "
            f"{1e6 * result['simulation_s'] / result['steps']:8.0f} {result['linearity']:19.2f}"
        )
    single = measure(trace, sizes[0], repeat, fast_forward=False)
    document["single_steps_over_fast_forward"] = (
        single["simulation_s"] / document["sizes"][0]["simulation_s"]
    )
    print(f"single steps take {document['single_steps_over_fast_forward']:.1f} times as long "
          f"at {sizes[0]} requests")  # fmt: skip
    document["queue_ratio"] = queue_ratio(trace, repeat)
    print(f"a step with thousands waiting or finished takes {document['queue_ratio']:.2f} times "
          "as long as one with hundreds")  # fmt: skip
    if profile:
        document["hottest"] = hottest(trace, sizes[min(1, len(sizes) - 1)])
        print("hottest functions: " + ", ".join(document["hottest"]))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    folder = os.environ.get("MDI_PUBLIC_TRACES")
    default = Path(folder) / "azure_conv_2023.csv" if folder else None
    parser.add_argument("trace", type=Path, nargs="?", default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="name the three hottest functions")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--single-steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace is None:
        parser.error("name a TRACE, or set MDI_PUBLIC_TRACES to the folder of public traces")
    if options.child is not None:
        result = run_once(options.trace, options.child, fast_forward=not options.single_steps)
        print(json.dumps(result))
        return
    print(json.dumps(report(options.trace, options.rows, options.repeat, profile=options.profile)))


if __name__ == "__main__":
    main()
