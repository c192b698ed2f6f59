"""Published results as experiments of this repository: the claim, a workload, and what came out.

Each makes its own workload (a preset's fitted lengths, arrivals of its own), runs it under the
policies that the source compares, and says whether the *shape* of the result is the published one:
who wins and who pays. Absolute figures are other machines' and other models'. docs/policies.md has
the table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

import minideepinfer as mdi
from experiments.rounds import Within, recipe, rounds_of
from mdi_analysis.fairness import fairness
from mdi_sim.search.hindsight import hindsight_optimum
from mdi_traces.columns import numbers, texts
from mdi_traces.requests import RequestTrace, put_column

SMALL_POOL = {"num_blocks": 300, "max_model_len": 16_384, "prefill_attempt_interval": 1}
CHAT_POOL = {"num_blocks": 160, "max_model_len": 4_096}  # holds 20 to 40 chats
Runs = Mapping[str, list[mdi.SimulatedRun]]  # by policy, one for each seed


class Outcome(NamedTuple):
    """What came out, and whether it has the published shape."""

    figures: str
    holds: bool


@dataclass(frozen=True)
class Shape:
    """One published result. `run` makes it again on so many seeds."""

    claim: str
    source: str
    workload: str
    run: Callable[[int], Outcome]


def served(
    works: Iterable[RequestTrace], policies: Iterable[str], **scheduler: object
) -> dict[str, list[mdi.SimulatedRun]]:
    """Serve each workload under each policy on one rank of an H200, by the roofline."""
    works = list(works)
    options = {**SMALL_POOL, **scheduler}
    return {
        policy: [mdi.simulate(work, policy=policy, scheduler=options, ranks=1) for work in works]
        for policy in policies
    }


def pooled(runs: Iterable[mdi.SimulatedRun]) -> pd.DataFrame:
    """Return the requests of all runs."""
    return pd.concat([run.requests for run in runs])


def mean_of(runs: Runs, column: str) -> dict[str, float]:
    """Return the mean of a request column under each policy."""
    return {policy: float(pooled(each)[column].mean()) for policy, each in runs.items()}


def listed(values: Mapping[str, float], pattern: str = "{:,.0f}") -> str:
    """Return `policy value` for each policy."""
    return ", ".join(f"{name} {pattern.format(value)}" for name, value in values.items())


def azure(seeds: int, count: int = 300, rate: float = 40.0) -> list[RequestTrace]:
    """Return Azure conversations, more than one rank keeps up with unless `rate` is low."""
    return [mdi.generate_workload("azure-conv", num_requests=count, rate=rate, seed=seed)
            for seed in range(seeds)]  # fmt: skip


def sharegpt(seeds: int, rate: float, count: int = 120) -> list[RequestTrace]:
    """ShareGPT lengths whose users allow 2,048 output tokens, whatever comes."""
    made = [mdi.generate_workload("sharegpt", num_requests=count, rate=rate, seed=seed)
            for seed in range(seeds)]  # fmt: skip
    most = numbers(np.full(count, 2_048), pa.int32())
    return [replace(work, table=put_column(work.table, "max_tokens", most)) for work in made]


def near_hindsight(seeds: int) -> Outcome:
    ratios = []
    for seed in range(seeds):
        jobs, pool = recipe(Random(seed), 6)
        latency, span = rounds_of(jobs, Within(pool=pool))
        best = hindsight_optimum(jobs, pool, horizon=span)
        if best.is_optimal and best.latency is not None:
            ratios.append(latency / best.latency)
    large = []
    for seed in range(seeds):
        rng = Random(1_000 + seed)
        jobs, pool = recipe(rng, rng.randint(40, 60))
        found = {fcfs: rounds_of(jobs, Within(pool=pool, by_arrival=fcfs))[0]
                 for fcfs in (True, False)}  # fmt: skip
        large.append(found[True] / found[False])
    mean, worst = float(np.mean(ratios)), max(ratios)
    return Outcome(
        f"MC-SF / optimum: mean {mean:.3f}, worst {worst:.3f} ({len(ratios)} of {seeds} instances "
        f"of 6 requests proven optimal); of 40 to 60 requests FCFS with the same admission takes "
        f"{np.mean(large):.2f} times as long as MC-SF",
        mean <= 1.05 and min(large) > 1,
    )  # fmt: skip


def slower_slope(seeds: int) -> Outcome:
    slopes = {}
    for policy in ("watermark", "mcsf"):
        low, high = (
            mean_of(served(sharegpt(seeds, rate), [policy], **CHAT_POOL), "e2e_ms")[policy] / 1e3
            for rate in (0.8, 1.6)
        )
        slopes[policy] = (high - low) / 0.8
    return Outcome(f"mean latency rises by, s per 1 request/s: {listed(slopes)}",
                   slopes["mcsf"] < slopes["watermark"])  # fmt: skip


def past_future(seeds: int) -> Outcome:
    works = sharegpt(seeds, 1.2)
    runs = served(works, ("fcfs", "conservative", "past_future"), **CHAT_POOL)
    slo = mdi.SLO(ttft_ms=20_000, tpot_ms=30)
    shares = {}
    for policy, each in runs.items():
        found = [run.summary(slo, itl=False).goodput for run in each]
        shares[policy] = float(np.mean([good.goodput_share or 0 for good in found if good]))
    evicted = {policy: float(pooled(each)["n_preempt"].sum()) for policy, each in runs.items()}
    return Outcome(
        f"within TTFT 20 s and TPOT 30 ms: {listed(shares, '{:.1%}')}; evictions {listed(evicted)}",
        max(shares, key=lambda name: shares[name]) == "past_future"
        and evicted["past_future"] <= 0.1 * evicted["fcfs"],
    )  # fmt: skip


def recompute_tax(seeds: int) -> Outcome:
    runs = served(azure(seeds), ("victim=newest", "victim=longest_output",
                                 "victim=least_computed"))  # fmt: skip
    tokens = {policy.removeprefix("victim="): float(pooled(each)["n_recomputed_tokens"].sum())
              for policy, each in runs.items()}  # fmt: skip
    saved = 1 - tokens["least_computed"] / tokens["newest"]
    return Outcome(f"tokens recomputed: {listed(tokens)}; {saved:.0%} less than newest",
                   tokens["least_computed"] == min(tokens.values()) and saved > 0.24)  # fmt: skip


def noisy_sjf(seeds: int) -> Outcome:
    order = ("sjf", "sjf:sigma=0.5", "sjf:sigma=1", "sjf:sigma=2", "fcfs")
    means = {name: value / 1e3 for name, value in
             mean_of(served(azure(seeds), order), "ttft_ms").items()}  # fmt: skip
    values = list(means.values())
    return Outcome(f"mean TTFT, s: {listed(means, '{:.1f}')}",
                   all(a <= 1.03 * b for a, b in pairwise(values))
                   and values[0] < 0.8 * values[-1])  # fmt: skip


def two_clients(seeds: int) -> Outcome:
    gaps: dict[str, float] = {"fcfs": 0.0, "vtc": 0.0}
    bound = 0
    for work in azure(seeds):
        names = texts(["greedy" if row % 3 else "modest" for row in range(len(work))])
        both = replace(work, table=put_column(work.table, "client", names))
        for policy, runs in served([both], gaps, num_blocks=400).items():
            gap = fairness(runs[0]).service_gap
            gaps[policy] = max(gaps[policy], 0.0 if gap is None else gap)
        longest = int(work.frame()["prompt_len"].max())
        bound = max(bound, 2 * max(longest, 2 * 399 * 128))
    return Outcome(f"largest difference of service, tokens: {listed(gaps)}; bound {bound:,}",
                   gaps["vtc"] <= bound and gaps["vtc"] < 0.5 * gaps["fcfs"])  # fmt: skip


def convoys(seeds: int) -> Outcome:
    works = [with_long_prompts(seed) for seed in range(seeds)]
    runs = served(works, ("fcfs", "edf", "shortest_prompt", "lars"), num_blocks=8_000,
                  max_model_len=131_072, max_num_batched_tokens=2_048)  # fmt: skip
    short, long = {}, {}
    for policy, each in runs.items():
        requests = pooled(each)
        is_long = requests["prompt_len"] > 50_000
        short[policy] = float(requests["ttft_ms"][~is_long].quantile(0.99)) / 1e3
        long[policy] = float(requests["ttft_ms"][is_long].max()) / 1e3
    return Outcome(
        f"TTFT, s: P99 of short prompts {listed(short, '{:.1f}')}; longest of 100k prompts "
        f"{listed(long, '{:.1f}')}",
        short["lars"] < 0.9 * short["fcfs"] and long["lars"] <= long["shortest_prompt"],
    )  # fmt: skip


def with_long_prompts(seed: int, count: int = 200) -> RequestTrace:
    """Azure conversations cut to 4,000 tokens, with three prompts of 100,000 among them."""
    work = mdi.generate_workload("azure-conv", num_requests=count, rate=9.0, seed=seed)
    prompts = np.minimum(work.frame()["prompt_len"].to_numpy(), 4_000)
    prompts[[count // 8, count * 3 // 8, count * 5 // 8]] = 100_000
    return replace(work, table=put_column(work.table, "prompt_len", numbers(prompts, pa.int32())))


def aging(seeds: int) -> Outcome:
    works = [mdi.generate_workload("azure-code", num_requests=300, rate=6.0, seed=seed)
             for seed in range(seeds)]  # fmt: skip
    runs = served(works, ("phase=mixed", "sjf_aging+phase=mixed"), num_blocks=2_000)
    fcfs, aged = (pooled(each) for each in runs.values())
    slow, fast = (sum(run.requests["t_finish"].max() for run in each) for each in runs.values())
    first, whole = (aged[name].median() / fcfs[name].median() - 1 for name in ("ttft_ms", "e2e_ms"))
    speed = slow / fast - 1
    return Outcome(f"P50 of latency {whole:+.1%}, of TTFT {first:+.1%}; throughput {speed:+.1%}",
                   whole < -0.05 and abs(speed) < 0.01)  # fmt: skip


def stalls(seeds: int) -> Outcome:
    works = azure(seeds, 100, 6.0)
    order = ("prefill_first", "mixed", "mixed:budget=2048", "mixed:budget=512")
    gaps, firsts = {}, {}
    for policy, each in served(works, order, num_blocks=6_000, max_model_len=32_768).items():
        found = [run.summary().latency for run in each]
        gaps[policy] = float(np.mean([one.itl_ms.p99 for one in found if one.itl_ms]))
        firsts[policy] = float(np.mean([one.ttft_ms.p99 for one in found]))
    values = list(gaps.values())
    return Outcome(f"P99, ms: between tokens {listed(gaps)}; TTFT {listed(firsts)}",
                   values == sorted(values, reverse=True) and values[-1] < 0.5 * values[0]
                   and firsts["mixed:budget=512"] > firsts["prefill_first"])  # fmt: skip


def balance(seeds: int) -> Outcome:
    placements = ("round_robin", "jsq", "least_kv_held", "balance")
    uneven, speed = {}, {}
    for placement in placements:
        runs = [mdi.simulate(work, placement=placement, ranks=8, scheduler=SMALL_POOL)
                for work in azure(seeds, 600, 100.0)]  # fmt: skip
        found = [run.summary(itl=False) for run in runs]
        uneven[placement] = float(np.mean([one.engine.rank_imbalance for one in found]))
        speed[placement] = float(np.mean([one.throughput.output_tok_s_gpu for one in found]))
    return Outcome(
        f"busiest rank over the mean {listed(uneven, '{:.3f}')}; output tokens/s/GPU "
        f"{listed(speed)}",
        uneven["balance"] < uneven["round_robin"]
        and speed["balance"] > 1.03 * speed["round_robin"],
    )  # fmt: skip


SHAPES: Mapping[str, Shape] = {
    "hindsight": Shape(
        "MC-SF is within 5 % of the hindsight optimum on average", "arXiv 2502.07115",
        "its recipe: M ~ U(30, 50), s ~ U(1, 5), o ~ U(1, M - s), all at once", near_hindsight),
    "slope": Shape(
        "MC-SF's mean latency rises more slowly with load than a watermark's", "arXiv 2502.07115",
        "`sharegpt` at 0.8 and 1.6 requests/s, pool of 160 blocks", slower_slope),
    "past-future": Shape(
        "past-future admission has the highest goodput and next to no evictions",
        "LightLLM, ASPLOS 25",
        "`sharegpt`, max_tokens 2,048, 1.2 requests/s, pool of 160 blocks", past_future),
    "recompute": Shape(
        "least-computed victims waste fewest tokens (there 24 to 43 % less than the newest)",
        "vLLM RFC 54644", "`azure-conv` at 40 requests/s, pool of 300 blocks", recompute_tax),
    "noise": Shape(
        "SJF loses gracefully as predictions get worse", "learning to rank, NeurIPS 24",
        "as above", noisy_sjf),
    "vtc": Shape(
        "two backlogged clients' service differs by at most 2 max(w_p L, w_q M) under VTC",
        "OSDI 24", "as above, pool of 400 blocks, one client at twice the rate", two_clients),
    "convoy": Shape(
        "FCFS convoys behind long prompts, LARS does not", "Medha",
        "`azure-conv` cut to 4,000 tokens at 9 requests/s, three prompts of 100,000", convoys),
    "aging": Shape(
        "SJF with aging lowers the P50 (there by 5 to 10 %) at unchanged throughput",
        "TensorRT-LLM PR 12428", "`azure-code` at 6 requests/s, mixed steps as there", aging),
    "stalls": Shape(
        "mixed steps: the smaller the budget the steadier the tokens, TTFT pays",
        "Sarathi-Serve, OSDI 24", "`azure-conv` at 6 requests/s", stalls),
    "balance": Shape(
        "ranks that meet at every step: balancing what they hold evens them and is faster",
        "BalanceRoute, arXiv 2605.06113", "`azure-conv` at 100 requests/s on 8 ranks", balance),
}  # fmt: skip
