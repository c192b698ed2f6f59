"""The GPU benchmarks and the recorder, tried out on a CPU with the tiny model: do they run, and
does what they print hold together?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mdi_sim.replay import replay_recorded
from mdi_traces.run import load_run

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
TINY = ("--device", "cpu", "--preset", "tiny")


def run(script, *arguments) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def document(script, *arguments) -> dict:
    return json.loads(run(script, *TINY, *arguments).splitlines()[-1])


def test_prefill_adds_its_layers_up(tmp_path):
    out = tmp_path / "made" / "prefill.json"
    found = document("bench_prefill.py", "--context", 256, "--new", 16, "--steps", 2,
                     "--warmup", 1, "--out", out)  # fmt: skip
    assert json.loads(out.read_text()) == found
    parts = {row["part"]: row for row in found["parts"]}
    whole = sum(row["ms"] * row["in model"] for row in parts.values())
    assert found["implied"]["step_ms"] == pytest.approx(whole)
    assert found["implied"]["step_ms"] == pytest.approx(found["median_wall_ms"], rel=0.5)
    assert {"window", "source r2", "reuse r2", "candidate source r1", "re-index r1", "reuse r1",
            "engram"} <= set(parts)  # fmt: skip
    assert {"device", "torch", "tilelang", "commit", "date"} <= set(found["conditions"])


def test_decode_counts_the_experts_of_its_routing():
    found = document("bench_decode.py", "--batches", 1, 2, "--contexts", 128, "--steps", 1)
    one, two = found["steps"]
    assert one["experts"] == 3  # of one token
    assert 3 <= two["experts"] <= 6
    assert one["GB read"] < two["GB read"]
    assert all(row["how"] == "eager" and row["floor ms"] > 0 for row in found["steps"])


def test_every_op_runs_and_agrees_with_itself():
    found = document("bench_ops.py", "--context", 256, "--rows", 16, "--quick")
    assert set(found["tables"]) == {"prefill", "decode 64", "decode 1"}
    for table in found["tables"].values():
        ops = {row["op"] for row in table}
        assert {"matmul", "quantised_gemm", "expert_gemm", "sparse_attention"} <= ops
        assert all(row["ms"] is not None for row in table), "an op failed"
        assert {row["error"] for row in table} <= {None, 0.0}
        assert {row["kernel"] for row in table} == {"no"}


def test_turns_are_made_of_their_parts():
    lines = run("bench_turns.py", "--batches", 1, 3, "--context", 100, "--steps", 60,
                "--chunk", 64, "--max-model-len", 256).splitlines()  # fmt: skip
    rows = json.loads(lines[-1])["turns"]
    assert [(row["step"], row["rows"]) for row in rows] == [
        ("decode", 1), ("decode", 3), ("prefill chunk", 64)
    ]  # fmt: skip
    for row in rows:
        parts = [row["inputs us"], row["packing us"], row["rest us"]]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["turn us"])


def test_recorded_runs_are_small_say_what_they_are_and_retrace(tmp_path):
    run("record_h200.py", "tiny", "--device", "cpu", "--sizes", "small", "--seconds", 1,
        "--out", tmp_path, "--campaigns", "decode", "online")  # fmt: skip
    for name in ("decode", "online_low", "online_high"):
        sizes = [path.stat().st_size for path in tmp_path.glob(f"{name}.*.parquet")]
        assert len(sizes) == 3
        assert sum(sizes) <= 2_000_000
        real = load_run(tmp_path / name)
        about = real.metadata.config["provenance"]
        assert about["workload"] == name
        assert {"device", "commit", "date", "command", "torch"} <= set(about)
        plans = ["kind", "n_seqs", "n_tokens", "sum_k"]
        assert replay_recorded(real).steps[plans].equals(real.steps[plans])
