"""On real traces, too, fast-forward changes nothing: every column of every table is the same.

The traces are looked for in MDI_PUBLIC_TRACES, and the tests are skipped without. Single steps are
slow, so the first 250 requests of each trace stand for it (1,000 were equal, too, when this was
written), with one set of options; the others run on fewer requests of one trace.
"""

import pytest
from pandas.testing import assert_frame_equal

from mdi_shared.describe_run import describe_run
from mdi_sim.simulate import simulate
from mdi_traces.distributions import Poisson
from mdi_traces.formats import load_requests

TRACES = {
    "azure_conv_2023.csv": None,
    "azure_code_2023.csv": None,
    "mooncake_conversation.jsonl": None,
    "mooncake_synthetic.jsonl": None,
    "burstgpt_format_sample.csv": None,
    "arxiv_summarization_lengths.csv": Poisson(2.0),
    "sharegpt_lengths_300.csv": None,
    "tracelab_example_round_trace.jsonl": None,
}
ROWS, FEWER_ROWS = 250, 150
LONG = {"max_model_len": 262_144}
PRESSED = {"max_num_seqs": 48, "num_blocks": 200, "max_model_len": 16_384}
VARIANTS = {
    "every turn may prefill": {"scheduler": {"prefill_attempt_interval": 1}},
    "without ZOS": {"scheduler": {"enable_zos": False}},
    "KV pressure": {"scheduler": PRESSED},
    "KV pressure, preempted requests stop": {
        "scheduler": {**PRESSED, "stop_preempted_request": True}},
    "drafts": {"scheduler": {"num_draft_tokens": 2}, "draft_accept_rate": 0.7},
    "a cost target": {"scheduler": {"chunk_policy": "cost_target", "slo_itl_ms": 40.0}},
    "cut off": {"until_s": 20.0},
    "a roofline": {"cost": None},
    **{f"{ranks} ranks": {"ranks": ranks} for ranks in (2, 4)},
}  # fmt: skip


def assert_fast_forward_does_not_show(trace, **options):
    run = describe_run(**{"cost": "h200-flash-slice", "ranks": 1, **options})
    fast, single = (simulate(trace, run, fast_forward=each) for each in (True, False))
    assert len(single.steps) > len(trace)
    for name in ("steps", "requests", "items"):
        # NaN, which stands for "not measured", is equal to itself here.
        assert_frame_equal(getattr(fast, name), getattr(single, name), check_exact=True, obj=name)


@pytest.mark.parametrize("name", TRACES)
def test_whole_runs_of_public_traces(name, public_traces):
    trace = load_requests(public_traces / name, limit=ROWS, arrivals=TRACES[name])
    assert_fast_forward_does_not_show(trace, scheduler=LONG)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run(name, public_traces):
    trace = load_requests(public_traces / "azure_conv_2023.csv", limit=FEWER_ROWS).scaled(4)
    assert_fast_forward_does_not_show(trace, **VARIANTS[name])
