"""The comparison with peers runs our ops with arguments that reach their kernels; no GPU needed."""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang", reason="kernels are written in TileLang, which is not installed")

from mdi_exec.ops.kernels.jit import collecting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_what_is_compared_runs_on_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = importlib.import_module("peers")
    monkeypatch.setattr(peers, "_module", lambda name: None)  # peers cannot do without a device
    makers = (peers.dense_products, peers.attention, peers.index_scores, peers.experts,
              peers.hyper_connections)  # fmt: skip
    found = {}
    with collecting("sm_90a") as samples, torch.inference_mode():
        for make in makers:
            for contest in make(4096, torch.device("meta")):
                samples.clear()
                assert contest.ways[0].who == "ours"
                contest.ways[0].call()
                found.setdefault(contest.op, {sample.builder.__name__ for sample in samples})
                assert contest.num_bytes > 0
    assert found.pop("coefficients") == {"hc_project", "hc_finish_tokens"}
    assert found == {
        **{op: {"dense_gemm"} for op in peers.DENSE}, "wq_a": {"gemm", "add_parts_program"},
        "attention": {"staged_attention_program"},
        "index scores": {"index_scores_program"}, "experts": {"expert_program"},
        "streams written": {"hc_write_rows"},
    }  # fmt: skip
