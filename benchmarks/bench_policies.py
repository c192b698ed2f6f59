"""What a scheduling policy costs: CPU time of whole simulations, as ratios to none.

A generated workload on one rank (the preset `azure-conv`), a pool of 65,536 tokens and an attempt
to prefill at every step, so that the policy is asked as often as can be: at a rate that the rank
just bears, and at one that lets the queue grow to the end. Step times do not depend on who decodes.
Rounds take every policy once; the table has the medians of the ratios of a round.

    python -m benchmarks.bench_policies [SPEC ...] [--requests 10000] [--rate 17] [--repeat 3]

A policy that admits others makes other batches, and so other work: more or fewer steps, and steps
that cannot be skipped over because somebody waits. The ratio per step shows the policy's own part.
"no policy" is asked nothing, `fcfs` objects are what it is compared with.
"""

import argparse
import statistics
import time

import minideepinfer as mdi
from benchmarks.sim_runs import BUDGET, SEATS, _matched_cost
from mdi_shared.policies import NO_POLICY, POLICIES
from mdi_sim.simulate import simulate
from mdi_traces.requests import RequestTrace

SCHEDULER = {"num_blocks": 512, "max_model_len": 16_384, "prefill_attempt_interval": 1,
             "max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET}  # fmt: skip


def measure(work: RequestTrace, policy: str) -> tuple[float, int]:
    """Return CPU seconds and steps of one simulation."""
    began = time.process_time()
    run = simulate(work, scheduler=SCHEDULER, cost=_matched_cost(), ranks=1, policy=policy)
    return time.process_time() - began, run.steps_table.num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", default=sorted({*POLICIES} - {NO_POLICY}))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=17.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    work = mdi.generate_workload(
        "azure-conv", num_requests=options.requests, rate=options.rate, seed=1
    )
    rows: dict[str, list[tuple[float, float, int]]] = {}
    for _ in range(options.repeat):
        base, base_steps = measure(work, NO_POLICY)
        for spec in options.specs:
            seconds, steps = measure(work, spec)
            per_step = seconds / steps / (base / base_steps)
            rows.setdefault(spec, []).append((seconds / base, per_step, steps))
    print(f"{'policy':24} {'CPU':>6} {'a step':>7} {'steps':>8}   (no policy: {base:.1f} s, "
          f"{base_steps:,} steps)")  # fmt: skip
    for spec, found in rows.items():
        ratio, per_step, steps = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{spec:24} {ratio:6.2f} {per_step:7.2f} {steps:8,.0f}")


if __name__ == "__main__":
    main()
