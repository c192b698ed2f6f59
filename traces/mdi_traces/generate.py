"""Synthetic request traces: presets fitted to published statistics, and any other mixture.

A preset reproduces the lengths' quantiles and the mean rate of its source, not its order, its
prefixes (no `hash_ids`), or the correlation of prompt and output. For those, load the trace.

Read next: `distributions.py` (the parts), `formats/` (the real traces).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.random import Generator, SeedSequence, default_rng

from mdi_shared.errors import ConfigError, require
from mdi_traces.columns import Ints, numbers, texts
from mdi_traces.distributions import (
    ArrivalProcess,
    Burst,
    Constant,
    Gamma,
    LengthDistribution,
    LogNormal,
    Poisson,
    Quantiles,
)
from mdi_traces.requests import RequestTrace, build_requests
from mdi_traces.schema import REQUESTS, Metadata

_TOKEN_NS = 20_000_000  # nominal 20 ms a token, to place closed-loop turns on an open-loop clock
_MOST_TURNS = 64


class Published(NamedTuple):
    """Statistics of a public trace's lengths, tokens, and how near a preset's mean must come."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    mean_tolerance: float = 0.05


@lru_cache(maxsize=64)
def fit_quantiles(stats: Published) -> Quantiles:
    """Return the log-linear distribution through the published quantiles.

    The shortest length, which is not published, is chosen between 1 and the median so that the
    mean comes as near as it can; `mean_tolerance` says how near that is.
    """
    low, high = 1.0, stats.p50
    for _ in range(60):
        middle = (low + high) / 2
        too_long = _through(middle, stats).mean > stats.mean
        low, high = (low, middle) if too_long else (middle, high)
    fitted = _through(low, stats)
    error = abs(fitted.mean / stats.mean - 1)
    assert error <= stats.mean_tolerance, f"the fit's mean is {error:.1%} off that of {stats}"
    return fitted


def _through(shortest: float, stats: Published) -> Quantiles:
    quantiles = ((0.5, stats.p50), (0.9, stats.p90), (0.99, stats.p99), (1.0, stats.longest))
    return Quantiles(((0.0, shortest), *quantiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Independent requests: when they arrive and how long they are."""

    arrivals: ArrivalProcess
    prompt: LengthDistribution
    output: LengthDistribution
    source: str = ""
    licence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSessions:
    """Closed-loop conversations with growing context.

    Sessions begin by `arrivals`; a session has a geometric number of turns with mean
    `mean_turns`, at most 64. A turn's prompt is the whole conversation before it plus a new
    message of `message` tokens (`first_prompt` for the first turn); it is sent a log-normal think
    time after the previous answer. A session ends early rather than exceed `max_context` tokens.
    With `reuse_prefix` the conversation before the new message counts as cached.
    """

    arrivals: ArrivalProcess
    first_prompt: LengthDistribution
    message: LengthDistribution
    output: LengthDistribution
    mean_turns: float = 4.0
    think_median_s: float = 15.0
    think_sigma: float = 1.0
    max_context: int = 32_768
    reuse_prefix: bool = False
    source: str = ""
    licence: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("mean_turns", 1.0), ("think_median_s", 0.0), ("think_sigma", 0.0)):
            value = getattr(self, name)
            require(least <= value < inf, name, value,
                    f"must be a finite number of at least {least:g}")  # fmt: skip
        require(self.max_context >= 2, "max_context", self.max_context, "must be at least 2 tokens")


_CC_BY, _APACHE, _MIT = "CC-BY-4.0", "Apache-2.0", "MIT"
_AZURE = "Azure LLM inference trace 2023, {}; Patel et al., ISCA 2024"
_MOONCAKE = "Mooncake trace release, {}; Qin et al., FAST 2025"

# Lengths (prompt, output) as computed from the public files; see docs/trace-format.md.
PUBLISHED: Mapping[str, tuple[Published, Published]] = MappingProxyType({
    "azure-conv": (Published(1_155, 1_020, 2_735, 4_142, 14_050),
                   Published(211, 129, 424, 601, 1_000)),
    # Log-linear pieces through its upper quantiles alone weigh more than the published mean, so
    # no shortest length brings the mean nearer than 21 %.
    "azure-code": (Published(2_048, 1_469, 5_194, 7_436, 7_437),
                   Published(28, 13, 55, 252, 1_899, mean_tolerance=0.22)),
    "mooncake-conversation": (Published(12_035, 6_909, 27_367, 85_401, 126_195),
                              Published(343, 350, 597, 1_120, 2_000)),
    "mooncake-synthetic": (Published(15_325, 11_587, 38_615, 66_458, 191_378),
                           Published(149, 69, 389, 769, 893)),
    "arxiv": (Published(2_588, 2_730, 3_702, 3_934, 4_054),
              Published(291, 167, 372, 3_273, 4_056)),
    "sharegpt": (Published(862, 729, 1_510, 2_884, 4_570),
                 Published(665, 641, 786, 1_107, 1_224)),
})  # fmt: skip


def _fitted(name: str, arrivals: ArrivalProcess, source: str, licence: str) -> Workload:
    prompt, output = PUBLISHED[name]
    return Workload(arrivals=arrivals, prompt=fit_quantiles(prompt), output=fit_quantiles(output),
                    source=source, licence=licence)  # fmt: skip


# Rates are the sources' means. Gamma gaps stand for their burstiness where it is published as
# variance over mean of arrivals per second (azure-conv 1.4, azure-code 13.2); that of
# mooncake-conversation is mostly rounding of its time stamps, so Poisson stands for it.
WORKLOADS: Mapping[str, Workload | ChatSessions] = MappingProxyType({
    "azure-conv": _fitted("azure-conv", Gamma(5.53, cv=1.2), _AZURE.format("conversation"),
                          _CC_BY),
    "azure-code": _fitted("azure-code", Gamma(2.57, cv=4.8), _AZURE.format("code"), _CC_BY),
    "mooncake-conversation": _fitted("mooncake-conversation", Poisson(3.40),
                                     _MOONCAKE.format("conversation"), _APACHE),
    "mooncake-synthetic": _fitted("mooncake-synthetic", Poisson(3.91),
                                  _MOONCAKE.format("synthetic"), _APACHE),
    "arxiv": _fitted("arxiv", Poisson(1.0), "arXiv summarization lengths, Vidur (MLSys 2024); "
                     "no times published, 1 req/s assumed", _MIT),
    "sharegpt": _fitted("sharegpt", Poisson(10.3), "ShareGPT lengths, LLMServingSim 2.0 "
                        "(ISPASS 2026)", _MIT),
    "chat-sessions": ChatSessions(
        arrivals=Poisson(0.5),
        first_prompt=LogNormal(600, 1.0, 16, 16_384),
        message=LogNormal(60, 1.0, 4, 4_096),
        output=LogNormal(250, 0.7, 8, 2_048),
        source="assumed, not measured: shapes chosen for multi-turn studies",
    ),
})  # fmt: skip


def generate_workload(
    workload: str | Workload | ChatSessions,
    *,
    num_requests: int,
    seed: int,
    rate: float | None = None,
    arrivals: ArrivalProcess | None = None,
) -> RequestTrace:
    """Return `num_requests` requests of a preset (a name in WORKLOADS) or of a workload.

    `rate` (requests per second; sessions per second for ChatSessions) or `arrivals` replaces the
    workload's own. Prompt and output lengths do not depend on either: each quantity has its own
    random stream of `seed`. Equal arguments give equal bytes. Raises `ConfigError`.
    """
    require(num_requests >= 1, "num_requests", num_requests, "must be at least 1")
    require(seed >= 0, "seed", seed, "must be at least 0")
    name, chosen = _choose(workload)
    require(rate is None or arrivals is None, "rate", rate,
            "cannot be given together with arrivals")  # fmt: skip
    process = arrivals or (chosen.arrivals if rate is None else _at_rate(chosen.arrivals, rate))
    chosen = replace(chosen, arrivals=process)
    streams = [default_rng(child) for child in SeedSequence(seed).spawn(4)]
    if isinstance(chosen, ChatSessions):
        columns = _sessions(chosen, num_requests, streams)
    else:
        columns = _independent(chosen, num_requests, streams)
    config = {"workload": name, "arrivals": str(process), "num_requests": num_requests}
    metadata = Metadata(
        table=REQUESTS, source="generator", config=config, seed=seed, licence=chosen.licence,
        notes=(chosen.source,) if chosen.source else (),
    )  # fmt: skip
    return build_requests(columns, metadata)


def _choose(workload: str | Workload | ChatSessions) -> tuple[str, Workload | ChatSessions]:
    if not isinstance(workload, str):
        return "custom", workload
    require(workload in WORKLOADS, "workload", workload, f"must be one of {', '.join(WORKLOADS)}")
    return workload, WORKLOADS[workload]


def _at_rate(process: ArrivalProcess, rate: float) -> ArrivalProcess:
    if isinstance(process, Poisson | Gamma | Constant):
        return replace(process, rate=rate)
    why = "all its requests come at once" if isinstance(process, Burst) else "give arrivals instead"
    raise ConfigError("rate", rate, f"does not apply to {process}: {why}")


def _independent(workload: Workload, num_requests: int, streams: list[Generator]) -> dict[str, Any]:
    return {
        "arrival_ns": numbers(workload.arrivals.draw_ns(num_requests, streams[0]), pa.int64()),
        "prompt_len": numbers(workload.prompt.draw(num_requests, streams[1]), pa.int32()),
        "output_len": numbers(workload.output.draw(num_requests, streams[2]), pa.int32()),
    }


def _sessions(chats: ChatSessions, num_requests: int, streams: list[Generator]) -> dict[str, Any]:
    """Draw turns of one session after the other, then keep the earliest `num_requests` of all."""
    # As many sessions as requests: then no later session can hold one of the earliest turns.
    starts = chats.arrivals.draw_ns(num_requests, streams[0])
    turns = np.minimum(streams[3].geometric(1 / chats.mean_turns, num_requests), _MOST_TURNS)
    heads = np.cumsum(turns) - turns  # index of each session's first turn
    session = np.repeat(np.arange(num_requests), turns)
    place = np.arange(len(session)) - heads[session]
    message = chats.message.draw(len(session), streams[1])
    message[heads] = chats.first_prompt.draw(num_requests, streams[1])
    output = chats.output.draw(len(session), streams[2])
    pause_s = streams[3].lognormal(0.0, chats.think_sigma, len(session)) * chats.think_median_s
    think = np.where(place > 0, np.rint(pause_s * 1e9), 0).astype(np.int64)
    after = _running(message + output, heads, session)  # conversation after each turn
    before = after - message - output
    busy = _running(output, heads, session) - output
    arrival = starts[session] + _running(think, heads, session) + busy * _TOKEN_NS
    # A first turn stays however long it is: its length is bounded by `first_prompt` alone.
    kept = np.flatnonzero((after <= chats.max_context) | (place == 0))
    kept = kept[np.lexsort((place[kept], session[kept], arrival[kept]))][:num_requests]
    cached = before[kept] if chats.reuse_prefix else np.zeros(num_requests)
    return {
        "session_id": texts([str(number) for number in session[kept].tolist()]),
        "turn": numbers(place[kept], pa.int32()),
        "think_ns": numbers(think[kept], pa.int64(), place[kept] > 0),
        "arrival_ns": numbers(arrival[kept], pa.int64()),
        "prompt_len": numbers((before + message)[kept], pa.int32()),
        "output_len": numbers(output[kept], pa.int32()),
        "cached_len": numbers(cached, pa.int32()),
    }


def _running(values: Ints, heads: Ints, session: Ints) -> Ints:
    """Return sums of `values` so far inside each session."""
    total = np.cumsum(values)
    before = total[heads] - values[heads]
    return np.asarray(total - before[session], dtype=np.int64)
