"""The summary: counts beside percentiles, throughput, memory, and runs where nothing happened."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from mdi_analysis import METRICS, SLO, metrics_markdown, summarize
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.errors import ConfigError, TraceError
from mdi_sim.simulate import simulate
from mdi_traces import generate_workload


def keys_of(data) -> list[str]:
    if isinstance(data, dict):
        return [*data, *(key for inner in data.values() for key in keys_of(inner))]
    return []


def render(table) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


def test_counts_add_up(run):
    counts = summarize(run).requests
    assert (counts.total, counts.completed, counts.rejected) == (4, 2, 1)
    assert (counts.aborted, counts.unfinished) == (0, 1)
    assert counts.by_finish_reason == {"length": 1, "prompt_length_exceeded": 1, "stop": 1}
    assert counts.by_unfinished_reason == {"stopped early": 1}


def test_unfinished_without_a_reason_is_still_counted(run):
    requests = run.requests.assign(unfinished_reason=None)
    counts = summarize(run.but(requests=requests)).requests
    assert counts.by_unfinished_reason == {"not recorded": 1}


def test_latencies_are_those_of_completed_requests(run):
    requests = run.requests.copy()
    requests["finish_reason"] = ["stop", "abort", "prompt_length_exceeded", None]
    found = summarize(run.but(requests=requests)).latency
    assert (found.ttft_ms.n, found.ttft_ms.mean, found.queue_ms.n) == (1, 21, 1)
    assert found.itl_ms.n == 5  # gaps between tokens that were seen, whoever saw them


def test_throughput(run):
    found = summarize(run).throughput
    assert found.span_s == pytest.approx(0.033)
    assert (found.n_gpus, found.input_tokens, found.output_tokens) == (1, 256, 7)
    assert found.input_tok_s_gpu == pytest.approx(256 / 0.033)
    assert found.output_tok_s_gpu == pytest.approx(7 / 0.033)
    assert found.requests_s == pytest.approx(2 / 0.033)


def test_recomputed_tokens_are_no_input(run):
    requests = run.requests.assign(n_recomputed_tokens=[56, 0, 0, 0])
    found = summarize(run.but(requests=requests))
    assert (found.throughput.input_tokens, found.engine.recomputed_tokens) == (200, 56)


def test_gpus_are_groups_times_context_parallel(two_ranks):
    assert summarize(two_ranks).throughput.n_gpus == 2
    config = {"scheduler": {"context_parallel_size": 4, "num_blocks": 101}}
    split = two_ranks.but(metadata=type(two_ranks.metadata)(config=config))
    assert summarize(split).throughput.n_gpus == 8
    halves = split.but(steps=split.steps.assign(cp=split.steps["rank"]))
    assert summarize(halves).throughput.n_gpus == 4  # rank 1 is inside the group of rank 0
    assert summarize(split, n_gpus=3).throughput.n_gpus == 3
    with pytest.raises(ConfigError, match="n_gpus = 0: must be at least 1"):
        summarize(two_ranks, n_gpus=0)


def test_goodput_counts_everybody(run):
    assert summarize(run).goodput is None
    found = summarize(run, SLO(ttft_ms=20)).goodput
    assert (found.met, found.goodput_share) == (1, 0.25)
    assert found.goodput_s == pytest.approx(1 / 0.033)


def test_kinds_share_the_device_time(two_ranks):
    engine = summarize(two_ranks).engine
    assert list(engine.by_kind) == ["prefill", "decode", "idle_prefill", "idle_decode"]
    prefill = engine.by_kind["prefill"]
    assert (prefill.count, prefill.device_total_ms, prefill.device_ms.p50) == (2, 16, 8)
    assert prefill.device_share == pytest.approx(16 / 44)
    assert sum(use.device_share for use in engine.by_kind.values()) == pytest.approx(1)
    assert engine.by_kind["decode"].batch_size.mean == 2


def test_rank_imbalance_ignores_idle_steps(run, two_ranks):
    assert summarize(run).engine.rank_imbalance == 1
    assert summarize(two_ranks).engine.rank_imbalance == 2


def test_kv_occupancy_is_weighted_by_time(run):
    engine = summarize(run).engine
    used = np.array([2, 3, 3, 3, 1]) / 100
    assert engine.kv_occupancy_max == pytest.approx(0.03)
    assert engine.kv_occupancy_mean == pytest.approx(used @ [11, 10, 4, 4, 4] / 33)


def test_kv_occupancy_needs_num_blocks(run):
    engine = summarize(run.but(metadata=type(run.metadata)(config={}))).engine
    assert (engine.kv_occupancy_mean, engine.kv_occupancy_max) == (None, None)


@pytest.mark.parametrize(
    ("num_blocks", "what"),
    [(50, "row 1, .*num_blocks - 1 = 49"), ("50", "integer"), (1, "at least 2")],
)
def test_kv_occupancy_refuses_a_config_that_cannot_be(run, num_blocks, what):
    metadata = type(run.metadata)(config={"num_blocks": num_blocks})
    with pytest.raises(TraceError, match=what):
        summarize(run.but(metadata=metadata))


def test_barrier_wait(run, two_ranks):
    assert summarize(run).engine.barrier_wait_share is None
    assert summarize(two_ranks).engine.barrier_wait_share == pytest.approx(5 / (2 * 33))


def test_unknown_kind_is_named(run):
    steps = run.steps.assign(kind=["prefill", "prefill", "decode", "nap", "decode"])
    with pytest.raises(TraceError, match=r"row 4, column 'kind': 'nap' must be one of prefill"):
        summarize(run.but(steps=steps))


def test_items_are_left_alone_on_request(run):
    class Lazy(type(run)):
        def __getattribute__(self, name):
            assert name != "items", "items must not be asked for"
            return super().__getattribute__(name)

    lazy = Lazy(run.steps, None, run.requests, run.metadata)
    assert summarize(lazy, itl=False).latency.itl_ms is None


def test_dict_is_json_without_nan(run, nothing):
    for each in (run, nothing, run.but(items=None)):
        data = summarize(each, SLO(ttft_ms=20)).to_dict()
        assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["latency"]["itl_ms"] is None


def test_nothing_happened(nothing):
    found = summarize(nothing, SLO(ttft_ms=1))
    assert (found.requests.total, found.latency.ttft_ms.n, found.latency.ttft_ms.p99) == (
        0,
        0,
        None,
    )
    assert (found.throughput.requests_s, found.goodput.goodput_share) == (None, None)
    assert (found.engine.steps, found.engine.by_kind, found.engine.rank_imbalance) == (0, {}, None)
    assert "0 requests" in render(found.table())


def test_nobody_finished(run):
    requests = run.requests.assign(finish_reason=None, t_finish=np.nan)
    found = summarize(run.but(requests=requests))
    assert (found.requests.completed, found.requests.unfinished) == (0, 4)
    assert found.latency.e2e_ms.mean is None
    assert found.throughput.requests_s == 0


def test_table_fits_a_terminal_and_names_the_left_out(run):
    shown = render(summarize(run, SLO(ttft_ms=20)).table())
    assert "4 requests: 2 completed, 1 rejected, 0 aborted, 1 unfinished" in shown
    assert "25.0%" in shown
    assert "…" not in shown


def test_every_metric_is_in_the_summary_under_its_name(run):
    known = keys_of(summarize(run, SLO(ttft_ms=20)).to_dict())
    assert [metric.name for metric in METRICS if metric.name not in known] == []


def test_documentation_has_the_generated_table(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert metrics_markdown() in text, (
        "docs/metrics.md is out of date: replace its table by mdi_analysis.metrics_markdown()"
    )


def test_waits_for_votes_are_told_apart_from_other_waits():
    """With 70 decode steps between attempts most of TTFT is that wait; with 1, or without a free
    seat, none of it is.
    """
    work = generate_workload("azure-conv", num_requests=60, seed=1, rate=8)
    cost = ConstantCost(20_000_000, 5_000_000)
    shares = {}
    for interval, seats in ((70, 64), (8, 64), (1, 64), (70, 1)):
        config = SchedulerConfig(max_num_seqs=seats, prefill_attempt_interval=interval)
        found = summarize(simulate(work, scheduler=config, cost=cost, shape=TINY), itl=False)
        shares[interval, seats] = found.engine.vote_wait_share
        told = [remark for remark in found.remarks() if "waits for votes are" in remark]
        assert bool(told) == (shares[interval, seats] > 0.5)
    assert shares[70, 64] > 0.6 > shares[8, 64] > shares[1, 64]
    assert shares[1, 64] < 0.02
    assert shares[70, 1] < 0.05


def test_the_wait_is_no_longer_than_the_queue():
    work = generate_workload("azure-conv", num_requests=60, seed=1, rate=8)
    run = simulate(work, cost=ConstantCost(20_000_000, 5_000_000), shape=TINY, ranks=3)
    queued = run.requests["queue_ms"].sum() / run.requests["ttft_ms"].sum()
    assert 0 < summarize(run, itl=False).engine.vote_wait_share <= queued
