"""Host time of engine turns without a device: what stands between two steps.

The engine serves equal requests. Its runner makes each step's inputs, as for a GPU with decode
graphs, packs them into a buffer, and answers with made-up tokens at once; the rest of a turn is
planning and showing results. Times are the thread's own, medians over steps; prefill steps are
chunks of one long prompt. It measures the host's Python, so it needs no GPU. The last line of
output is one JSON document.

    python benchmarks/bench_turns.py [--batches 1 8 100 256] [--context 4096] [--steps 100]
        [--chunk 8192] [--max-model-len 131072] [--profile N]
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from gpu_timing import Cell, Table, conditions

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.request_state import RequestState
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.step_inputs import GraphShape, gather_inputs
from mdi_exec.engine.step_tokens import StepTokens
from mdi_exec.model.batch import BLOCK_TOKENS
from mdi_exec.model.staging import Packing
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.graph_sizes import graph_sizes
from mdi_shared.plan import StepPlan
from mdi_shared.scheduler import Scheduler

VOCABULARY = 129_280
MOST_CHUNKS = 12
COLUMNS = {"step": 14, "rows": 6, "turn us": 9, "inputs us": 10, "packing us": 11, "rest us": 9}


@dataclass(frozen=True, slots=True)
class Made:
    """A step that is over as soon as it is launched."""

    tokens: StepTokens

    def result(self) -> StepTokens:
        return self.tokens


@dataclass(slots=True)
class HostRunner:
    """Does what `ModelRunner` does on the host, and nothing of what the device does."""

    max_num_seqs: int
    max_model_len: int
    inputs_ns: list[int] = field(default_factory=list)
    packing_ns: list[int] = field(default_factory=list)
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(1 << 24, dtype=torch.uint8))
    row_of: dict[int, int] = field(default_factory=dict)

    def launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> tuple[Made, int]:
        begin = time.thread_time_ns()
        shape = None
        if not plan.is_prefill:
            size = next(s for s in graph_sizes(self.max_num_seqs) if s >= len(requests))
            shape = GraphShape(size, size, self.max_model_len)
        inputs = gather_inputs(plan, requests, self.row_of, shape=shape)
        middle = time.thread_time_ns()
        Packing.of(inputs.arrays).fill(self.buffer, inputs.arrays)
        self.packing_ns.append(time.thread_time_ns() - middle)
        self.inputs_ns.append(middle - begin)
        self.row_of = {seq_id: row for row, seq_id in enumerate(plan.seq_ids)}
        count, now_ns = len(inputs.requests), time.monotonic_ns()
        tokens = StepTokens([7] * count, [{7: -1.0} for _ in range(count)], now_ns, now_ns)
        return Made(tokens), now_ns

    def close(self) -> None:
        """There is nothing to close."""


def turns(
    batch: int, prompt: int, steps: int, chunk: int, max_model_len: int
) -> tuple[HostRunner, Callable[[], list[int]]]:
    """Return a runner, and a call that serves `batch` prompts and returns each turn's time, ns."""
    blocks = 4 + 2 * batch * -(-(prompt + steps) // BLOCK_TOKENS)  # below every watermark
    config = SchedulerConfig(max_num_seqs=batch, max_model_len=max_model_len, num_blocks=blocks,
                             max_num_batched_tokens=chunk, prefill_attempt_interval=1)  # fmt: skip
    runner = HostRunner(batch, max_model_len)
    engine = LLMEngine(Scheduler(config), runner, vocab_size=VOCABULARY)
    params = SamplingParams(max_tokens=steps, ignore_eos=True, seq_seed=0)
    for _ in range(batch):
        engine.add_request(list(range(3, 3 + prompt)), params)

    def serve() -> list[int]:
        spent = []
        while engine.has_unfinished_requests():
            begin = time.thread_time_ns()
            engine.step()
            if len(runner.inputs_ns) > len(spent):  # not a turn that only looks around
                spent.append(time.thread_time_ns() - begin)
        return spent

    return runner, serve


def measure(name: str, rows: int, runner: HostRunner, spent: list[int], last: int) -> list[Cell]:
    """Return a table row: medians over the `last` steps."""
    turn, made, packed = (
        statistics.median(values[-last:]) / 1e3
        for values in (spent, runner.inputs_ns, runner.packing_ns)
    )
    return [name, rows, turn, made, packed, turn - made - packed]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 100, 256])
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100, help="tokens made for each request")
    parser.add_argument("--chunk", type=int, default=8192, help="token budget of a prefill step")
    parser.add_argument("--max-model-len", type=int, default=131_072)
    parser.add_argument("--profile", type=int, metavar="N", help="show the N costliest functions")
    options = parser.parse_args()
    chunks = min(MOST_CHUNKS, (options.max_model_len - 1) // options.chunk)
    if not chunks or options.context + options.steps > options.max_model_len:
        parser.error("--max-model-len must hold --context and --steps, and --chunk")
    about = conditions(torch.device("cpu"))
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    table = Table("Host time of engine turns", COLUMNS)
    table.head()
    profile = cProfile.Profile()
    for batch in options.batches:
        runner, serve = turns(
            batch, options.context, options.steps, options.chunk, options.max_model_len
        )
        if options.profile:
            profile.enable()
        spent = serve()
        profile.disable()
        table.add(*measure("decode", batch, runner, spent, options.steps // 2))
    runner, serve = turns(1, chunks * options.chunk, 1, options.chunk, options.max_model_len)
    table.add(*measure("prefill chunk", options.chunk, runner, serve(), chunks))
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
    print(json.dumps({"conditions": about, "turns": table.rows}))


if __name__ == "__main__":
    main()
