"""The page of a lab: question and answer first, the bound below every policy, no name as markup."""

import base64
import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pytest

import minideepinfer as mdi_api
from minideepinfer.lab_page import lab_page
from minideepinfer.lab_result import LabResult

EVIL = "<img src=x onerror=alert(1)>"
FEW = ("azure-conv", "-n", 8, "--load", 20, "--load", 80, "--set", "max_model_len=16384",
       "--set", "num_blocks=200", "--ranks", 1, "--cost", "h200-flash-slice", "--jobs", 1,
       "--seeds", 2)  # fmt: skip


def charts_of(page):
    (data,) = re.findall(r"<script type='text/plain' id='charts'>([^<]*)</script>", page)
    return json.loads(gzip.decompress(base64.b64decode(data)), parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return mdi_api.lab(
        ["azure-conv"], {"fcfs": "fcfs", EVIL: "srpt"}, loads=[20, 80], seeds=2, requests=8,
        out=tmp_path_factory.mktemp("lab"), ranks=1, cost="h200-flash-slice",
        scheduler={"max_model_len": 16_384, "num_blocks": 200},
    )  # fmt: skip


def test_the_answer_comes_first_and_names_are_text(found):
    page = lab_page(found)
    text = page.replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'")
    assert "<h1>Which of 2 policies serves azure-conv best?</h1>" in page
    assert text.index(found.sentence()) < text.index("<section>") < text.index("<details>")
    charts = charts_of(page)
    assert list(charts) == ["change", "load0", "front"]
    assert EVIL not in page
    assert EVIL not in json.dumps(charts)


def test_no_policy_comes_below_the_bound(found):
    assert (found.frame[["e2e_over_bound", "ttft_over_bound", "span_over_bound"]] >= 1).all(
        axis=None
    )
    chart = charts_of(lab_page(found))["load0"]
    *policies, bound = chart["data"]
    assert bound["name"] == "bound"
    assert len(policies) == 2
    for policy in policies:
        assert policy["x"] == ["rate=20", "rate=80"]
        assert all(y >= least for y, least in zip(policy["y"], bound["y"], strict=True))
    labels = [button["label"] for button in chart["layout"]["updatemenus"][0]["buttons"]]
    assert labels[0] == "e2e_ms_mean (ms)"
    assert "e2e_over_bound" in labels


def test_failed_runs_have_a_page(found):
    frame = found.frame.copy()
    frame.loc[:, "error"] = "does <b>not</b> run"
    numbers = frame.select_dtypes("number").columns.difference(["seed", "wall_s"])
    frame[numbers] = frame[numbers].astype(float) * float("nan")
    page = lab_page(LabResult(pd.DataFrame(frame), found.plan))
    assert "does &lt;b&gt;not&lt;/b&gt; run" in page
    charts_of(page)


def test_the_command_writes_it(mdi):
    done = mdi("lab", *FEW, "--policy", "fcfs", "--policy", "srpt", "--html", "pages/lab.html")
    assert done.code == 0, done.err
    assert "wrote pages/lab.html" in done.err
    assert "Over load: azure-conv" in Path("pages/lab.html").read_text(encoding="utf-8")
    done = mdi("lab", *FEW, "--html", "lab.txt")
    assert done.code != 0
    assert "html = " in done.err
