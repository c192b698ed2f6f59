"""One run in numbers: who finished, how fast, and what the engine did meanwhile.

Counts of rejected and unfinished requests always stand beside the percentiles: latencies describe
completed requests only, so without the counts an overloaded run would look fast.

Read next: `compare.py`, which sets two runs side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mdi_analysis.frames import RunLike, has_items, series
from mdi_analysis.metrics import (
    LATENCIES,
    NEVER_ARRIVED,
    SLO,
    UNFINISHED,
    Distribution,
    inter_token_latencies,
    request_latencies,
)
from mdi_analysis.report import (
    Sheet,
    change,
    counted,
    number,
    paragraph,
    percent,
    plain,
    stack,
)
from mdi_analysis.usage import (
    EngineUse,
    Goodput,
    Throughput,
    engine_use,
    goodput,
    throughput,
)

if TYPE_CHECKING:
    from rich.table import Table


MOSTLY = 0.5  # a share of the latency that the summary speaks of


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the run comes from, as its metadata says."""

    model: str | None
    hardware: str | None
    source: str | None
    clock: str | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests by outcome; completed + rejected + aborted + unfinished = total.

    `never_arrived` counts those the run ended before; they are no part of the total.
    """

    total: int
    completed: int
    rejected: int
    aborted: int
    unfinished: int
    by_finish_reason: dict[str, int]
    by_unfinished_reason: dict[str, int]
    never_arrived: int = 0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of completed requests, and gaps between tokens (None without step items)."""

    ttft_ms: Distribution
    ttft_engine_ms: Distribution
    tpot_ms: Distribution
    tpot_with_first_ms: Distribution
    e2e_ms: Distribution
    queue_ms: Distribution
    itl_ms: Distribution | None

    def known(self) -> Iterator[tuple[str, Distribution]]:
        """Yield name and distribution of every latency there is."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value


@dataclass(frozen=True, slots=True)
class Summary:
    """All metrics of a run; names and units are those of docs/metrics.md."""

    origin: Origin
    requests: RequestCounts
    latency: Latencies
    throughput: Throughput
    goodput: Goodput | None
    engine: EngineUse

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; what does not exist is None, never NaN."""
        data: dict[str, Any] = plain(self)
        return data

    def table(self) -> "Table":
        """Return a rich table for people; print it with a rich console."""
        found = [sheet.rich() for sheet in self.sheets()]
        found += [paragraph(sentence) for sentence in self.remarks()]
        return stack(found)

    def sheets(self) -> list[Sheet]:
        """Return what there is to read, as text: latencies, kinds of steps, the whole run."""
        return [_latency_sheet(self), _kind_sheet(self.engine), _facts_sheet(self)]

    def remarks(self) -> list[str]:
        """Return sentences on what stands out."""
        waits = self.engine.vote_wait_share
        if waits is None or waits <= MOSTLY:
            return []
        return [f"waits for votes are {percent(waits)} of the time to first token: prompts wait "
                "until prefill_attempt_interval decode steps have gone by; a smaller one lets them "
                "in earlier, and mdi tune chooses it"]  # fmt: skip


def summarize(
    run: RunLike, slo: SLO | None = None, *, n_gpus: int | None = None, itl: bool = True
) -> Summary:
    """Compute every metric of a run.

    `n_gpus` divides the throughputs (default: `count_gpus`). `itl=False`
    leaves the item table untouched, which matters when it is large. Raises `TraceError` when a
    table contradicts the trace format.
    """
    latencies = request_latencies(run)
    counts = count_requests(run, latencies)
    completed = latencies[latencies["outcome"] == "completed"]
    found = {name: Distribution.of(completed[name].to_numpy()) for name in LATENCIES}
    has_gaps = itl and has_items(run)
    gaps = Distribution.of_counted(*inter_token_latencies(run)) if has_gaps else None
    meta = run.metadata
    return Summary(
        origin=Origin(meta.model, meta.hardware, meta.source, meta.clock, meta.seed),
        requests=counts,
        latency=Latencies(**found, itl_ms=gaps),
        throughput=throughput(run, counts.completed, n_gpus),
        goodput=None if slo is None else goodput(run, latencies, slo),
        engine=engine_use(run),
    )


def count_requests(run: RunLike, latencies: pd.DataFrame) -> RequestCounts:
    """Return the outcomes of the rows of `request_latencies(run)`."""
    outcome = latencies["outcome"].value_counts()
    names = ("completed", "rejected", "aborted", UNFINISHED, NEVER_ARRIVED)
    completed, rejected, aborted, unfinished, never = (int(outcome.get(n, 0)) for n in names)
    open_requests = (latencies["outcome"] == UNFINISHED).to_numpy()
    reasons = series(run.requests, "requests", "unfinished_reason").astype(object)
    return RequestCounts(
        total=len(latencies) - never,
        completed=completed,
        rejected=rejected,
        aborted=aborted,
        unfinished=unfinished,
        by_finish_reason=_tally(latencies["finish_reason"].dropna()),
        by_unfinished_reason=_tally(reasons[open_requests].fillna("not recorded")),
        never_arrived=never,
    )


def _tally(values: pd.Series) -> dict[str, int]:
    names, counts = np.unique(values.to_numpy(dtype=str), return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def describe_counts(counts: RequestCounts) -> str:
    """Return one line: how many requests there were and what became of them."""
    return (
        f"{counted(counts.total, 'request')}: {counts.completed:,} completed, "
        f"{counts.rejected:,} rejected, {counts.aborted:,} aborted, "
        f"{counts.unfinished:,} unfinished"
        + (f"; {counts.never_arrived:,} more never arrived" if counts.never_arrived else "")
    )


def _latency_sheet(summary: Summary) -> Sheet:
    rows = [
        (name, number(d.n), number(d.mean), number(d.p50), number(d.p90), number(d.p99),
         number(d.max))
        for name, d in summary.latency.known()
    ]  # fmt: skip
    headers = ("latency", "n", "mean", "p50", "p90", "p99", "max")
    return Sheet(describe_counts(summary.requests), headers, rows)


def _kind_sheet(engine: EngineUse) -> Sheet:
    rows = [
        (kind, number(use.count), percent(use.device_share), number(use.device_ms.mean),
         number(use.device_ms.p50), number(use.device_ms.p99), number(use.batch_size.mean),
         number(use.tokens.mean))
        for kind, use in engine.by_kind.items()
    ]  # fmt: skip
    headers = ("kind", "count", "device", "mean ms", "p50 ms", "p99 ms", "seqs", "tokens")
    title = f"{counted(engine.steps, 'step')} on {counted(engine.ranks, 'rank')}"
    return Sheet(title, headers, rows)


def _facts_sheet(summary: Summary) -> Sheet:
    speed, engine, good = summary.throughput, summary.engine, summary.goodput
    rows = [
        ("span", f"{number(speed.span_s)} s on {counted(speed.n_gpus, 'GPU')}"),
        ("input", f"{number(speed.input_tok_s_gpu)} tokens/s/GPU"),
        ("output", f"{number(speed.output_tok_s_gpu)} tokens/s/GPU"),
        ("requests", f"{number(speed.requests_s)} /s"),
    ]
    if good is not None:
        rows.append(("goodput", f"{number(good.goodput_s)} /s ({percent(good.goodput_share)})"))
    imbalance = engine.rank_imbalance
    rows += [
        ("KV occupancy", f"mean {percent(engine.kv_occupancy_mean)}, "
                         f"max {percent(engine.kv_occupancy_max)}"),
        ("preemptions", f"{engine.preemptions:,} ({engine.recomputed_tokens:,} tokens recomputed)"),
        ("dropped rows", f"{engine.dropped_rows:,}"),
        ("barrier wait", percent(engine.barrier_wait_share)),
        ("wait for votes", f"{percent(engine.vote_wait_share)} of the time to first token"),
        ("busiest rank", f"{change(None if imbalance is None else imbalance - 1)} over the mean"),
    ]  # fmt: skip
    counts = summary.requests
    rows += [
        (f"ended: {name}", counted(n, "request")) for name, n in counts.by_finish_reason.items()
    ]
    rows += [
        (f"open: {name}", counted(n, "request")) for name, n in counts.by_unfinished_reason.items()
    ]
    return Sheet(describe_origin(summary.origin), (), rows, n_text=2)


def describe_origin(origin: Origin) -> str:
    """Return one line: model, hardware, source, clock and seed, as far as they are known."""
    parts = [origin.model, origin.hardware, origin.source]
    parts += [f"{origin.clock} clock" if origin.clock else None]
    parts += [f"seed {origin.seed}" if origin.seed is not None else None]
    return ", ".join(part for part in parts if part) or "origin not recorded"
