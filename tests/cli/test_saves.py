"""Whatever a verb writes: at every instant the old files or the new; one line when it fails."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import minideepinfer.tuned
from mdi_analysis import pages
from mdi_traces.run import load_run
from mdi_traces.saving import run_files
from minideepinfer.commands import calibrate
from tests.fuzz.crash_points import FULL, KILLED, disk
from tests.sim.recorded import noisy_run

from .conftest import SMALL

RUN_NAMES = ["r.items.parquet", "r.requests.parquet", "r.steps.parquet"]


def contents(folder=".") -> dict[str, bytes]:
    """Return what is in a folder, hidden leftovers left out."""
    return {
        str(path): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.parts)
    }


def loaded(prefix="r"):
    """Return all that a run says, or None when there is none."""
    if not run_files(prefix):
        return None
    run = load_run(prefix)
    tables = run.steps_table, run.requests_table, run.items_table
    return run.metadata, *(None if t is None else str(t.to_pydict()) for t in tables)


@pytest.fixture
def as_if_dead(monkeypatch):
    """Let leftovers of this process count as those of one that was killed."""

    def kill(pid, number):
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)


def put_back(files: dict[str, bytes]):
    for path in contents():
        if path not in files:
            Path(path).unlink()
    for path, data in files.items():
        Path(path).write_bytes(data)


def crash(mdi, arguments, look, *, points=3):
    """Run `arguments` over what is there with a failure at some of its changes, spread evenly.

    `look` says what is there, the old or the new.
    """
    before, old = contents(), look()
    with disk() as whole:
        done = mdi(*arguments)
    assert done.code == 0, done.err
    new = look()
    assert new != old
    steps = sorted({1 + point * whole.changes // points for point in range(points)})
    for how in (FULL, KILLED):
        for step in steps:
            put_back(before)
            with disk(step, how):
                done = mdi(*arguments)
            assert look() in (old, new), (how, step)
            assert "Traceback" not in done.err, (how, step, done)
            if done.code:
                assert done.code == 2, (how, step, done)
                assert done.err.splitlines()[-1].startswith("error: "), (how, step, done)
            else:
                assert look() == new, (how, step)
            if how == KILLED:
                assert mdi(*arguments).code == 0, "also finishes what was begun"
                assert look() == new, step


def test_simulate(mdi, as_if_dead, run_r):
    crash(mdi, ("simulate", *SMALL, "-n", "5", "--out", "r"), loaded)
    assert sorted(path.name for path in Path().iterdir()) == RUN_NAMES


def test_retrace(mdi, as_if_dead, run_r):
    assert mdi("simulate", *SMALL, "-n", 5, "--out", "again").code == 0
    crash(mdi, ("retrace", "r", "--out", "again"), functools.partial(loaded, "again"))


@pytest.mark.parametrize("verb", ["record", "replay"])
def test_real_runs(mdi, as_if_dead, run_r, verb):
    pytest.importorskip("torch")
    Path("t.csv").write_text("arrival_ns,prompt_len,output_len\n0,5,3\n1,7,2\n")
    what = ("azure-conv", "-n", "2", "--max-prompt", "9", "--max-output", "3", "--arrivals",
            "burst") if verb == "record" else ("t.csv",)  # fmt: skip
    sizes = ("--set", "num_blocks=64", "--set", "max_model_len=1024", "--set", "max_num_seqs=2")
    crash(mdi, (verb, "random:tiny", *what, *sizes, "--out", "r"), whole_run)


def whole_run():
    """Return whose run this is: times of a real one differ from run to run."""
    run = load_run("r")
    return run.metadata.source, run.items_table is None, len(run.requests_table)


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes most of a page's time and writes nothing."""
    monkeypatch.setattr(pages, "_picture", lambda figure, title: "")


VIEWS = {
    "perfetto": ("--perfetto", "v/t.json"),
    "packed": ("--perfetto", "v/t.json.gz"),
    "html": ("--html", "v/p.html"),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_run(mdi, as_if_dead, run_r, no_pictures, view):
    assert mdi("simulate", *SMALL, "-n", 5, "--out", "other").code == 0
    assert mdi("show", "other", *VIEWS[view]).code == 0
    crash(mdi, ("show", "r", *VIEWS[view]), lambda: contents("v"))
    assert [path.name for path in Path("v").iterdir()] == [Path(VIEWS[view][1]).name]


def test_a_page_of_a_comparison(mdi, as_if_dead, run_r, no_pictures):
    assert mdi("simulate", *SMALL, "-n", 5, "--out", "other").code == 0
    assert mdi("compare", "r", "r", "--html", "p.html").code == 0
    crash(mdi, ("compare", "r", "other", "--html", "p.html"), Path("p.html").read_bytes)


def test_pictures_are_each_old_or_new(mdi, as_if_dead, run_r):
    assert mdi("show", "r", "--plots", "new").code == 0
    assert mdi("simulate", *SMALL, "-n", 7, "--out", "other").code == 0
    assert mdi("show", "other", "--plots", "old").code == 0
    old, new = (list(contents(name).values()) for name in ("old", "new"))
    for how, step in ((FULL, 3), (FULL, 12), (KILLED, 8), (KILLED, 15)):
        with disk(step, how):
            done = mdi("show", "r", "--plots", "old")
        assert (done.code, "Traceback" in done.err) == (2, False)
        found = list(contents("old").values())
        assert all(f in (a, b) for f, a, b in zip(found, old, new, strict=True)), (how, step)


# What these compute takes long and is not what is tested: it is computed once.


def test_calibrate(mdi, as_if_dead, monkeypatch):
    noisy_run().save("recorded")
    fitted = calibrate._fit([Path("recorded")], None, allow_constant=False)
    monkeypatch.setattr(calibrate, "_fit", lambda *args, **options: fitted)
    Path("m.json").write_text("{}")
    crash(mdi, ("calibrate", "recorded", "-o", "m.json"), Path("m.json").read_bytes)


def test_transfer(mdi, as_if_dead):
    Path("m.json").write_text("{}")
    arguments = ("transfer", "h200-flash-slice", "--hardware", "b200", "-o", "m.json")
    crash(mdi, arguments, Path("m.json").read_bytes)


def test_tune(mdi, as_if_dead, monkeypatch):
    search, found = minideepinfer.tuned.run_search, []

    def cached(*args, **options):
        found.append(search(*args, **options) if not found else found[0])
        return found[-1]

    monkeypatch.setattr(minideepinfer.tuned, "run_search", cached)
    Path("p").mkdir()
    Path("p/tuning.png").write_text("old")
    arguments = ("tune", *SMALL, "--for", "throughput", "--trials", "3", "-j", "1", "--plots", "p")
    crash(mdi, arguments, Path("p/tuning.png").read_bytes)


@pytest.mark.parametrize("target", ["t.parquet", "t.jsonl", "t.csv"])
def test_requests(mdi, as_if_dead, target):
    assert mdi("generate-workload", "azure-conv", target, "-n", 5).code == 0
    arguments = ("generate-workload", "azure-conv", target, "-n", "9")
    crash(mdi, arguments, Path(target).read_bytes)


KILLED_AT = """
import os, signal, sys
changes, last = 0, int(sys.argv.pop(1))
def count(event, args):
    global changes
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        changes += 1
        if changes == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
from minideepinfer.cli import main
main()
"""


@pytest.mark.parametrize("last", [1, 5, 8])
def test_a_real_kill(mdi, run_r, last):
    old = loaded()
    arguments = [sys.executable, "-c", KILLED_AT, str(last), "simulate", *SMALL, "-n", "7",
                 "--out", "r"]  # fmt: skip
    done = subprocess.run(arguments, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    found = loaded()
    assert mdi("check", "r").code == 0
    assert mdi("simulate", *SMALL, "-n", 7, "--out", "r").code == 0
    assert found in (old, loaded())
    assert sorted(path.name for path in Path().iterdir()) == RUN_NAMES, "cleaned up"
