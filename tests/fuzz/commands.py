"""`mdi` with random options: an answer or one line, and the exit code that the docs name.

Every verb and every option that it declares, with values, paths and files as in `values.py`, in
this process. One case in 40 is a process of its own: without a standard output, into a full disk,
into a pipe that nobody reads, or interrupted.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import typer

from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.shape import TINY
from mdi_sim.simulate import simulate
from mdi_traces import generate_workload
from mdi_traces.formats import files
from minideepinfer.cli import make_app, run_command
from minideepinfer.commands import VERBS
from tests.fuzz.suite import MOST_LINE_BYTES, drawn, one_line
from tests.fuzz.values import value

CHECKPOINT = Path(__file__).parent.parent / "golden" / "tiny"
OFTEN = ("simulate", "show", "check", "compare", "convert", "generate-workload", "retrace")
SELDOM = ("calibrate", "accuracy", "transfer", "tune", "lab", "capacity", "generate", "record",
          "replay", "warm-up", "make-checkpoint")  # fmt: skip
ALONE_SHARE = 1 / 40
LONGEST_S = 300


def commands(folder):
    """Return the suite; it runs in a folder of its own below `folder`."""
    _lay_out(folder / "in")
    verbs = {verb: typer.main.get_command(make_app([verb])).commands[verb].params for verb in VERBS}

    def case(seed, counts: Counter[str]):
        rng = drawn("commands", seed)
        place = folder / "work"
        shutil.rmtree(place, ignore_errors=True)
        _lay_traps(place, folder / "in")
        verb = rng.choice(OFTEN if rng.random() < 0.8 else SELDOM)
        arguments = _kept_small([verb, *_arguments(verbs[verb], rng)])
        try:
            with chdir(place):
                if rng.random() < ALONE_SHARE:
                    _alone(arguments, rng, counts)
                else:
                    _here(arguments, counts)
        except BaseException as error:
            error.args = (f"{error.args} from: mdi {arguments}"[:1500],)
            raise
        counts[f"verb {verb}"] += 1
        left = [
            path.name for path in place.rglob(".*") if path.name.endswith((".partial", ".switch"))
        ]
        assert not left, f"left behind by mdi {arguments}: {left}"

    return case


def _arguments(params, rng):
    """Return options and values, most cases all right but for one or two of them."""
    found, behind = [], []
    share = rng.choice((0.0, 0.1, 0.1, 0.3))
    for param in params:
        is_left_out = rng.random() < (0.03 if param.required else 0.85)
        if is_left_out and param.name not in ("trace", "traces", "workload", "slo", "ids"):
            continue
        if is_left_out and rng.random() < 0.7:
            continue
        is_named = param.opts[0].startswith("-")
        if getattr(param, "is_flag", False):
            found.append(rng.choice((*param.opts, *param.secondary_opts)))
            continue
        count = rng.choice((1, 1, 2)) if param.nargs == -1 or getattr(param, "multiple", 0) else 1
        for _ in range(count):
            values = [value(param.name, rng, share) for _ in range(max(param.nargs, 1))]
            if is_named:
                found += [rng.choice(param.opts), *values]
            else:
                behind += values
    return found + behind


def _kept_small(arguments):
    """Cut what would take minutes: long prompts on the real model, and searches."""
    cuts = {"tune": {"--trials": "2", "--jobs": "1"},
            "lab": {"--seeds": "1", "--jobs": "1"},
            "capacity": {"--seeds": "1", "--jobs": "1", "--tolerance": "1"},
            "record": {"--max-prompt": "40", "--max-output": "2", "--rate": "1000"},
            "replay": {"--max-prompt": "40", "--max-output": "2", "--rate": "1000", "--limit": "2"},
            }.get(arguments[0], {})  # fmt: skip
    if "--arrivals" in arguments:
        cuts.pop("--rate", None)
    if (arguments[0] == "record" or "--workload" in arguments) and "-n" not in arguments:
        cuts["--requests"] = "5"
    added = [part for name, most in cuts.items() if name not in arguments for part in (name, most)]
    return [arguments[0], *added, *arguments[1:]]


def _here(arguments, counts):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(files, "PIPE_WAIT_S", 0.1):
        code = run_command(arguments)
    counts[f"exit code {code}"] += 1
    assert code in (0, 1, 2), f"exit code {code}"
    errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    if code == 2 and arguments[0] == "check":  # each file that cannot be has its line
        assert errors, err.getvalue()[:500]
    elif code == 2:
        assert len(errors) == 1, f"{len(errors)} lines of error: {err.getvalue()[:500]}"
        longest = MOST_LINE_BYTES + len(" ".join(arguments).encode("utf-8", "backslashreplace"))
        assert err.getvalue().splitlines()[-1] == one_line(errors[0], longest)
    elif code == 0:
        assert not errors, errors
        if "--json" in arguments and "--help" not in arguments:
            json.loads(out.getvalue())
    else:
        assert len(errors) <= 1, errors
        assert errors or out.getvalue(), "no without a reason"


def _alone(arguments, rng, counts):
    """Run the command as a process whose surroundings are not as it hopes."""
    how = rng.choice(("no output", "no error output", "full", "unread", "interrupted"))
    if any("\0" in each or "\ud800" in each for each in arguments):
        return  # no shell can give these
    redirection = {"no output": ">&-", "no error output": "2>&-", "full": ">/dev/full",
                   "unread": "| true", "interrupted": ""}[how]  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {redirection}' if how != "unread" else '"$@" | true', "-",
         sys.executable, "-m", "minideepinfer", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        if how == "interrupted":
            try:
                process.wait(rng.choice((0.05, 0.1, 0.3, 1.0, 2.0)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONGEST_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    counts[f"processes: {how}"] += 1
    text = err.decode(errors="replace")
    if how == "interrupted" and "KeyboardInterrupt" in text and "minideepinfer/" not in text:
        counts["processes interrupted before Python had begun"] += 1
        return
    assert "Traceback" not in text, f"{how}: {text[-600:]}"
    assert process.returncode in (0, 1, 2, 130, 141), f"{how}: exit code {process.returncode}"
    assert text.count("error: ") <= 1 or how == "interrupted", f"{how}: {text[-600:]}"


def _lay_out(place):
    """Make the inputs: a trace in three containers, two runs, a checkpoint, a model, a config."""
    place.mkdir()
    work = generate_workload("azure-conv", num_requests=5, rate=50.0, seed=1)
    for ending in ("csv", "jsonl", "parquet"):
        work.save(place / f"t.{ending}")
    cost = read_cost_file("h200-tiny")
    simulate(work, cost=cost, shape=TINY).save(place / "run")
    simulate(work, cost=cost, shape=TINY, scheduler={"max_num_seqs": 2}).save(place / "other")
    (place / "m.json").write_text(json.dumps(cost.to_json()))
    (place / "c.toml").write_text('[scheduler]\nmax_num_seqs = 4\n[simulate]\nmodel = "tiny"\n')
    shutil.copytree(CHECKPOINT, place / "tiny")


def _lay_traps(place, inputs):
    place.mkdir()
    (place / "folder").mkdir()
    os.mkfifo(place / "fifo")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nowhere/at/all")
    for name, text in (("file", "text"), ("empty", ""), ("bad.json", "{"), ("bad.toml", "=")):
        (place / name).write_text(text)
    (place / "bad.parquet").write_bytes(b"PAR1PAR1")
    for path in inputs.glob("run.*"):
        shutil.copyfile(path, place / path.name.replace("run", "old", 1))
