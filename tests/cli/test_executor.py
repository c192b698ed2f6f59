"""The verbs that run the real model, on a tiny checkpoint the tests make."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_shared.run_description import RunDescription
from mdi_traces.run import load_run
from minideepinfer.cli import run_command

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = ["--set", "max_model_len=512", "--set", "kv_cache_memory_gb=0.1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert run_command(["make-checkpoint", str(made), "--seed", "3"]) == 0
    return str(made)


def test_make_checkpoint_refuses_a_folder_that_holds_something(checkpoint, capsys):
    assert run_command(["make-checkpoint", checkpoint]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert checkpoint in line


def test_generate_from_text_and_ids_is_repeatable(checkpoint, capsys):
    documents = []
    for _ in range(2):
        arguments = ["generate", checkpoint, "Hello", "--ids", "100,200,300", "--max-tokens", "3"]
        assert run_command([*arguments, "--ignore-eos", "--json", *SMALL]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]
    first, second = documents[0]["outputs"]
    assert second["prompt_token_ids"] == [100, 200, 300]
    assert [len(output["token_ids"]) for output in (first, second)] == [3, 3]
    assert all(logprob <= 0 for logprob in first["logprobs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "CHECKPOINT"], "give at least one text, or --ids"),
        (["generate", "CHECKPOINT", "--ids", "1,x"], "must be whole numbers"),
        (["generate", "CHECKPOINT", "--ids", "5000"], "must be an int from 0 to 1023"),
        (["generate", "CHECKPOINT", "a", "--temperature", "-1"], "temperature = -1.0"),
        (["generate", "CHECKPOINT", "a", "--set", "max_seqs=3"], "did you mean max_num_seqs?"),
        (["generate", "nowhere/at-all", "a"], "checkpoint = 'nowhere/at-all'"),
        (["record", "CHECKPOINT", "azure-conv", "--out", "r", "--max-prompt", "0"], "max_prompt"),
        (["record", "CHECKPOINT", "no-such", "--out", "r"], "no-such"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, message, checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_command([checkpoint if a == "CHECKPOINT" else a for a in arguments]) == 2
    (line,) = [ln for ln in capsys.readouterr().err.splitlines() if ln.startswith("error: ")]
    assert message in line


def test_record_check_retrace_and_replay(checkpoint, capsys, tmp_path):
    real, again = tmp_path / "real", tmp_path / "again"
    sizes = ["--max-prompt", "40", "--max-output", "3", *SMALL]
    record = ["record", checkpoint, "azure-conv", "-n", "8", "--rate", "50", "--out", str(real)]
    assert run_command([*record, *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["requests"]["completed"] == 8
    assert run_command(["check", str(real)]) == 0
    capsys.readouterr()
    assert run_command(["show", str(real), "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["step_times_ms"]
    assert {"cpu_sched_ms", "cpu_prep_ms", "cpu_launch_ms", "fwd_ms"} <= set(times["decode"])
    assert times["prefill"]["ingress_ms"] > 0
    assert run_command(["retrace", str(real), "--json", "--out", str(tmp_path / "sim")]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]["identical"] is True
    assert (tmp_path / "sim.requests.parquet").exists()
    replay = ["replay", checkpoint, str(real), "--speed", "4", "-o", str(again), *SMALL[:2]]
    assert run_command([*replay, "--kv-cache-memory-gb", "0.1", "--limit", "4", "--json"]) == 0
    found = load_run(again).metadata
    served = RunDescription.from_metadata(found.config, found.seed).served
    assert (served.trace, served.limit, served.speed) == (str(real), 4, 4.0)


def test_retrace_says_when_a_decision_differs(checkpoint, capsys, tmp_path):
    """Other options than the recorded ones make other plans, and the verb notices."""
    from dataclasses import replace

    from mdi_traces.run import Run, load_run

    real = tmp_path / "real"
    record = ["record", checkpoint, "azure-conv", "-n", "6", "--rate", "100", "--out", str(real)]
    assert run_command([*record, "--max-prompt", "60", "--max-output", "3", *SMALL]) == 0
    run = load_run(real)
    scheduler = {**run.metadata.config["scheduler"], "max_num_batched_tokens": 32,
                 "max_num_seqs": 2}  # fmt: skip
    config = {**run.metadata.config, "scheduler": scheduler}
    forged = Run(run.steps_table, run.requests_table, replace(run.metadata, config=config),
                 run.items_table)  # fmt: skip
    forged.save(tmp_path / "forged")
    capsys.readouterr()
    assert run_command(["retrace", str(tmp_path / "forged")]) == 1
    found = capsys.readouterr()
    assert found.out.startswith("the decisions differ: after ")
    assert found.err == ""
