"""What no policy can beat: lower bounds of latency and makespan, for a workload on a described run.

`lower_bounds` relaxes a run to work served at the best rate that a step can reach, without memory,
batches or knowledge to wait for. Nothing is simulated. The distance to a bound says how much a
better policy could still gain, at most.

Read next: `hindsight.py` (the exact optimum of small instances), docs/policies.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.work import StepWork, decode_work, prefill_work
from mdi_shared.run_description import RunDescription
from mdi_traces.columns import Ints, ints, valid_rows

Floats = NDArray[np.float64]
NS_PER_MS, NS_PER_S = 1e6, 1e9
_PARTS = (0.25, 0.5, 0.75, 1.0)
_STEP_RATIO = 1.02  # between sizes that a rate is looked up at: what a bound may lose


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least that any policy can reach: mean latencies, ms, and the makespan, s.

    The makespan counts from the first arrival to the last token.
    """

    ttft_mean_ms: float
    e2e_mean_ms: float
    makespan_s: float


def lower_bounds(requests: pa.Table, run: RunDescription) -> Bounds:
    """Return what no policy beats in serving all of `requests` (REQUEST_SCHEMA) as `run` says.

    For a run that is over, give it the requests that completed: a bound of fewer requests holds,
    as others only add work. Step times may not fall as work grows, and a prompt may not take longer
    in one step than in several; so it is in all cost models here. Means are the greater of two
    bounds, what each request takes alone and the SRPT relaxation. (The mean of each request's
    greater one would be none: SRPT puts off the long ones, another order could do the opposite.)
    Where turns wait for the ones before (`think_ns`), only the first is known. Raises `ConfigError`
    for a run without step times.
    """
    work = _Work(requests, run)
    first, last = work.alone_ns()
    arrival = work.arrival
    is_open = not valid_rows(requests["think_ns"]).any()
    means = [first.mean(), last.mean()]
    span = float((arrival + last).max() - arrival[0]) if is_open else float(last.max())
    for shares in work.shares_ns() if is_open else ():
        means = [max(mean, srpt_flow(arrival, share) / len(arrival))
                 for mean, share in zip(means, shares, strict=True)]  # fmt: skip
        to_come = np.cumsum(shares[1][::-1])[::-1]
        span = max(span, float((arrival + to_come).max() - arrival[0]))
    span = max(span, work.least_decode_steps() * work.decode_ns)
    return Bounds(means[0] / NS_PER_MS, means[1] / NS_PER_MS, span / NS_PER_S)


def alone_ms(requests: pa.Table, run: RunDescription) -> Floats:
    """Return the least time that each of `requests` takes alone on the devices of a rank, ms.

    Neither host nor votes are in it. Raises `ConfigError` for a run without step times.
    """
    _, last = _Work(requests, run).alone_ns()
    return last / NS_PER_MS


def srpt_flow(arrivals: Sequence[float] | Ints, works: Sequence[float] | Floats) -> float:
    """Return the least sum of (completion - arrival) on one preemptive machine, O(n log n).

    `arrivals` ascend; `works` are what each takes of the machine, in the same unit. Shortest
    remaining processing time first is optimal there. Source: Schrage 1968.
    """
    total, now = 0.0, 0.0
    left: list[tuple[float, float]] = []  # remaining work, arrival
    rows = [*zip(map(float, arrivals), map(float, works), strict=True), (float("inf"), 0.0)]
    for arrival, work in rows:
        while left and now < arrival:
            rest, came = heappop(left)
            done = min(rest, arrival - now)
            now += done
            if done < rest:
                heappush(left, (rest - done, came))
            else:
                total += now - came
        now = max(now, arrival)
        heappush(left, (work, arrival))
    return total


def kv_token_steps(prompts: Ints, steps: Ints) -> int:
    """Return the sum over decode steps of KV tokens held: p + 1, ..., p + steps for each request.

    Divided by the pool's tokens it bounds the number of steps. Source: arXiv 2502.07115, whose
    requests take a step for each of their outputs.
    """
    return int((prompts * steps + steps * (steps + 1) // 2).sum())


class _Work:
    """Requests as times: what each takes at least, on its own and as a share of busy ranks."""

    def __init__(self, requests: pa.Table, run: RunDescription) -> None:
        self._config, self._shape, self._cost = run.scheduler, run.shape, run.step_cost
        self._ranks = run.ranks
        policy = run.new_policy()
        self._mixes = policy is not None and policy.mixes
        self.arrival = ints(requests["arrival_ns"])
        self._prompt, self._outputs = (ints(requests[c]) for c in ("prompt_len", "output_len"))
        self._new = self._prompt - ints(requests["cached_len"])
        rows = 1 + self._config.num_draft_tokens  # tokens that a decode step gives at most
        self._steps = -((1 - self._outputs) // rows)
        self._shortest = int(self._prompt.min()) + 1
        self._seats = min(self._config.max_num_seqs, len(self._new))
        fullest = int(np.sort(self._new)[-self._seats :].sum())
        fullest += self._seats if self._mixes else 0
        self._most_tokens = min(self._config.token_budget, fullest)  # of a step with prompts
        self.decode_ns = self._decode_ns(1)
        if self._mixes:
            self.decode_ns = min(self.decode_ns, self._prefill_ns(1))

    def alone_ns(self) -> tuple[Floats, Floats]:
        """Return the least time to the first and to the last token on an idle rank."""
        shape, cost, times = self._shape, self._cost, {}
        for new, prompt in set(zip(self._new.tolist(), self._prompt.tolist(), strict=True)):
            whole = cost.device_ns(prefill_work(shape, [(new, prompt, prompt)]))
            each = cost.device_ns(decode_work(shape, [prompt + 1]))
            if self._mixes:  # others' prompts may come along
                each = min(each, self._prefill_ns(1))
            times[new, prompt] = whole, each
        found = [times[key] for key in zip(self._new.tolist(), self._prompt.tolist(), strict=True)]
        first, each = np.array(found, dtype=np.float64).T
        budgets = -(-self._new // self._config.token_budget)
        first = np.maximum(first, budgets * cost.device_ns(_least_prefill(shape, 1)))
        return first, first + self._steps * each

    def shares_ns(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield what each takes at least of the time of all ranks: its prompt, and all of it.

        Every step takes at least the shares of those it serves. In a mixed step prompts and decode
        share its time, which can be laid to either: the less to prompts, the more to decode.
        """
        most, seats = self._most_tokens, self._seats
        token = min(self._prefill_ns(low) / high for low, high in _ranges(most))
        step = min(self._decode_ns(low) / high for low, high in _ranges(seats))
        for part in _PARTS if self._mixes else (1.0,):
            each, own = step, part * token
            for low, high in _ranges(most) if self._mixes else ():
                rest = max(self._prefill_ns(low) - own * high, 0.0)
                each = min(each, rest / min(seats, high) + own)
            prompts = self._new * own / self._ranks
            yield prompts, prompts + self._steps * each / self._ranks

    def least_decode_steps(self) -> float:
        """Return the decode steps that one rank needs at least, by the memory of all."""
        config = self._config
        pool = (config.num_blocks - 1) * config.block_size * self._ranks
        return kv_token_steps(self._new, self._steps) / pool

    def _prefill_ns(self, tokens: int) -> int:
        return self._cost.device_ns(_least_prefill(self._shape, tokens))

    def _decode_ns(self, seqs: int) -> int:
        return self._cost.device_ns(_times(decode_work(self._shape, [self._shortest]), seqs))


def _ranges(most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) that cover 1 to `most`, each a little wider than the last."""
    low = 1
    while low <= most:
        high = min(max(int(low * _STEP_RATIO), low), most)
        yield low, high
        low = high + 1


def _least_prefill(shape: ModelShape, tokens: int) -> StepWork:
    """Return the least work of a prefill step of so many tokens, in every field.

    As many prompts of one token have the fewest pairs, the middle of one long prompt the rest.
    """
    far = tokens + shape.replay_keep_tokens + 1
    middle = prefill_work(shape, [(tokens, tokens, far)])
    least = StepWork._make(map(min, _times(prefill_work(shape, [(1, 1, 1)]), tokens), middle))
    return least._replace(is_prefill=True)


def _times(work: StepWork, count: int) -> StepWork:
    """Return the work of `count` steps like this one in one."""
    many = StepWork._make(part * count for part in work)
    return many._replace(is_prefill=work.is_prefill, max_k=work.max_k, min_k=work.min_k)
