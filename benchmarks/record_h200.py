"""Records real runs: the data that the simulator's cost models are fitted to and compared with.

The campaigns (record_workloads.py): prefill by chunk, cached length and number of sequences; decode
by batch and context; arrivals at a low and a high rate; long contexts; preemption; the replay of a
public trace. Each run goes through the engine that serves, with a fresh cache on the same loaded
model: of a trace, the requests that arrive within --seconds, each to its end. A run that takes more
than --most-seconds is cut: nothing more is sent and what still runs is aborted. A run is three
Parquet files (docs/trace-format.md) whose metadata say what it holds for: GPU, driver, versions,
model, options, command, commit, date. Step items are left out where the files would exceed 2 MB.

    python benchmarks/record_h200.py MODEL --out FOLDER [--campaigns prefill mixed decode online
        long_context rising_context preemption replay] [--runs WORKLOAD:LABEL:KEY=VALUE,...]
        [--trace CSV] [--speed 1] [--seconds 20] [--most-seconds 120] [--sizes full]
        [--device cuda] [--set KEY=VALUE]

--runs records single workloads of the campaigns, with options of their own:
online_high:interval1:prefill_attempt_interval=1 becomes the run online_high_interval1.

MODEL is a checkpoint directory, "random:flash-slice", or "tiny", a checkpoint made for the
occasion. To try it without a GPU: tiny --device cpu --sizes small --seconds 2.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_timing import conditions
from record_workloads import CAMPAIGNS, REPLAY, SIZES, Job, Workload, workloads

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.serve_trace import TraceClient
from mdi_exec.weights.make_checkpoint import make_checkpoint
from mdi_shared.errors import ConfigError
from mdi_traces.columns import ints
from mdi_traces.requests import RequestTrace
from mdi_traces.run import Run
from minideepinfer.commands.executor import engine_options

MOST_BYTES = 2_000_000
LOWEST_ID = 3  # ids 0 to 2 are begin, end and padding


def serve_groups(
    engine: LLMEngine, groups: tuple[tuple[Job, ...], ...], seconds: float, seed: int
) -> int:  # fmt: skip
    """Serve one group after the other until time is up; returns how many groups came to an end."""
    dice, begin, ended = np.random.default_rng(seed), time.perf_counter(), 0
    for number, group in enumerate(groups):
        names = []
        for job in group:
            prompt = dice.integers(LOWEST_ID, engine.vocab_size, job.prompt).tolist()
            params = SamplingParams(max_tokens=job.output, ignore_eos=True, temperature=1.0,
                                    seq_seed=len(names))  # fmt: skip
            names.append(engine.add_request(prompt, params, f"{number}.{len(names)}"))
        is_late = False
        while engine.has_unfinished_requests():
            engine.step()
            if not is_late and time.perf_counter() - begin > seconds:
                is_late = True
                for name in names:
                    engine.abort_request(name)
        if is_late:
            break
        ended += 1
    engine.drain()
    return ended


def warm_up(llm: LLM, chunk: int) -> None:
    """Serve a few requests of different sizes, so that no kernel is compiled in a recorded run."""
    groups = ((Job(chunk, 4),), (Job(max(chunk // 8, 1), 4),), (Job(1, 4),), (Job(8, 4),) * 4)
    serve_groups(llm.engine, groups, 600.0, seed=0)


def arriving_within(trace: RequestTrace, seconds: float) -> RequestTrace:
    """Return the requests that arrive within `seconds`, at least the first."""
    count = int((ints(trace.table["arrival_ns"]) < seconds * 1e9).sum())
    return trace.head(max(count, 1))


def record(
    llm: LLM, workload: Workload, seconds: float, most_seconds: float, provenance: dict[str, Any]
) -> Run:
    """Serve a workload on a fresh engine and return the run, with its provenance."""
    llm.warm_up()
    begin = time.perf_counter()
    served: dict[str, Any] = {}
    if workload.trace is not None:
        trace = arriving_within(workload.trace, seconds)
        counts: list[int] = []
        TraceClient(llm.engine, trace, seed=1).run(counts.append, seconds=most_seconds)
        served = {"arriving_within_s": seconds, "requests_ended": sum(counts),
                  "requests_sent": len(trace)}  # fmt: skip
    else:
        ended = serve_groups(llm.engine, workload.groups, most_seconds, seed=1)
        served = {"groups_ended": ended, "groups": len(workload.groups)}
    served["wall_s"] = round(time.perf_counter() - begin, 3)
    assert llm.engine.recording is not None, "the options ask for a recording"
    run = llm.engine.recording.run(llm.engine.scheduler)
    about = {**provenance, "workload": workload.name, "what": workload.what, **workload.notes,
             "seconds_allowed": most_seconds, **served}  # fmt: skip
    metadata = replace(run.metadata, config={**run.metadata.config, "provenance": about})
    return Run(run.steps_table, run.requests_table, metadata, run.items_table)


def chosen(todo: list[Workload], specs: list[str]) -> Iterator[tuple[Workload, dict[str, Any]]]:
    """Give the workloads that `--runs` names, renamed by their labels, with their options."""
    by_name = {workload.name: workload for workload in todo}
    for spec in specs:
        name, _, rest = spec.partition(":")
        label, _, pairs = rest.partition(":")
        if name not in by_name:
            raise ConfigError("runs", name, f"must be one of {', '.join(by_name)}")
        options = engine_options(pairs.split(",") if pairs else [])
        yield replace(by_name[name], name=f"{name}_{label}" if label else name), options


def save(run: Run, prefix: Path) -> int:
    """Write the run, without items when it would be too large; returns its bytes."""
    for items in (True, False):
        size = sum(path.stat().st_size for path in run.save(prefix, items=items))
        if size <= MOST_BYTES:
            break
    return size


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[str]:
    """Give the model's name; "tiny" is a checkpoint that lives as long as the context."""
    if options.model != "tiny":
        yield options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(make_checkpoint(Path(folder) / "tiny", with_draft=False, with_vision=False))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="checkpoint directory, random:<preset>, or tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    names = [*CAMPAIGNS, REPLAY]
    parser.add_argument("--campaigns", nargs="+", choices=names, default=list(CAMPAIGNS))
    parser.add_argument("--runs", nargs="+", metavar="WORKLOAD:LABEL:KEY=VALUE,...",
                        help="only these, with options of their own")  # fmt: skip
    parser.add_argument("--trace", type=Path, help="public trace for the replay campaign")
    parser.add_argument("--speed", type=float, default=1.0, help="of the replay")
    parser.add_argument("--seconds", type=float, default=20.0, help="arrivals taken of a trace")
    parser.add_argument("--most-seconds", type=float, default=120.0, help="limit of each workload")
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="any engine option")
    return parser.parse_args()


def main() -> None:
    options = parse()
    sizes = SIZES[options.sizes]
    found = workloads(options.campaigns, sizes, options.trace, options.speed)
    todo = [(work, {}) for work in found] if options.runs is None else chosen(found, options.runs)
    todo = list(todo)
    options.out.mkdir(parents=True, exist_ok=True)
    provenance = {**conditions(torch.device(options.device)), "model": options.model,
                  "command": shlex.join(sys.argv)}  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in provenance.items()), flush=True)
    given = {"device": options.device, **engine_options(options.set)}
    chunk = max(sizes.chunks)
    first = {"max_num_seqs": 8, "max_model_len": chunk + 8, "max_num_batched_tokens": chunk,
             "num_blocks": 2 * (chunk // 128 + 8)}  # fmt: skip
    with model_of(options) as model:
        begin = time.perf_counter()
        idle = {**first, **given}
        llm = LLM(model, **idle)
        warm_up(llm, chunk)
        print(f"loaded and warm after {time.perf_counter() - begin:.1f} s", flush=True)
        for workload, own in todo:
            prefix = options.out / workload.name
            llm.reopen(**{**workload.options, **given, **own, "record": str(prefix)})
            run = record(llm, workload, options.seconds, options.most_seconds, provenance)
            llm.reopen(**idle)  # saves the run too; ours, which says where it is from, comes after
            size = save(run, prefix)
            served = run.metadata.config["provenance"]
            print(f"{workload.name}: {len(run.steps_table)} steps, {len(run.requests_table)} "
                  f"requests, {served['wall_s']} s, {size / 1e3:.0f} kB", flush=True)  # fmt: skip
        llm.close()


if __name__ == "__main__":
    main()
