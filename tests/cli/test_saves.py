"""Whatever a verb writes: at every instant the old files or the new; one line when it fails."""

import functools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import minideepinfer.tuned
from mdi_shared.errors import SaveError
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


def crash_everywhere(mdi, arguments, look, clean, *, every=1):
    """Run `arguments` over old files with a failure at each change; `clean` restores the old.

    `look` says what is there. Returns how many failures were tried.
    """
    clean()
    old = look()
    with disk() as whole:
        done = mdi(*arguments)
    assert done.code == 0, done.err
    new = look()
    assert new != old
    met, tried = set(), 0
    for how in (FULL, KILLED):
        for step in range(1, whole.changes + 1, every):
            clean()
            with disk(step, how):
                done = mdi(*arguments)
            found = look()
            assert found in (old, new), (how, step)
            if done.code:
                assert done.code == 2, (how, step, done)
                assert done.err.splitlines()[-1].startswith("error: "), (how, step, done)
                assert "Traceback" not in done.err, (how, step, done)
            else:
                assert found == new, (how, step)
            met.add(found == new)
            tried += 1
    assert met == {False, True}
    assert mdi(*arguments).code == 0
    assert look() == new
    return tried


def remove_run():
    for path in Path().glob("r.*"):
        path.unlink()


@pytest.mark.parametrize("items_before", [True, False])
def test_simulate_over_an_older_run(mdi, as_if_dead, items_before):
    def clean():
        assert mdi("simulate", *SMALL, "-n", 7, "--out", "r").code == 0
        if not items_before:
            load_run("r").save("r", items=False)

    assert crash_everywhere(mdi, ("simulate", *SMALL, "--out", "r"), loaded, clean) > 40
    assert sorted(path.name for path in Path().iterdir()) == RUN_NAMES


def test_simulate_where_there_is_no_run(mdi, as_if_dead):
    def clean():
        assert mdi("simulate", *SMALL, "--out", "r").code == 0  # finishes what was begun
        remove_run()

    crash_everywhere(mdi, ("simulate", *SMALL, "--out", "r"), loaded, clean)
    assert sorted(path.name for path in Path().iterdir()) == RUN_NAMES


def test_a_run_without_items_over_one_with_them(mdi, as_if_dead):
    assert mdi("simulate", *SMALL, "-n", 7, "--out", "other").code == 0

    for how in (FULL, KILLED):
        for step in range(1, 40):
            load_run("other").save("r")
            old = loaded()
            with suppress(SaveError), disk(step, how):
                load_run("other").save("r", items=False)
            assert loaded() in (old, (*old[:3], None))
    load_run("other").save("r", items=False)
    assert loaded() == (*old[:3], None)


def test_retrace(mdi, as_if_dead, run_r):
    def clean():
        assert mdi("simulate", *SMALL, "-n", 7, "--out", "again").code == 0

    look = functools.partial(loaded, "again")
    crash_everywhere(mdi, ("retrace", "r", "--out", "again"), look, clean)


VIEWS = {
    "perfetto": ("--perfetto", "v/t.json"),
    "packed": ("--perfetto", "v/t.json.gz"),
    "html": ("--html", "v/p.html"),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_run(mdi, as_if_dead, run_r, view):
    assert mdi("simulate", *SMALL, "-n", 7, "--out", "other").code == 0

    def clean():
        assert mdi("show", "other", *VIEWS[view]).code == 0

    every = 1 if view != "html" else 4
    look = functools.partial(contents, "v")
    crash_everywhere(mdi, ("show", "r", *VIEWS[view]), look, clean, every=every)
    assert [path.name for path in Path("v").iterdir()] == [Path(VIEWS[view][1]).name]


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


@pytest.fixture
def documents(mdi, as_if_dead, run_r, monkeypatch):
    """Crash a verb that writes one document; what it computes is computed once."""

    def crash(*arguments, file):
        def clean():
            Path(file).write_text("{}\n")

        return crash_everywhere(mdi, arguments, lambda: Path(file).read_bytes(), clean)

    return crash


def test_calibrate(documents, monkeypatch):
    noisy_run().save("recorded")
    fitted = calibrate._fit([Path("recorded")], None, allow_constant=False)
    monkeypatch.setattr(calibrate, "_fit", lambda *args, **options: fitted)
    assert documents("calibrate", "recorded", "-o", "m.json", file="m.json") > 5


def test_transfer(documents):
    arguments = ("transfer", "h200-flash-slice", "--hardware", "b200", "-o", "m.json")
    assert documents(*arguments, file="m.json") > 5


def test_tune(documents, monkeypatch):
    arguments = ("tune", *SMALL, "--for", "throughput", "--trials", "3", "-j", "1", "--plots", "p")
    search, found = minideepinfer.tuned.run_search, []

    def cached(*args, **options):
        found.append(search(*args, **options) if not found else found[0])
        return found[-1]

    monkeypatch.setattr(minideepinfer.tuned, "run_search", cached)
    Path("p").mkdir()
    assert documents(*arguments, file="p/tuning.png") > 5


@pytest.mark.parametrize("target", ["t.parquet", "t.jsonl", "t.csv"])
def test_requests(mdi, as_if_dead, run_r, target):
    def clean():
        assert mdi("generate-workload", "azure-conv", target, "-n", 5).code == 0

    crash_everywhere(
        mdi, ("convert", "r.requests.parquet", target), lambda: Path(target).read_bytes(), clean
    )


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


@pytest.mark.parametrize("last", [1, 3, 5, 6, 8, 9])
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
