"""Service levels as text, and the highest rate at which one holds."""

from math import inf
from pathlib import Path

import pytest

import minideepinfer as mdi
from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_sim.search.capacity import Search
from mdi_sim.search.rows import load_rows
from mdi_sim.search.slo import parse_service_level
from minideepinfer import measures

# One sequence at a time: a server whose capacity is 1 over the time of a request.
ONE_SEAT = {"cost": mdi.ConstantCost(prefill_ns=100_000_000, decode_ns=100_000_000), "ranks": 1,
            "scheduler": {"num_blocks": 200, "max_model_len": 1_024, "max_num_seqs": 1,
                          "prefill_attempt_interval": 1}}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def even(here):
    """Forty equal requests a second apart: each takes its prefill and one decode step."""
    rows = ["req_id,arrival_ns,prompt_len,output_len"]
    rows += [f"{n},{n * 10**9},100,2" for n in range(40)]
    Path("even.csv").write_text("\n".join(rows) + "\n")
    return "even.csv"


def test_bounds_as_text():
    found = parse_service_level(" ttft.p99<=300, tpot.mean <= 20,tpot<=30,ttft=500,share>=0.95")
    assert found.statistics == (("ttft_ms_p99", 300.0), ("tpot_ms_mean", 20.0))
    assert found.per_request == (("ttft", 500.0), ("tpot", 30.0))
    assert str(found) == "ttft.p99<=300,tpot.mean<=20,ttft<=500,tpot<=30,share>=0.95"
    assert parse_service_level(str(found)) == found
    assert parse_service_level("e2e<=1").share == 0.9


def test_what_holds_and_what_breaks():
    level = parse_service_level("ttft.p99<=300,ttft<=200,tpot<=20")
    row = {"completed": 10, "ttft_ms_p99": 150.0, "goodput_share": 0.92,
           "within_ttft_share": 0.93, "within_tpot_share": 0.98}  # fmt: skip
    assert level.holds(row)
    assert level.breaks(row) == "ttft<=200 for 90%"  # nearest, at 0.9 / 0.92
    assert level.strain(row)["ttft.p99<=300"] == 0.5
    late = {**row, "ttft_ms_p99": 600.0}
    assert (level.holds(late), level.breaks(late)) == (False, "ttft.p99<=300")
    slow = {**row, "goodput_share": 0.4, "within_tpot_share": 0.4}
    assert (level.holds(slow), level.breaks(slow)) == (False, "tpot<=20 for 90%")
    nobody = {**row, "completed": 0, "ttft_ms_p99": None, "goodput_share": 0.0}
    assert not level.holds(nobody)
    assert level.strain(nobody)["ttft.p99<=300"] == inf
    one_token = parse_service_level("tpot.mean<=20")
    assert one_token.holds({"completed": 1, "tpot_ms_mean": None, "goodput_share": 1.0})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be METRIC"), ("ttft", "must be METRIC"), ("ttft<300", "must be METRIC"),
        ("ttft>=300", "must be METRIC"), ("ttft.p95<=300", "must be METRIC"),
        ("queue<=3", "must be METRIC"), ("x.p99<=3", "must be METRIC"),
        ("ttft<=3ms", "a number of ms, without a unit"), ("ttft<=inf", "must be a finite number"),
        ("ttft<=0", "above 0"), ("ttft<=1,ttft=2", "is set twice"),
        ("share>=0", "above 0 and at most 1"), ("share>=0.5,share>=0.6", "is set twice"),
        ("share<=0.5", "must be METRIC"), ("ttft.p99=3", "must be METRIC"),
    ],
)  # fmt: skip
def test_bounds_that_are_none(text, why):
    with pytest.raises(ConfigError, match=why):
        parse_service_level(text)


def test_the_capacity_of_one_seat(even):
    """Prefill, a decode step, and one more in flight when it ends: 0.3 s, so 3.3 a second."""
    found = mdi.capacity(even, slo="ttft.max<=190", tolerance=0.01, start=1.0, **ONE_SEAT)
    (one,) = found.found
    (search,) = one.searches
    assert search.breaks <= search.holds * 1.01
    assert one.rate.mean == pytest.approx(10 / 3, rel=0.02)
    assert one.bound == "ttft.max<=190"
    (sentence,) = found.sentences()
    assert sentence.startswith("fcfs: capacity ")
    assert "(one replicate; the search is within 1.0%)" in sentence
    assert sentence.endswith("bound by ttft.max<=190")
    frame, plan = load_rows(Path("lab/capacity.parquet"))
    assert len(frame) == search.steps == len(plan["loads"])
    # Once more: nothing is run, and the answer is the same.
    again = mdi.capacity(even, slo="ttft.max<=190", tolerance=0.01, start=1.0, **ONE_SEAT)
    assert again.sentences() == found.sentences()


def test_searched_again_nothing_runs(even, monkeypatch):
    options = {"slo": "ttft.max<=190", "tolerance": 0.1, "start": 2.0, **ONE_SEAT}
    first = mdi.capacity(even, **options)
    monkeypatch.setattr(measures, "simulate", lambda *a: pytest.fail("ran"))
    assert mdi.capacity(even, **options).sentences() == first.sentences()
    # Other bounds on statistics need no other runs where the rates are the same.
    assert mdi.capacity(even, **{**options, "slo": "ttft.p99<=190"}).found[0].rate is not None


def test_replicates_and_policies_have_intervals(here):
    found = mdi.capacity("azure-conv", ["fcfs", "lcfs"], slo="ttft<=2000", requests=10, seeds=2,
                         start=4.0, tolerance=0.5, load="arrivals=poisson:{rate}",
                         **{**ONE_SEAT, "scheduler": {**ONE_SEAT["scheduler"],
                            "max_model_len": 16_384, "max_num_seqs": 4}})  # fmt: skip
    first, second = found.found
    assert first.rate.n == second.rate.n == 2
    assert first.rate.low < first.rate.mean < first.rate.high
    assert first.change is None
    assert second.change.n == 2
    sentences = found.sentences()
    assert "2 seeds, each within" in sentences[0]
    assert "against fcfs" in sentences[1]


def test_what_never_holds(even):
    found = mdi.capacity(even, slo="tpot<=50", start=1.0, **ONE_SEAT)
    assert found.found[0].rate is None
    assert found.sentences()[0].startswith("fcfs: tpot<=50,share>=0.9 never holds: at ")
    assert "where requests hardly ever meet, tpot<=50 for 90% is broken" in found.sentences()[0]


def test_what_always_holds(even):
    found = mdi.capacity(even, slo="ttft<=60000", start=1.0, **ONE_SEAT)
    (sentence,) = found.sentences()
    assert "always holds, even when all requests come at once" in sentence
    assert "serve more requests to find a limit" in sentence
    assert found.to_dict()["capacities"][0]["searches"][0]["breaks"] is None


def test_a_search_ends_whatever_the_answers():
    rows = {"requests": 10, "offered_req_s": 1.0, "span_s": 5.0, "e2e_ms_max": 1e6}
    for answer in (True, False):
        search = Search(("", "", ""), 0, 1.0, 0.02)
        while not search.is_over:
            search.learn(answer, "x", rows)
        assert search.reason == ("always" if answer else "never")
        assert search.steps == 80


def test_a_failed_run_ends_the_search_with_its_line(here):
    class Broken(mdi.Policy):
        def order(self, seq, view):
            raise ValueError("no idea")

    with pytest.raises(MiniDeepInferError, match=r"mine at rate=1, seed 0: policy Broken: order"):
        mdi.capacity("azure-conv", {"mine": Broken()}, slo="ttft<=1", requests=5, seeds=1,
                     start=1.0, cost=ONE_SEAT["cost"], ranks=1)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": 0.0}, "start = 0.0: must be"), ({"tolerance": 0}, "tolerance = 0: must be"),
        ({"load": "rate=3"}, "load = 'rate=3': must have {rate}"),
        ({"load": "speed={rate}x"}, "must be a number"),
        ({"seeds": 0}, "seeds = 0"), ({"slo": "nope"}, "slo = 'nope'"),
    ],
)  # fmt: skip
def test_mistakes(even, options, text):
    with pytest.raises(ConfigError, match=text):
        mdi.capacity(even, **{"slo": "ttft<=1", "start": 1.0, **ONE_SEAT, **options})
