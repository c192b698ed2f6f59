"""What a simulation costs: CPU time and memory of whole processes, and of single steps.

Cases: the first 1,000, 10,000 and all rows of Azure's 2023 conversation trace on one rank; the same
four times as fast, with much KV memory and with 65k tokens of it; 4, 16 and 64 ranks, with traffic
in proportion, so that each serves what the one rank did, and 64 that share the traffic of one; the
default step times, which overload one rank; and `mdi simulate`, the command. 256 seats, a
2,048-token budget. But for the default, step times are those of another simulator (`sim_runs.py`):
the same trace with other times is other work, fewer steps with larger batches.

    python -m benchmarks.bench_sim [TRACE] [--peer PYTHON] [--only PART ...] [--repeat 3]

With `--peer`, the interpreter of an environment that has `ai-dynamo-runtime==1.6.1`, its engine
simulator replays the same rows in the same round, and ratios to it are shown: medians of pairs. Its
ranks are engines that share nothing, ours step together. Latencies show how alike the work is.
Without a peer: seconds and steps a second of this machine.

TRACE defaults to azure_conv_2023.csv in the folder MDI_PUBLIC_TRACES names. Only this process's
children are measured, so it imports nothing large itself: memory at a fork counts as a child's.
The last line of output is one JSON document with everything.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.sim_runs import Case

RUNS = Path(__file__).with_name("sim_runs.py")
PRESSED = 65_536  # tokens
ALL_ROWS = 19_366
FEW, MANY = 10, 4_000  # requests that wait
Result = dict[str, Any]


def cases(trace: str) -> dict[str, Case]:
    """Return what is measured, by name."""
    sizes = {f"{rows:,} rows": Case(trace=trace, rows=rows) for rows in (1_000, 10_000, ALL_ROWS)}
    return sizes | {
        "overload x4": Case(trace=trace, rows=10_000, speed=4),
        "KV pressure": Case(trace=trace, rows=10_000, speed=4, pool=PRESSED),
        **{f"{n} ranks": Case(trace=trace, rows=10_000, ranks=n, speed=n) for n in (4, 16, 64)},
        "64 ranks, little to do, 300 rows": Case(trace=trace, rows=300, ranks=64),
        "default step times": Case(trace=trace, rows=10_000, matched=False),
    }


def measure(command: list[str]) -> Result:
    """Run a process to its end; return what its last line says, CPU seconds and peak MiB."""
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
        out.seek(0)
        last = out.read().decode().splitlines()[-1]
    kib = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    said = json.loads(last) if last.startswith("{") else {}
    return {**said, "cpu_s": used.ru_utime + used.ru_stime, "mib": kib / 1024}


def child(what: str, case: Mapping[str, Any], *files: Path, python: str = sys.executable) -> Result:
    return measure([python, str(RUNS), what, json.dumps(case), *map(str, files)])


def command_line(case: Case, cost: Path) -> list[str]:
    """Return the `mdi simulate` that does what `sim_runs.py ours` does, and sums it up."""
    line = [sys.executable, "-m", "minideepinfer", "simulate", case.trace, "--ranks", "1",
            "--limit", str(case.rows)]  # fmt: skip
    line += ["--cost", str(cost)] if case.matched else []
    return line + [f"--set={name}={value}" for name, value in case.scheduler().items()]


def medians(rounds: list[Result]) -> Result:
    return {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}


def ratios(ours: list[Result], theirs: list[Result]) -> Result:
    """Return medians of the ratios of pairs, each of which ran one after the other."""
    pairs = list(zip(ours, theirs, strict=True))
    return {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in ("cpu_s", "mib")}


def measure_case(name: str, case: Case, peer: str | None, folder: Path, repeat: int) -> Result:
    """Run one case `repeat` times, each time ours, the peer's and the command's, if they apply."""
    rows = folder / f"{case.rows}.jsonl"
    if peer and case.matched and not rows.exists():
        child("mooncake", case.fields(), rows)
    has_command = case.rows == 10_000 and case.ranks == 1 and case.speed == 1
    ours, theirs, commands = [], [], []
    for _ in range(repeat):
        ours.append(child("ours", case.fields()))
        if peer and case.matched:
            theirs.append(child("peer", case.fields(), rows, python=peer))
        if has_command:
            commands.append(measure(command_line(case, folder / "cost.json")))
    found: Result = {"name": name, **medians(ours)}
    if theirs:
        found |= {"peer": medians(theirs), "over_peer": ratios(ours, theirs)}
    if commands:
        found |= {"command": medians(commands), "command_over_ours": ratios(commands, ours)}
        if theirs:
            found["command_over_peer"] = ratios(commands, theirs)
    return found


HEADERS = ("case", "steps", "CPU s", "steps/s", "MiB", "TTFT ms", "TPOT ms", "CPU / peer's",
           "MiB / peer's", "peer's TTFT", "peer's TPOT")  # fmt: skip


def lines_of(found: Result) -> Iterator[tuple[str, ...]]:
    """Yield a case's line of the table, and one more for the command."""

    def over_peer(key: str) -> tuple[str, str]:
        pair = found.get(key)
        return ("", "") if pair is None else (f"{pair['cpu_s']:.2f}", f"{pair['mib']:.2f}")

    peer = found.get("peer")
    yield (found["name"], f"{found['steps']:,.0f}", f"{found['cpu_s']:.2f}",
           f"{found['steps'] / found['simulation_s']:,.0f}", f"{found['mib']:.0f}",
           f"{found['ttft_ms']:,.0f}", f"{found['tpot_ms']:.1f}", *over_peer("over_peer"),
           *(("", "") if peer is None else (f"{peer['ttft_ms']:,.0f}", f"{peer['tpot_ms']:.1f}")),
           )  # fmt: skip
    if "command" in found:
        command, ratio = found["command"], found["command_over_ours"]
        name = f"same, `mdi simulate` ({ratio['cpu_s']:.2f} x CPU, {ratio['mib']:.2f} x MiB)"
        yield (name, "", f"{command['cpu_s']:.2f}", "", f"{command['mib']:.0f}", "", "",
               *over_peer("command_over_peer"), "", "")  # fmt: skip


def print_line(cells: tuple[str, ...]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def measure_steps(repeat: int) -> list[Result]:
    """Time a decode step with few and many running and waiting, fast-forwarded and single."""
    print_line(("running", "waiting", "us a step", "us, single steps"))
    print_line(("---:",) * 4)
    table = []
    for running in (10, 250):
        for waiting in (FEW, MANY):
            sizes = {"running": running, "waiting": waiting}
            found = {
                fast: medians([child("step", {**sizes, "fast_forward": fast})
                               for _ in range(repeat)])["us"]
                for fast in (True, False)
            }  # fmt: skip
            table.append({**sizes, "us": found[True], "single_us": found[False]})
            print_line((f"{running}", f"{waiting:,}", f"{found[True]:.1f}", f"{found[False]:.1f}"))
    return table


def conditions(trace: str) -> Result:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(": ")[2] if models else cpu
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=RUNS.parent,
    ).stdout.strip()  # fmt: skip
    return {"trace": Path(trace).name, "python": platform.python_version(), "cpu": cpu,
            "cores": os.cpu_count(), "commit": commit or "unknown"}  # fmt: skip


def report(trace: str, only: list[str], peer: str | None, repeat: int) -> Result:
    document: Result = {"conditions": conditions(trace), "repeat": repeat, "cases": []}
    print(", ".join(f"{key} {value}" for key, value in document["conditions"].items()))
    chosen = {name: case for name, case in cases(trace).items()
              if not only or any(part in name for part in only)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        child("cost", {}, Path(folder) / "cost.json")
        print_line(HEADERS)
        print_line(("---", *["---:"] * (len(HEADERS) - 1)))
        for name, case in chosen.items():
            document["cases"].append(measure_case(name, case, peer, Path(folder), repeat))
            for cells in lines_of(document["cases"][-1]):
                print_line(cells)
    if not only or "steps" in only:
        document["steps"] = measure_steps(repeat)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    folder = os.environ.get("MDI_PUBLIC_TRACES")
    default = str(Path(folder) / "azure_conv_2023.csv") if folder else None
    parser.add_argument("trace", nargs="?", default=default)
    parser.add_argument("--peer", help="interpreter that has ai-dynamo-runtime")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="cases whose name contains this; `steps` for the second table",
    )
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if options.trace is None:
        parser.error("name a TRACE, or set MDI_PUBLIC_TRACES to the folder of public traces")
    print(json.dumps(report(options.trace, options.only, options.peer, options.repeat)))


if __name__ == "__main__":
    main()
