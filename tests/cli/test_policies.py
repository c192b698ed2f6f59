"""`--policy`: named once, told, kept in the run, and repeated from there."""

import json
from pathlib import Path

import pytest

from minideepinfer import load_run
from minideepinfer.commands.values import read_description

SPEC = "order=shortest_prompt+victim=newest"


def requests(*rows):
    """Write a trace of (prompt, client); all come at once."""
    lines = [json.dumps({"arrival_ns": 0, "prompt_len": prompt, "output_len": 5, "client": client})
             for prompt, client in rows]  # fmt: skip
    Path("t.jsonl").write_text("\n".join(lines) + "\n")
    return "t.jsonl", "--model", "tiny"


def first_tokens(prefix):
    """Requests in the order of their first tokens."""
    frame = load_run(prefix).requests
    return frame.sort_values(["t_first_token", "req_id"])["req_id"].tolist()


def test_a_policy_decides_is_told_and_is_repeated_from_the_run(mdi):
    work = requests((900, "a"), (900, "a"), (20, "b"), (30, "b"))
    seats = ("--set", "max_num_seqs=1")
    assert mdi("simulate", *work, *seats, "--out", "plain").code == 0
    done = mdi("simulate", *work, *seats, "--policy", SPEC, "--out", "r", "--json")
    assert json.loads(done.out)["summary"]["policy"] == SPEC
    assert first_tokens("plain") == ["0", "1", "2", "3"]
    assert first_tokens("r") == ["2", "3", "0", "1"]
    assert load_run("r").metadata.config["policy"] == SPEC
    assert load_run("r").requests["predicted_len"].tolist() == [5] * 4
    assert read_description(Path("r")).policy == SPEC
    again = mdi("simulate", "--config", "r", "--out", "again")
    assert f"scheduling policy: {SPEC}" in again.out
    assert "identical" in mdi("compare", "r", "again").out
    assert mdi("retrace", "r").code == 0
    back = mdi("simulate", "--config", "r", "--policy", "fcfs", "--out", "back")
    assert "scheduling policy" not in back.out
    assert "identical" in mdi("compare", "plain", "back").out


def test_a_policy_in_a_file_of_options(mdi):
    work = requests((900, "a"), (20, "b"))
    Path("o.toml").write_text('[simulate]\npolicy = "lcfs"\n')
    assert "scheduling policy: lcfs" in mdi("simulate", *work, "--config", "o.toml").out


def test_columns_for_policies_are_unused_without_one(mdi):
    work = requests((20, "a"), (30, "b"))
    assert "note: client of the trace: kept" in mdi("simulate", *work).out
    assert "note:" not in mdi("simulate", *work, "--policy", "vtc").out


@pytest.mark.parametrize(("spec", "says"), [
    ("spf", "error: policy = 'spf': 'spf' is not a policy; known: fcfs, lcfs, "),
    ("srpt:x=1", "error: policy = 'srpt:x=1': 'x' is not a parameter of srpt; it takes: sigma"),
    ("srpt:sigma=-1", "error: policy parameter sigma = -1.0: must be at least 0"),
])  # fmt: skip
def test_a_bad_specification_is_one_line(mdi, spec, says):
    done = mdi("simulate", *requests((20, "a")), "--policy", spec)
    assert done.code != 0
    assert done.err.startswith(says)
    assert len(done.err.splitlines()) == 1


def test_strict_mode_takes_no_policy(mdi):
    strict = ("--set", "strict_upstream=true")
    done = mdi("simulate", *requests((20, "a")), "--policy", "lcfs", *strict)
    assert "policy = 'lcfs': contradicts strict_upstream" in done.err
