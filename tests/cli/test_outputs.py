"""Where nothing can be written, and where nothing may be read: one line, before any work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.crash_points import KILLED, disk

from .conftest import SMALL

LONG = "n" * 256


@pytest.fixture
def no_permission(monkeypatch):
    """What a user without rights meets; the one who runs the tests may have all of them."""
    monkeypatch.setattr(os, "access", lambda path, mode, **options: False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--out", "."), "out = '.': names no run"),
        (("--out", ""), "out = '.': names no run"),
        (("--out", "/dev/full"), "is a device or a pipe"),
        (("--out", "/dev/full/r"), "is a file, must be a folder"),
        (("--out", LONG), "File name too long"),
        (("--html", f"{LONG}.html"), "File name too long"),
        (("--perfetto", f"{LONG}.json"), "File name too long"),
        (("--plots", LONG), "File name too long"),
        (("--plots", "/dev/full"), "is a file, must be a folder"),
        (("--plots", ""), None),
        (("--html", "pipe.html"), "html = 'pipe.html': is a device or a pipe, not a file"),
    ],
)
def test_names_that_cannot_be_written(mdi, fails, arguments, says):
    os.mkfifo("pipe.html")
    if says is None:  # the current folder
        assert mdi("simulate", *SMALL, *arguments).code == 0
    else:
        assert says in fails(2, "simulate", *SMALL, *arguments)
        assert [path.name for path in Path().iterdir()] == ["pipe.html"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", *SMALL, "--out", "r2"),
        ("simulate", *SMALL, "--out", "new/r2"),
        ("show", "r", "--html", "p.html"),
        ("show", "r", "--plots", "p"),
        ("retrace", "r", "--out", "r2"),
        ("compare", "r", "r", "--html", "p.html"),
        ("generate-workload", "azure-conv", "w.csv"),
        ("transfer", "h200-flash-slice", "--hardware", "b200", "-o", "m.json"),
        ("tune", *SMALL, "--for", "throughput", "--plots", "p"),
    ],
)
def test_a_folder_that_may_not_be_written_to(fails, run_r, no_permission, arguments):
    assert "no file can be made there: no permission, or read-only" in fails(2, *arguments)


@pytest.mark.parametrize("verb", [("simulate",), ("show",), ("convert", "x.csv"), ("check",)])
def test_a_file_that_may_not_be_read(mdi, no_permission, verb):
    Path("t.csv").write_text("arrival_ns,prompt_len,output_len\n0,1,1\n")
    if verb[0] == "convert":
        Path("x.csv").touch()
    done = mdi(verb[0], "t.csv", *verb[1:])
    assert (done.code, "not readable" in done.err) == (2, True), done
    assert "Traceback" not in done.err


def test_a_folder_that_may_not_be_looked_into(fails, monkeypatch):
    def closed(self, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", closed)
    for arguments in (("show", "a/r"), ("check", "a/r"), ("compare", "a/r", "a/r"),
                      ("simulate", "a/t.csv"), ("calibrate", "a/r", "-o", "m.json"),
                      ("retrace", "a/r"), ("simulate", *SMALL, "--cost", "a/m.json"),
                      ("simulate", *SMALL, "--config", "a/m.toml"),
                      ("simulate", *SMALL, "--out", "a/r")):  # fmt: skip
        assert "Permission denied" in fails(2, *arguments), arguments


def test_a_full_disk(mdi, fails, run_r):
    for arguments in (("simulate", *SMALL, "--out", "r"), ("show", "r", "--perfetto", "t.json"),
                      ("generate-workload", "azure-conv", "w.csv")):  # fmt: skip
        with disk(1, KILLED):
            done = mdi(*arguments)
        assert done.code == 2
        assert done.err.splitlines()[-1].endswith("cannot be written: No space left on device")


RUN = (sys.executable, "-c", "from minideepinfer.cli import main; main()")


@pytest.mark.parametrize(
    "arguments", [("show", "r"), ("show", "r", "--json"), ("check", "r"), ("--help",)]
)
def test_standard_output_that_nobody_can_write_to(run_r, arguments):
    command = [*RUN, *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: No space left on device\n"
    read, write = os.pipe()
    os.close(read)  # nobody reads any more
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output is closed")
    assert done.stderr.count("\n") == 1
