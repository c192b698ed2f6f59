"""Workloads of the recording campaigns: what is sent, and with which options it is served.

A workload is either groups, each sent at once and served to its end before the next one follows, or
a request trace whose arrival times are kept. Sizes come in two sets: "full" for the released
dimensions on a GPU, "small" for the tiny model. Read next: `record_h200.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mdi_shared.errors import ConfigError
from mdi_traces.columns import ints, numbers
from mdi_traces.formats import load_requests
from mdi_traces.generate import generate_workload
from mdi_traces.requests import RequestTrace, cut_lengths, put_column

BLOCK = 128  # tokens of a KV block


class Job(NamedTuple):
    """A request as lengths, tokens."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One recorded run. `options` go to the engine; exactly one of groups and trace is there."""

    name: str
    what: str
    options: dict[str, Any]
    groups: tuple[tuple[Job, ...], ...] = ()
    trace: RequestTrace | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the campaigns are. Rates are requests per second, lengths tokens."""

    chunks: tuple[int, ...]
    sequences: tuple[int, ...]
    long_prompts: tuple[int, ...]
    random_groups: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    most_tokens: int  # batch times context of a decode point
    decode_steps: int
    rates: dict[str, float]
    num_requests: int
    max_prompt: int
    max_output: int
    max_num_seqs: int
    max_model_len: int  # of every workload: a decode graph is sized by it
    long_rate: float
    pressure: Job
    pressure_requests: int


FULL = Sizes(
    chunks=(1_024, 4_096, 8_192), sequences=(1, 2, 4, 8, 16), long_prompts=(32_768, 131_072),
    random_groups=80, batches=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    contexts=(128, 1_024, 4_096, 16_384, 65_536, 131_072), most_tokens=524_288, decode_steps=10,
    rates={"low": 4.0, "high": 20.0}, num_requests=4_000, max_prompt=16_384, max_output=512,
    max_num_seqs=256, max_model_len=131_072 + 1_024, long_rate=2.0, pressure=Job(2_048, 512),
    pressure_requests=96,
)  # fmt: skip
SMALL = Sizes(
    chunks=(64, 256), sequences=(1, 2, 4), long_prompts=(600,), random_groups=6, batches=(1, 4),
    contexts=(32, 200), most_tokens=800, decode_steps=6, rates={"low": 2.0, "high": 40.0},
    num_requests=200, max_prompt=200, max_output=16, max_num_seqs=8, max_model_len=700,
    long_rate=4.0, pressure=Job(200, 150), pressure_requests=6,
)  # fmt: skip
SIZES = {"full": FULL, "small": SMALL}


def _blocks(tokens: int) -> int:
    return -(-(tokens + 1) // BLOCK) + 1


def _pool(groups: tuple[tuple[Job, ...], ...], sizes: Sizes, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Options of an engine that holds the largest group at once, and votes prefill at once."""
    need = max(sum(_blocks(job.prompt + job.output) for job in group) for group in groups)
    least = _blocks(sizes.max_model_len) + 8
    return {
        "max_num_seqs": sizes.max_num_seqs, "max_model_len": sizes.max_model_len,
        "max_num_batched_tokens": max(sizes.chunks), "prefill_attempt_interval": 1,
        "num_blocks": 2 + max(need, least) * 5 // 4, **options,
    }  # fmt: skip


def prefill_sweep(sizes: Sizes) -> Iterator[Workload]:
    """One run per chunk size: 1, 2, .. sequences in a step, then long prompts chunk by chunk."""
    for chunk in sizes.chunks:
        counts = [n for n in sizes.sequences if n <= chunk]
        even = tuple(tuple(Job(chunk // n, 1) for _ in range(n)) for n in counts)
        part = tuple((Job(max(chunk * share // 8, 1), 1),) for share in (1, 3, 5))
        long = tuple((Job(prompt, 1),) for prompt in sizes.long_prompts)
        pairs = tuple((Job(prompt // 2, 1), Job(prompt // 4, 1)) for prompt in sizes.long_prompts)
        groups = (*even, *part, *long, *pairs)
        yield Workload(
            f"prefill_{chunk}", "prefill by number of sequences, rows and cached length",
            _pool(groups, sizes, max_num_batched_tokens=chunk), groups,
        )  # fmt: skip


def prefill_mixed(sizes: Sizes) -> Iterator[Workload]:
    """Prompts as they come: a few at once, lengths spread evenly on a logarithmic scale.

    A sweep varies one thing at a time; here rows, sequences and lengths vary independently, from
    single short prompts to steps that several sequences fill.
    """
    dice, most, groups = np.random.default_rng(7), max(sizes.chunks), []
    for _ in range(sizes.random_groups):
        count = int(2 ** dice.uniform(0, np.log2(max(sizes.sequences) + 1)))
        lengths = np.exp(dice.uniform(np.log(8), np.log(most), count)).astype(int).tolist()
        groups.append(tuple(Job(length, 2) for length in lengths))
    yield Workload("prefill_mixed", "prompts of random number and lengths at once",
                   _pool(tuple(groups), sizes), tuple(groups))  # fmt: skip


def decode_sweep(sizes: Sizes) -> Iterator[Workload]:
    """Every batch at every context that `most_tokens` allows, some steps each.

    A context is prefilled once, for its largest batch: sequences then end in turn, so that the
    batch shrinks from one size to the next.
    """
    groups = []
    for context in sizes.contexts:
        batches = sorted(b for b in sizes.batches if b * context <= sizes.most_tokens)
        larger = zip([0, *batches], batches, range(len(batches), 0, -1), strict=False)
        groups.append(tuple(
            Job(context, 1 + steps * sizes.decode_steps)
            for below, batch, steps in larger for _ in range(batch - below)
        ))  # fmt: skip
    yield Workload("decode", "decode by batch and context", _pool(tuple(groups), sizes),
                   tuple(groups))  # fmt: skip


def online(sizes: Sizes) -> Iterator[Workload]:
    """Chat-like requests that arrive by themselves, at a low and at a high rate."""
    for load, rate in sizes.rates.items():
        trace = generate_workload(
            "azure-conv", num_requests=sizes.num_requests, seed=1, rate=rate
        )  # fmt: skip
        trace = cut_lengths(trace, max_prompt=sizes.max_prompt, max_output=sizes.max_output)
        yield Workload(f"online_{load}", f"chat-like arrivals at {rate:g} requests/s",
                       _open_pool(sizes), trace=trace, notes={"rate": rate})  # fmt: skip


def _open_pool(sizes: Sizes) -> dict[str, Any]:
    each = _blocks(min(sizes.max_prompt + sizes.max_output, 4_096))
    needed = max(sizes.max_num_seqs * each, 4 * _blocks(sizes.max_model_len))
    return {"max_num_seqs": sizes.max_num_seqs, "max_model_len": sizes.max_model_len,
            "max_num_batched_tokens": max(sizes.chunks), "num_blocks": 2 + needed}  # fmt: skip


def long_context(sizes: Sizes) -> Iterator[Workload]:
    """Chat-like arrivals of which every eighth brings a long prompt."""
    trace = generate_workload(
        "azure-conv", num_requests=sizes.num_requests, seed=2, rate=sizes.long_rate
    )  # fmt: skip
    trace = cut_lengths(trace, max_prompt=sizes.max_prompt, max_output=sizes.max_output)
    prompts = ints(trace.table["prompt_len"]).copy()
    least, most = np.log(sizes.long_prompts[0]), np.log(sizes.long_prompts[-1])
    places = np.arange(4, len(prompts), 8)
    drawn = np.random.default_rng(8).uniform(least, most, len(places))
    prompts[places] = np.exp(drawn).astype(int)
    trace = replace(trace, table=put_column(trace.table, "prompt_len",
                                            numbers(prompts, pa.int32())))  # fmt: skip
    what = (f"chat-like arrivals at {sizes.long_rate:g} requests/s, every eighth prompt of "
            f"{sizes.long_prompts[0]:,} to {sizes.long_prompts[-1]:,} tokens")  # fmt: skip
    yield Workload("long_context", what, _open_pool(sizes), trace=trace,
                   notes={"rate": sizes.long_rate})  # fmt: skip


def rising_context(sizes: Sizes) -> Iterator[Workload]:
    """The longest prompts one behind the other: what a chunk costs rises with what is cached."""
    group = tuple(Job(sizes.long_prompts[-1], 1) for _ in range(6))
    yield Workload("rising_context", "the longest prompts, one behind the other",
                   _pool((group,), sizes), (group,))  # fmt: skip


def preemption(sizes: Sizes) -> Iterator[Workload]:
    """A pool that holds all prompts but not all outputs: requests lose their memory and redo."""
    job, count = sizes.pressure, sizes.pressure_requests
    group = tuple(job for _ in range(count))
    start, whole = (count * -(-n // BLOCK) for n in (job.prompt + 1, job.prompt + job.output))
    options = _pool((group,), sizes, num_blocks=1 + start + (whole - start) // 4)
    yield Workload("preemption", "a block pool too small for the outputs", options, (group,))


def public_replay(sizes: Sizes, trace_file: Path, speed: float) -> Iterator[Workload]:
    """The first requests of a public trace, `speed` times as fast, lengths cut."""
    trace = load_requests(trace_file).head(sizes.num_requests)
    trace = cut_lengths(trace, max_prompt=sizes.max_prompt, max_output=sizes.max_output)
    yield Workload(
        "replay", f"{trace_file.name} at {speed:g} times its speed", _open_pool(sizes),
        trace=trace.scaled(speed), notes={"trace": trace_file.name, "speed": speed},
    )  # fmt: skip


CAMPAIGNS: dict[str, Callable[[Sizes], Iterator[Workload]]] = {
    "prefill": prefill_sweep, "mixed": prefill_mixed, "decode": decode_sweep, "online": online,
    "long_context": long_context, "rising_context": rising_context, "preemption": preemption,
}  # fmt: skip
REPLAY = "replay"


def workloads(
    names: list[str], sizes: Sizes, trace_file: Path | None, speed: float
) -> list[Workload]:  # fmt: skip
    """Return the workloads of the named campaigns; the replay needs a trace file."""
    found: list[Workload] = []
    for name in names:
        if name == REPLAY:
            if trace_file is None:
                raise ConfigError("trace", None, "the replay campaign needs --trace FILE")
            found += public_replay(sizes, trace_file, speed)
        else:
            found += CAMPAIGNS[name](sizes)
    return found
