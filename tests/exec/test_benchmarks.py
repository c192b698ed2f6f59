"""The GPU benchmarks and the recorder, tried out on a CPU with the tiny model: do they run, and
does what they print hold together?"""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mdi_exec.weights.presets import layer_kinds
from mdi_exec.weights.source import random_config
from mdi_shared.errors import TraceError
from mdi_sim.retrace import replay_recorded
from mdi_traces.run import load_run

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
TINY = ("--device", "cpu", "--preset", "tiny")


def attempt(script, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def run(script, *arguments) -> str:
    done = attempt(script, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def document(script, *arguments) -> dict:
    return json.loads(run(script, *TINY, *arguments).splitlines()[-1])


def table(file) -> list[dict]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_prefill_adds_its_layers_up(tmp_path):
    out = tmp_path / "made" / "prefill.json"
    found = document("bench_prefill.py", "--context", 256, "--new", 16, "--steps", 2,
                     "--warmup", 1, "--out", out)  # fmt: skip
    assert json.loads(out.read_text()) == found
    assert {"device", "torch", "tilelang", "commit", "date"} <= set(found["conditions"])
    (alone,) = found["prefill"]
    assert found["decode"] == []  # asked for over ranks only
    parts = {row["part"]: row for row in alone["parts"]}
    whole = sum(row["ms"] * row["in model"] for row in parts.values())
    assert alone["implied"]["step_ms"] == pytest.approx(whole)
    kinds = [kind.removesuffix("+engram") for kind in layer_kinds(random_config("tiny"))]
    counted = {part: row["in model"] for part, row in parts.items()}
    assert {kind: kinds.count(kind) for kind in kinds}.items() <= counted.items()
    assert counted["engram"] == 2
    assert alone["sent_bytes"] == alone["exchange_ms"] == 0


def test_prefill_over_ranks_has_both_exchanges_and_one_gpu(tmp_path):
    found = document("bench_prefill.py", "--ranks", 2, "--context", 64, "--new", 8, "--steps", 2,
                     "--warmup", 0, "--decode-batch", 2, "--decode-context", 32,
                     "--decode-steps", 1, "--out-dir", tmp_path)  # fmt: skip
    gathered, routed, alone = found["prefill"]
    assert [way["n_gpus"] for way in found["prefill"]] == [2, 2, 1]
    assert gathered["sent_bytes"] > routed["sent_bytes"] > alone["sent_bytes"] == 0
    for way in (gathered, routed):
        assert [rank["rank"] for rank in way["ranks"]] == [0, 1]
        assert 0 < way["collectives_ms"] < way["exchange_ms"] < way["mean_ms"]
    records = json.loads((tmp_path / "bench_prefill.json").read_text())
    assert [(r["ep"], r["dp"]) for r in records] == [(2, 2), (2, 2), (1, 1)]
    assert {record["cached"] for record in records} == {56}
    for record in records:
        assert record["mean_ms"] == pytest.approx(sum(record["step_ms"]) / 2)
        speeds = [1e3 * 8 / rank["mean_ms"] for rank in record["ranks"]]
        assert record["input_tok_s_gpu"] == pytest.approx(sum(speeds) / 2)
    rows = table(tmp_path / "pareto.csv")
    assert [row["phase"] for row in rows].count("prefill") == 3
    decode = [row for row in rows if row["phase"] == "decode"]
    assert [row["n_gpus"] for row in decode] == ["2", "2", "1"]
    assert all(float(row["y"]) == pytest.approx(2 * float(row["x"]), rel=1e-4) for row in decode)
    assert (tmp_path / "pareto.png").stat().st_size > 10_000


def test_ranks_that_cannot_share_the_experts_are_refused_in_one_line():
    done = attempt("bench_prefill.py", *TINY, "--ranks", 5)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: data_parallel_size = 5: must divide the model's")


def test_pareto_points_measured_again_take_their_place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pareto = importlib.import_module("pareto")
    one = pareto.Point("decode", "one GPU", 100.0, 800.0, 1, "batch 8")
    two = one._replace(config="batch 16", x=80.0)
    pareto.add_points(tmp_path, [one, two])
    pareto.add_points(tmp_path, [one._replace(y=900.0)])
    rows = table(tmp_path / "pareto.csv")
    assert [(row["x_name"], row["x"], row["y_name"], row["y"]) for row in rows] == [
        ("tok_s_user", "100", "output_tok_s_gpu", "900"),
        ("tok_s_user", "80", "output_tok_s_gpu", "800"),
    ]
    (tmp_path / "pareto.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match=r"pareto.csv.*has columns a, b; must be phase"):
        pareto.add_points(tmp_path, [one])
    assert (tmp_path / "pareto.csv").read_text() == "a,b\n1,2\n"


def test_decode_counts_the_experts_of_its_routing(tmp_path):
    found = document("bench_decode.py", "--batches", 1, 2, "--contexts", 128, "--steps", 1,
                     "--out-dir", tmp_path)  # fmt: skip
    one, two = found["steps"]
    assert one["experts"] == 3  # of one token
    assert 3 <= two["experts"] <= 6
    assert one["GB read"] < two["GB read"]
    assert all(row["how"] == "eager" and row["floor ms"] > 0 for row in found["steps"])
    points = table(tmp_path / "pareto.csv")
    assert [row["label"] for row in points] == 2 * ["one GPU, eager, context 128"]
    speeds = [float(row["y"]) for row in points]
    assert speeds == pytest.approx([row["tokens/s"] for row in found["steps"]], rel=1e-4)


def test_every_op_runs_and_agrees_with_itself():
    found = document("bench_ops.py", "--context", 256, "--rows", 16, "--quick")
    assert set(found["tables"]) == {"prefill", "decode 64", "decode 1"}
    for table in found["tables"].values():
        ops = {row["op"] for row in table}
        assert {"matmul", "quantised_gemm", "expert_gemm", "sparse_attention"} <= ops
        assert all(row["ms"] is not None for row in table), "an op failed"
        assert {row["error"] for row in table} <= {None, 0.0}
        assert {row["kernel"] for row in table} == {"no"}


def test_attention_alone_counts_staging():
    lines = run("bench_attention.py", "--device", "cpu", "--rows", 4, "--entries", 600).splitlines()
    rows = json.loads(lines[-1])["table"]
    assert [(row["selection"], row["attention"]) for row in rows] == [
        ("random", "pools"), ("random", "staged"), ("near", "pools"), ("near", "staged")
    ]  # fmt: skip
    for row in rows:
        assert (row["all in ms"] > row["ms"]) == (row["attention"] == "staged")


def test_index_ops_are_timed_for_a_prompt_and_for_sequences():
    options = ("--device", "cpu", "--rows", 4, "--entries", 256, "--sequences", 2)
    rows = json.loads(run("bench_index.py", *options).splitlines()[-1])["table"]
    assert [row["rows"] for row in rows] == [4] * 5 + [2] * 5
    for row in rows:
        assert (row["TFLOP/s"] is None) == ("scores" not in row["op"])


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
        "--most-seconds", 2, "--out", tmp_path, "--campaigns", "decode", "online")  # fmt: skip
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
