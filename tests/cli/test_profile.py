"""`mdi profile` on a CPU, with the tiny model."""

import json

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from minideepinfer.cli import run_command

SMALL = ["--prefill", "6", "--decode", "2", "--context", "40"]
PARTS = {
    "attention", "coefficients", "compressor", "embedding", "engram", "head", "index", "output",
    "queries", "routed experts", "router", "shared expert", "streams read", "streams written",
    "the rest", "window",
}  # fmt: skip


def test_a_profile_accounts_for_every_kernel(tmp_path, capsys):
    file = tmp_path / "trace.json"
    arguments = ["profile", "random:tiny", *SMALL, "--perfetto", str(file), "--json"]
    assert run_command(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["step"]["rows"] for step in found["steps"]] == [6, 1]
    for step in found["steps"]:
        parts = {part["part"]: part for part in step["parts"]}
        assert set(parts) == PARTS
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
        # What lies outside of all parts is little: nothing of a layer has been forgotten.
        assert parts["the rest"]["share"] < 0.2
        assert {part for part, row in parts.items() if row["floor_ms"] is None} == {
            "embedding", "streams read", "the rest"
        }  # fmt: skip
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert {"layer 0", "layer 11", "routed experts", "aten::mm"} <= set(names)
    assert names.count("decode of 2 sequences at context 40") == 1
    assert names.count("process_name") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "5000"], "context = 5000: must be from 2 to the model's 4,096"),
        (["--context", "32", "--prefill", "33"], "prefill = 33: must be 0, or from 2"),
        (["--prefill", "0", "--decode", "0"], "decode = 0: must be at least 0, or 1"),
        (["--perfetto", "trace.txt"], "perfetto = 'trace.txt'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert run_command(["profile", "random:tiny", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
