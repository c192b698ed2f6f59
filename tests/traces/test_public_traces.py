"""The public traces as they are: counts and statistics."""

import numpy as np
import pytest

from mdi_traces.columns import ints
from mdi_traces.distributions import Poisson
from mdi_traces.formats import load_requests
from mdi_traces.generate import PUBLISHED

ROWS = {
    "azure-conv": ("azure_conv_2023.csv", 19_366),
    "azure-code": ("azure_code_2023.csv", 8_819),
    "mooncake-conversation": ("mooncake_conversation.jsonl", 12_031),
    "mooncake-synthetic": ("mooncake_synthetic.jsonl", 3_993),
    "arxiv": ("arxiv_summarization_lengths.csv", 28_257),
    "sharegpt": ("sharegpt_lengths_300.csv", 300),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_statistics_are_the_published_ones(name, public_traces):
    file, rows = ROWS[name]
    arrivals = Poisson(1.0) if name == "arxiv" else None
    trace = load_requests(public_traces / file, arrivals=arrivals)
    assert len(trace) == rows
    for column, stats in zip(("prompt_len", "output_len"), PUBLISHED[name], strict=True):
        lengths = ints(trace.table[column])
        assert lengths.mean() == pytest.approx(stats.mean, abs=0.51)
        ranked = np.sort(lengths)
        for share, quantile in ((0.5, stats.p50), (0.9, stats.p90), (0.99, stats.p99)):
            assert ranked[int(share * rows)] == quantile
        assert lengths.max() == stats.longest


def test_mooncake_prefix_blocks_cover_the_prompt(public_traces):
    trace = load_requests(public_traces / ROWS["mooncake-conversation"][0])
    blocks = trace.table["hash_ids"].combine_chunks().value_lengths().to_pylist()
    expected = -(-ints(trace.table["prompt_len"]) // trace.metadata.hash_block_size)
    assert blocks == expected.tolist()
    assert sum(blocks) == pytest.approx(288_500, abs=100)


def test_burstgpt_sample(public_traces):
    trace = load_requests(public_traces / "burstgpt_format_sample.csv")
    assert len(trace) == 40
    assert trace.metadata.notes == ("2 failed calls left out",)


def test_tracelab_example(public_traces):
    trace = load_requests(public_traces / "tracelab_example_round_trace.jsonl")
    assert len(trace) == 19
    prompt, cached = ints(trace.table["prompt_len"]), ints(trace.table["cached_len"])
    assert cached.sum() / prompt.sum() == pytest.approx(0.92, abs=0.01)
    think = dict(zip(trace.table["req_id"].to_pylist(), trace.table["think_ns"].to_pylist(),
                     strict=True))  # fmt: skip
    claude = "claude:92ee5b8a-429c-e80b-5db6-5381512f4697"
    assert think[f"{claude}/0"] is None
    assert think[f"{claude}/1"] == 19_291_000_000  # the web search, not the shell before it
    assert think[f"{claude}/5"] == 19_913_000_000  # a person
