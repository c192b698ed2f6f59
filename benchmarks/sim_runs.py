"""One simulation a process, for `bench_sim.py` to measure: ours, or that of another package.

    python benchmarks/sim_runs.py ours|peer|step|mooncake|cost DESCRIPTION [FILE]

Run under the interpreter of what it measures: `peer` imports nothing of this project. It is the
engine simulator in `dynamo._core` of `ai-dynamo-runtime`, written in Rust, and reads FILE, the same
rows in Mooncake's form, which `mooncake` writes. `step` times the steps of a full house. `cost`
writes the step-time model of the matched cases. The description is JSON: of a `Case`, or the
arguments of `time_steps`. The last line of output is one JSON object.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdi_shared.cost.linear import LinearCost

SEATS, BUDGET = 256, 2_048
# Step times like those of the other simulator, ns: decode steps do not depend on the batch.
PREFILL_NS, PREFILL_NS_PER_ROW, DECODE_NS = 8e6, 15e3, 6.3e6
PEER_BLOCK = 64  # tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulation: the first `rows` of `trace` (0 = all), `speed` times as fast as recorded.

    `matched` takes the step times of the other simulator, else an H200 roofline. `pool` is the KV
    pool of a rank in tokens.
    """

    trace: str
    rows: int
    ranks: int = 1
    speed: float = 1.0
    pool: int = 2**21
    matched: bool = True

    def scheduler(self) -> dict[str, Any]:
        """Return the options of our scheduler; without a vote interval if step times match."""
        block = 128
        options: dict[str, Any] = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET,
                                   "num_blocks": self.pool // block}  # fmt: skip
        if self.matched:
            options["prefill_attempt_interval"] = 1
        if self.pool < 131_072:
            options["max_model_len"] = 16_384
        return options

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def _matched_cost() -> "LinearCost":
    from mdi_shared.cost.linear import (
        DECODE_TERMS,
        PREFILL_TERMS,
        DecodeTerms,
        LinearCost,
        PrefillTerms,
    )

    prefill = dict.fromkeys(PREFILL_TERMS, 0.0) | {"const": PREFILL_NS, "rows": PREFILL_NS_PER_ROW}
    decode = dict.fromkeys(DECODE_TERMS, 0.0) | {"const": DECODE_NS}
    return LinearCost(prefill=PrefillTerms(**prefill), decode=DecodeTerms(**decode))


def run_ours(case: Case) -> dict[str, Any]:
    from mdi_shared.config import SchedulerConfig
    from mdi_sim.simulate import simulate
    from mdi_traces.columns import ints
    from mdi_traces.formats import load_requests

    trace = load_requests(case.trace, limit=case.rows or None)
    if case.speed != 1:
        trace = trace.scaled(case.speed)
    cost = {"cost": _matched_cost()} if case.matched else {}
    began = time.process_time()
    run = simulate(trace, scheduler=SchedulerConfig(**case.scheduler()), ranks=case.ranks, **cost)
    seconds = time.process_time() - began
    table = run.requests_table
    first, last, tokens = (
        ints(table[name], null=-1) for name in ("t_first_token", "t_finish", "output_len")
    )
    served = tokens > 1
    waits, gaps = first - ints(table["arrival_ns"]), (last - first)[served] / (tokens[served] - 1)
    return {"requests": len(trace), "steps": run.steps_table.num_rows, "simulation_s": seconds,
            "ttft_ms": waits.mean() / 1e6, "tpot_ms": gaps.mean() / 1e6}  # fmt: skip


def run_peer(case: Case, file: str) -> dict[str, Any]:
    """Replay the same rows in the other simulator; its ranks are engines that share nothing."""
    from dynamo._core import run_mocker_trace_replay

    engine = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, "block_size": PEER_BLOCK,
              "num_gpu_blocks": case.pool // PEER_BLOCK,
              "enable_prefix_caching": False}  # fmt: skip
    began = time.process_time()
    found = run_mocker_trace_replay(
        [file], extra_engine_args={"engine": engine}, num_workers=case.ranks,
        arrival_speedup_ratio=case.speed, trace_block_size=512, capture_planner_details=False,
    ).summary  # fmt: skip
    return {"requests": found["completed_requests"], "simulation_s": time.process_time() - began,
            "ttft_ms": found["mean_ttft_ms"], "tpot_ms": found["mean_tpot_ms"]}  # fmt: skip


def write_mooncake(case: Case, file: str) -> dict[str, Any]:
    """Write the rows as JSON lines; no two prompts share a block."""
    from mdi_traces.columns import ints
    from mdi_traces.formats import load_requests

    table = load_requests(case.trace, limit=case.rows or None).table
    names = ("arrival_ns", "prompt_len", "output_len")
    columns = [ints(table[name]).tolist() for name in names]
    used = 0
    with Path(file).open("w") as out:
        for arrival, prompt, output in zip(*columns, strict=True):
            blocks = list(range(used, used - -prompt // 512))
            used += len(blocks)
            row = {"timestamp": arrival / 1e6, "input_length": prompt, "output_length": output,
                   "hash_ids": blocks}  # fmt: skip
            out.write(json.dumps(row) + "\n")
    return {"requests": len(columns[0])}


def write_cost(file: str) -> dict[str, Any]:
    Path(file).write_text(json.dumps(_matched_cost().to_json()))
    return {}


def time_steps(running: int, waiting: int, *, fast_forward: bool) -> dict[str, Any]:
    """Time decode steps while every seat is taken and `waiting` requests wait, us of CPU a step.

    All come at once and none of those who run ends, so that every step is alike. The difference of
    two runs of different length leaves out what comes before and after the steps.
    """
    from mdi_shared.config import SchedulerConfig
    from mdi_sim.simulate import simulate
    from mdi_traces.distributions import Burst, Fixed
    from mdi_traces.generate import Workload, generate_workload

    work = Workload(arrivals=Burst(), prompt=Fixed(16), output=Fixed(8_000))
    trace = generate_workload(work, num_requests=running + waiting, seed=0)
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=BUDGET)
    seconds, steps = [], []
    for until_s in (2.0, 4.0, 24.0):  # the first warms up
        began = time.process_time()
        run = simulate(trace, scheduler=config, ranks=1, cost=_matched_cost(), until_s=until_s,
                       fast_forward=fast_forward)  # fmt: skip
        seconds.append(time.process_time() - began)
        steps.append(run.steps_table.num_rows)
    return {"us": 1e6 * (seconds[2] - seconds[1]) / (steps[2] - steps[1])}


def main() -> None:
    what, document, *files = sys.argv[1:]
    given = json.loads(document)
    if what == "step":
        result = time_steps(**given)
    elif what == "cost":
        result = write_cost(files[0])
    elif what == "mooncake":
        result = write_mooncake(Case(**given), files[0])
    elif what == "peer":
        result = run_peer(Case(**given), files[0])
    else:
        result = run_ours(Case(**given))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
