"""The page of one run: it stands alone, says what happened, and lets no name in as markup."""

import base64
import gzip
import json
import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

import minideepinfer as mdi
from mdi_analysis import run_page, summarize
from mdi_analysis.charts import MOST_LIVES, lives_chart, run_panels
from mdi_analysis.lives import DECODE, PREEMPTED, PREFILL, WAITING, spans_of
from mdi_analysis.metrics import request_latencies
from mdi_traces.columns import texts
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata

EVIL = "</script><img src=x onerror=alert(1)>"
COST = mdi.ConstantCost(prefill_ns=10_000_000, decode_ns=1_000_000)


def packed(page, name):
    (data,) = re.findall(rf"<script type='text/plain' id='{name}'>([^<]*)</script>", page)
    return gzip.decompress(base64.b64decode(data)).decode()


@pytest.fixture(scope="module", params=["fcfs", "phase=mixed"])
def crowded(request):
    """Three requests in a pool for less, chunked, with a name that would be code."""
    work = build_requests(
        {
            "req_id": texts([EVIL, "b", "c"]),
            "arrival_ns": pa.array([0, 1_000_000, 2_000_000], pa.int64()),
            "prompt_len": pa.array([100, 60, 40], pa.int32()),
            "output_len": pa.array([60, 60, 60], pa.int32()),
        },
        Metadata(table="requests", source="generator"),
    )
    return mdi.simulate(work, cost=COST, shape="tiny", policy=request.param, scheduler={
        "num_blocks": 20, "block_size": 16, "max_model_len": 200, "max_num_batched_tokens": 64,
        "max_num_seqs": 8, "prefill_attempt_interval": 1})  # fmt: skip


def test_the_page_stands_alone_and_escapes_names(crowded):
    page = run_page(crowded, summarize(crowded), title=f"{EVIL} & co", basis=[f"from {EVIL}"])
    assert "onerror=alert(1)&gt; &amp; co</h1>" in page
    assert "<img" not in page
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    assert "Plotly" in packed(page, "library")
    charts = json.loads(packed(page, "charts"))
    assert list(charts) == ["requests", "lives", "timeline", "latency", "steps"]
    assert EVIL not in json.dumps(charts), "plotly reads markup in what it shows"
    for name in charts:
        assert f"<div id='{name}'></div>" in page
    assert page.index("Half had their first token") < page.index("<details>")
    assert page == run_page(crowded, summarize(crowded), title=f"{EVIL} & co",
                            basis=[f"from {EVIL}"])  # fmt: skip


def test_spans_tell_a_life_without_a_gap(crowded):
    requests = crowded.requests
    assert requests["n_preempt"].sum() > 0
    for row, request in requests.iterrows():
        spans = spans_of(crowded, [row])
        assert spans[0].start_s == pytest.approx(request["arrival_ns"] / 1e9)
        assert spans[-1].end_s == pytest.approx(request["t_last_token"] / 1e9)
        for one, other in pairwise(spans):
            assert other.start_s == pytest.approx(one.end_s)
        states = [span.state for span in spans]
        assert states.count(PREFILL) == request["n_chunks"]
        assert PREEMPTED not in states or states.count(DECODE) > 1
        assert (PREEMPTED in states) == (request["n_preempt"] > 0)
        tokens = [int(span.note.split()[0]) for span in spans if span.state == DECODE]
        assert sum(tokens) == request["output_len"]
    assert WAITING in [span.state for span in spans_of(crowded, range(3))]


def test_hand_made_spans(run):
    spans = spans_of(run, [0, 1, 2])
    ms = [(span.row, span.state, round(span.start_s * 1e3), round(span.end_s * 1e3))
          for span in spans]  # fmt: skip
    assert ms == [
        (0, WAITING, 0, 2), (0, PREFILL, 2, 11), (0, WAITING, 11, 12), (0, PREFILL, 12, 21),
        (0, DECODE, 21, 29), (1, WAITING, 5, 12), (1, PREFILL, 12, 21), (1, DECODE, 21, 33),
    ]  # fmt: skip
    without = spans_of(run.but(items=None), [0])
    assert [span.state for span in without] == [PREFILL, DECODE]


def test_a_long_run_shows_the_lives_around_its_longest_wait():
    work = mdi.generate_workload("azure-conv", num_requests=MOST_LIVES + 50, rate=500.0, seed=0)
    found = mdi.simulate(work, cost=COST, scheduler={"prefill_attempt_interval": 1})
    _, reading, chart = run_panels(found)["lives"]
    assert f"{MOST_LIVES} of {MOST_LIVES + 50} requests" in reading
    rows = chart["rows"]
    assert len(rows) == MOST_LIVES
    assert int(np.nanargmax(request_latencies(found)["ttft_ms"])) in rows
    assert {row for trace in chart["data"] for row in trace["customdata"]} <= set(rows)


def test_empty_and_bare_runs_have_a_page(run, nothing):
    for each in (nothing, run.but(items=None), run):
        page = run_page(each, summarize(each), title="x")
        json.loads(packed(page, "charts"), parse_constant=pytest.fail)
    assert lives_chart(nothing, [])["data"][0]["x"] == []
