"""Shared by the command-line tests: `mdi` in this process, in an empty folder, and a small run."""

from typing import NamedTuple

import pytest

from minideepinfer.cli import run_command

SMALL = ("--model", "tiny", "--workload", "azure-conv", "-n", "20", "--seed", "3")


class Done(NamedTuple):
    code: int
    out: str
    err: str


class InterruptingBar:
    """A progress bar at which somebody presses Ctrl-C when it counts the second time."""

    def __init__(self, *_):
        self.left = 2

    def __enter__(self):
        return self.count

    def __exit__(self, *_):
        return None

    def count(self, _):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture
def mdi(tmp_path, monkeypatch, capsys):
    """Run `mdi` with the given arguments; relative paths lie in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments) -> Done:
        capsys.readouterr()
        code = run_command([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def fails(mdi):
    """Run `mdi`, which must fail with `code`, one line on standard error and nothing else."""

    def run(code: int, *arguments) -> str:
        done = mdi(*arguments)
        assert (done.code, done.out) == (code, ""), done
        assert done.err.startswith("error: "), done.err
        assert done.err.count("\n") == 1, done.err
        return done.err.removeprefix("error: ").strip()

    return run


@pytest.fixture
def small(mdi):
    """The options of a simulation that takes no time."""
    return SMALL


@pytest.fixture
def run_r(mdi):
    """A saved run with the prefix `r`."""
    done = mdi("simulate", *SMALL, "--out", "r")
    assert done.code == 0, done.err
    return "r"
