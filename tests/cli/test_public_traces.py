"""Real traces through the command line; they are looked for in MDI_PUBLIC_TRACES."""

import json

import pytest

OPTIONS = {
    "azure_conv_2023.csv": (),
    "azure_code_2023.csv": (),
    "mooncake_conversation.jsonl": (),
    "mooncake_synthetic.jsonl": (),
    "burstgpt_format_sample.csv": (),
    "arxiv_summarization_lengths.csv": ("--arrivals", "poisson:1"),
    "sharegpt_lengths_300.csv": (),
    "tracelab_example_round_trace.jsonl": (),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_public_traces_are_checked_shown_and_simulated(mdi, public_traces, name):
    checked = mdi("check", public_traces / name, *OPTIONS[name])
    assert checked.code == 0, checked.err
    shown = json.loads(mdi("show", public_traces / name, *OPTIONS[name], "--json").out)
    assert shown["rows"] > 0
    done = mdi("simulate", public_traces / name, *OPTIONS[name], "--limit", 20, "--json",
               "--set", "max_model_len=262144", "--out", "r")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["summary"]["requests"]["total"] == min(20, shown["rows"])
    assert mdi("check", "r").code == 0
