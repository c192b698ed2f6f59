"""Phases in the simulator: the shape that mixed steps are known for, and what tables say."""

import pyarrow as pa
import pytest

from mdi_analysis import compare, summarize
from mdi_analysis.overlay import overlay_rows
from mdi_sim.simulate import simulate
from mdi_traces.check import check_run
from mdi_traces.generate import generate_workload
from mdi_traces.requests import put_column
from mdi_traces.run import Run

OPTIONS = {"max_model_len": 32_768, "num_blocks": 6_000, "prefill_attempt_interval": 1}


@pytest.fixture(scope="module")
def runs():
    """Long prompts at a rate that keeps the engine busy, by phase."""
    work = generate_workload("azure-conv", num_requests=60, seed=3, rate=6.0)
    specs = ("prefill_first", "mixed", "mixed:budget=2048", "mixed:budget=512")
    return {spec: simulate(work, scheduler=OPTIONS, ranks=1, policy=spec) for spec in specs}


def test_the_smaller_the_chunks_beside_it_the_steadier_a_token_stream(runs):
    """Sarathi-Serve (OSDI 24): long gaps are stalls behind whole prompts; TTFT pays for it."""
    found = {spec: summarize(run).latency for spec, run in runs.items()}
    gaps = [latency.itl_ms.p99 for latency in found.values()]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.5 * gaps[0]
    assert found["mixed:budget=512"].ttft_ms.p99 > found["prefill_first"].ttft_ms.p99


def test_capacity_is_higher_where_chunks_go_beside_who_decodes():
    """The same source's measure: the rate at which a P99 gap and a median of queueing hold."""

    def holds(spec, rate):
        work = generate_workload("azure-conv", num_requests=60, seed=3, rate=rate)
        found = summarize(simulate(work, scheduler=OPTIONS, ranks=1, policy=spec)).latency
        return found.itl_ms.p99 <= 200 and found.queue_ms.p50 <= 2_000

    assert [holds("prefill_first", rate) for rate in (4.0, 12.0)] == [True, False]
    assert holds("mixed:budget=2048", 12.0)


def test_tables_tell_prompts_from_who_decodes(runs):
    run = runs["mixed:budget=512"]
    assert check_run(run) == []
    mixed = run.steps[run.steps["kind"] == "mixed"]
    assert mixed["n_tokens"].max() == 512
    assert (mixed["n_prompt_rows"] < mixed["n_tokens"]).any()
    work, throughput = run.requests, summarize(run).throughput
    assert throughput.input_tokens == work["prompt_len"].sum() == run.steps["n_prompt_rows"].sum()
    assert throughput.output_tokens == work["output_len"].sum()


def test_a_prompt_token_too_many_is_found_beside_who_decodes(runs):
    run = runs["mixed:budget=512"]
    computed = run.requests_table["n_recomputed_tokens"].to_pylist()
    computed[7] += 1
    broken = put_column(run.requests_table, "n_recomputed_tokens", pa.array(computed, pa.int32()))
    (finding,) = check_run(Run(run.steps_table, broken, run.metadata, run.items_table))
    assert (finding.law, finding.row) == ("prompt_tokens_are_computed", 7)


def test_runs_of_different_phases_compare(runs):
    a, b = runs["prefill_first"], runs["mixed"]
    found = compare(a, b)
    assert (found.kinds["prefill"].count.b, found.kinds["mixed"].count.a) == (0, 0)
    assert "mixed step, P50, ms" in str([sheet.rows for sheet in found.sheets()])
    step_times = next(iter(overlay_rows(a, b, found.names).values()))
    assert step_times.axes[0].get_xlabel() == "rows of a prefill or mixed step"
