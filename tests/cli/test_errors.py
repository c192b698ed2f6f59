"""Mistakes: one line on standard error, never a traceback, and the right exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import minideepinfer.simulated

HEADER = "arrival_ns,prompt_len,output_len\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("simulate",), "give a request trace, or --workload PRESET"),
        (("simulate", "no.csv"), "path = 'no.csv': no such file"),
        (("simulate", "."), "is a folder"),
        (("simulate", "--workload", "nope"), "azure-conv, azure-code"),
        (("simulate", "no.csv", "--workload", "sharegpt"), "contradicts the trace"),
        (("simulate", "no.csv", "-n", "2"), "requests = 2: belongs to a workload"),
        (("simulate", "no.csv", "--rate", "2", "--arrivals", "burst"), "rate = 2.0: contradicts"),
        (("simulate", "--workload", "sharegpt", "--limit", "2"), "limit = 2: belongs to a trace"),
        (("simulate", "--workload", "sharegpt", "--closed-loop"), "has no sessions"),
        (("simulate", "--nope"), "No such option: --nope"),
        (("simulate", "--ranks", "two"), "Invalid value for '--ranks'"),
        (("nope",), "No such command 'nope'"),
        (("show",), "Missing argument"),
        (("check", "--format", "x", "no.csv"), "no such file"),
        (("convert", "no.csv", "out.txt"), "must end in .parquet, .jsonl, .csv"),
        (("convert", "no.csv", "no.csv/out.csv"), "no such file"),
        (("compare", "a", "b"), "no such file"),
        (("generate-workload", "azure-conv"), "give a preset and a file to write"),
        (("generate-workload", "nope", "x.csv"), "must be one of azure-conv"),
        (("generate-workload", "azure-conv", "x.csv", "-n", "0"), "requests = 0"),
    ],
)
def test_wrong_questions(fails, arguments, says):
    assert says in fails(2, *arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "big"), "model = 'big': must be one of v41-flash, tiny"),
        (
            ("--hardware", "tpu"),
            "must be one of h100, h200, b200, b300, or a file",
        ),
        (("--placement", "x"), "placement = 'x': 'x' is not a placement; known: round_robin"),
        (("--ranks", "0"), "ranks = 0: must be at least 1"),
        (("--ranks", "3"), "ep"),  # does not divide the experts
        (("--draft-accept-rate", "2", "--set", "num_draft_tokens=1"), "must be between 0 and 1"),
        (("--until", "0"), "until_s = 0.0: must be above 0"),
        (("--speed", "0"), "speed = 0.0: must be a finite number above 0"),
        (("--rate", "-1"), "rate = -1.0: must be a finite number above 0"),
        (("--arrivals", "often"), "arrivals = 'often': must be one of poisson:rate"),
        (("--slo", "ttft=-1"), "ttft_ms = -1.0"),
        (("--slo-ttft-ms", "9"), "No such option: --slo-ttft-ms; it is --slo ttft=MS"),
        (("--png", "x.png"), "No such option: --png; it is --plots FOLDER"),
        (("--cost", "no.json"), "cost model = 'no.json': cannot be read"),
        (("--cost", "no.json", "--ep", "2"), "ep = 2: belongs to the roofline"),
        (("--cost", "no-such"), "must be a file FILE.json, or one of h200-flash-slice"),
        (("--kv-cache-memory-gb", "1", "--set", "kv_cache_memory_gb=1"), "is set twice"),
        (("--hardware", "no.json"), "hardware = 'no.json': cannot be read"),
        (("--perfetto", "r.txt"), "must end in .json, .json.gz"),
        (("--set", "max_num_seq=1"), "did you mean max_num_seqs?"),
        (("--set", "max_num_seqs"), "must be key=value"),
        (("--set", "max_num_seqs=1.5"), "max_num_seqs = '1.5': must be a whole number"),
        (("--set", "max_num_seqs=none"), "must be a whole number"),
        (("--set", "enable_zos=1"), "must be true or false"),
        (("--set", "state_slot_ratio=nan"), "must be a number"),
        (("--set", "max_num_batched_tokens=x"), "must be a whole number or none"),
        (("--set", "max_num_seqs=0"), "max_num_seqs = 0: must be at least 1"),
        (("--set", "max_num_seqs=1000000000"), "must be between 1 and 65,536"),
        (("--set", "num_blocks=1000000000000"), "must be between 2 (block 0 is reserved) and 16,7"),
        (("--set", "state_slot_ratio=1e9"), "must be between 1.0 and 100.0 slots per seat"),
        (("--set", "context_parallel_size=5000"), "context_parallel_size = 5000: must be at most"),
        (("--draft-accept-rate", "0.5"), "draft_accept_rate = 0.5: changes nothing without"),
        (("--speed", "1e-12"), "speed = 1e-12: moves arrival_ns of the trace beyond"),
        (("--set", "lookahead=1", "--set", "lookahead=2"), "is set twice"),
        (("--set", "num_blocks=100"), "the KV pool is too small for one request"),
        (("--kv-cache-memory-gb", "0.001"), "the KV pool is too small for one request"),
        (("--kv-cache-memory-gb", "nan"), "must be a finite number above 0"),
        (("--kv-cache-memory-gb", "1", "--set", "num_blocks=9999"), "contradicts num_blocks"),
        (("--config", "no.toml"), "cannot be read"),
    ],
)
def test_wrong_options(fails, small, arguments, says):
    assert says in fails(2, "simulate", *small, *arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[schedule]\n", "c.toml: schedule = {}: unknown table; known: [scheduler], [simulate]"),
        ("ranks = 2\n", "c.toml: ranks = 2: unknown table"),
        ("[simulate]\nrank = 2\n", "unknown option; did you mean ranks? known: "),
        ("[simulate]\njson = true\n", "unknown option"),
        ("[simulate]\nranks = 2.5\n", "c.toml: simulate.ranks = 2.5: must be a whole number"),
        ("[simulate]\nranks = true\n", "must be a whole number"),
        ("[simulate]\nspeed = inf\n", "simulate.speed holds inf, must be a finite number"),
        ("[scheduler]\nenable_zos = 1\n", "scheduler.enable_zos = 1: must be true or false"),
        ("[scheduler\n", "is not TOML"),
    ],
)
def test_wrong_configuration_files(fails, small, text, says):
    Path("c.toml").write_text(text)
    assert says in fails(2, "simulate", *small, "--config", "c.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEADER, "holds no requests"),
        (HEADER + "0,10,5\n1,nan,5\n", "trace.csv, row 3, column 'prompt_len'"),
        (HEADER + "0,10,0\n", "row 2, column 'output_len': 0 must be at least 1 token"),
        ("what,is,this\n1,2,3\n", "is in no known format"),
        ("", "is empty"),
    ],
)
@pytest.mark.parametrize("verb", [("simulate",), ("show",), ("convert", "out.csv")])
def test_broken_traces(fails, text, says, verb):
    Path("trace.csv").write_text(text)
    assert says in fails(1, verb[0], "trace.csv", *verb[1:])
    assert not Path("out.csv").exists()


def test_a_nan_length_in_parquet_is_named(fails):
    columns = {"arrival_ns": [0, 1], "prompt_len": [8.0, float("nan")], "output_len": [1, 1]}
    pq.write_table(pa.table(columns), "t.parquet")
    assert "column 'prompt_len'" in fails(1, "simulate", "t.parquet")


def test_a_damaged_run_is_named(mdi, fails, run_r):
    whole = Path("r.steps.parquet").read_bytes()
    Path("r.steps.parquet").write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut off" in fails(1, "show", "r")
    assert "damaged or cut off" in fails(1, "compare", "r", "r")
    done = mdi("check", "r")
    assert done.code == 2
    assert "damaged or cut off" in done.err


def test_without_arguments_the_help_is_shown(mdi):
    done = mdi()
    assert done.code == 2
    assert "generate-workload" in done.out


@pytest.mark.parametrize("folder", ["f", "f/plots", "f/new/plots"])
def test_plots_cannot_lie_under_a_file(fails, folder, small):
    Path("f").write_text("kept")
    assert "is a file" in fails(2, "simulate", *small, "--plots", folder)
    assert Path("f").read_text() == "kept"


SAVE_AND_DIE = """
import os, signal
import mdi_traces.io as io
from minideepinfer.cli import run_command
write, calls = io.pq.ParquetWriter.write_table, []
def dying(*arguments, **options):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments, **options)
io.pq.ParquetWriter.write_table = dying
run_command("simulate --model tiny --workload azure-conv -n 7 --out r".split())
"""


def test_a_kill_during_save_leaves_the_old_run(mdi, run_r):
    before = {path.name: path.read_bytes() for path in Path().glob("r.*")}
    assert len(before) == 3
    done = subprocess.run([sys.executable, "-c", SAVE_AND_DIE], check=False)
    assert done.returncode == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in Path().glob("r.*")} == before
    assert mdi("check", "r").code == 0


def test_a_failed_save_leaves_the_old_run(mdi, run_r, small, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = mdi("simulate", *small, "-n", 3, "--out", "r")
    assert done.code == 2
    assert "No space left on device" in done.err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_an_interrupt_is_one_line_and_writes_nothing(mdi, small, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(minideepinfer.simulated, "simulate", interrupted)
    done = mdi("simulate", *small, "--out", "r")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")
    assert list(Path().iterdir()) == []


SAY_WHEN = """
import sys
import minideepinfer.simulated as simulated
from minideepinfer.cli import main
simulation = simulated.run_simulation
def started(*arguments, **options):
    print("started", file=sys.stderr, flush=True)
    return simulation(*arguments, **options)
simulated.run_simulation = started
main()
"""


def test_ctrl_c_in_the_middle_of_a_simulation(tmp_path):
    options = "simulate --workload azure-conv -n 50000 --no-fast-forward --out r"
    child = subprocess.Popen(
        [sys.executable, "-c", SAY_WHEN, *options.split()],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        # A shell's background jobs ignore interrupts, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stderr.readline() == "started\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_AT = """
import os, signal, sys
class Interrupter:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
from minideepinfer.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "minideepinfer.cli", "minideepinfer.commands.show"])
def test_ctrl_c_while_mdi_starts_is_quiet(tmp_path, module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT.format(module=module), "show", "x"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_record_needs_a_place_for_its_run(fails):
    assert "Missing option '--out'" in fails(2, "record", "tiny", "azure-conv")


def test_a_deadlock_is_an_answer(fails):
    """Only the upstream rules can deadlock: two prompts that each hold what the other needs."""
    rows = [{"arrival_ns": 0, "prompt_len": 100, "output_len": 120} for _ in range(4)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"strict_upstream": "true", "block_size": 16, "num_blocks": 20, "max_num_seqs": 4,
               "max_model_len": 250, "max_num_batched_tokens": 32, "chunked_prefill": "true",
               "enable_zos": "true"}  # fmt: skip
    pairs = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    assert fails(1, "simulate", "t.jsonl", "--model", "tiny", *pairs).startswith("deadlock: ")
