"""Serving a request trace for a limited time."""

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.serve_trace import TraceClient
from mdi_traces.generate import generate_workload
from mdi_traces.requests import cut_lengths
from tests.exec.engines import CHECKPOINT, SMALL


def trace(rate):
    made = generate_workload("azure-conv", num_requests=40, seed=0, rate=rate)
    return cut_lengths(made, max_prompt=64, max_output=400)


def test_when_time_is_up_what_runs_is_aborted_and_nothing_more_is_sent():
    with LLM(CHECKPOINT, **SMALL) as llm:
        ended = []
        TraceClient(llm.engine, trace(rate=100.0)).run(ended.append, seconds=0.5)
        assert not llm.engine.has_unfinished_requests()
        assert 0 < sum(ended) <= 40
        blocks = llm.engine.scheduler.queues.blocks
        assert blocks.num_free == blocks.num_total - 1


def test_time_that_runs_out_while_waiting_ends_the_wait():
    with LLM(CHECKPOINT, **SMALL) as llm:
        ended = []
        TraceClient(llm.engine, trace(rate=0.001)).run(ended.append, seconds=0.2)
        assert sum(ended) <= 1
