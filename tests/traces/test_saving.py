"""A run is replaced as a whole: a failure at any change of the file system leaves old or new."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from mdi_shared.errors import SaveError
from mdi_traces.run import Run, load_run
from mdi_traces.saving import atomic_file, run_files
from tests.fuzz.crash_points import FULL, KILLED, disk

from .conftest import make_run

OLD = make_run()
NEW = make_run(requests={1: {"t_finish": 2**40}})
ITEMLESS = "without items"
NAMES = ["r.items.parquet", "r.requests.parquet", "r.steps.parquet"]


def state(prefix: Path):
    """Return which run is there, and whether it has items; None for no run."""
    if not run_files(prefix):
        return None
    run = load_run(prefix)
    return run.content_hash(), None if run.items_table is None else len(run.items_table)


def state_of(run, *, items=True):
    return run.content_hash(), len(run.items_table) if items else None


@pytest.fixture
def as_if_dead(monkeypatch):
    """Let leftovers of this process count as those of one that was killed."""

    def kill(pid, number):
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)


@pytest.mark.parametrize("how", [FULL, KILLED])
@pytest.mark.parametrize(
    ("before", "new_items"),
    [("a run", True), ("a run", False), (ITEMLESS, True), ("nothing", True)],
)
def test_every_crash_point(tmp_path, as_if_dead, how, new_items, before):
    prefix, new = tmp_path / "r", state_of(NEW, items=new_items)
    old = None if before == "nothing" else state_of(OLD, items=before != ITEMLESS)
    met = set()
    for step in count(1):
        NEW.save(prefix)  # finishes what was begun
        for path in tmp_path.glob("r.*"):
            path.unlink()
        if old is not None:
            OLD.save(prefix, items=before != ITEMLESS)
        failed = True
        with suppress(SaveError), disk(step, how) as made:
            NEW.save(prefix, items=new_items)
            failed = False
        assert state(prefix) in (old, new), step
        assert failed or state(prefix) == new
        met.add(state(prefix))
        if made.changes < step:
            break
    assert step > 25
    assert met == {old, new}
    names = NAMES if new_items else NAMES[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("how", [FULL, KILLED])
def test_every_crash_point_of_one_file(tmp_path, as_if_dead, how):
    path, met = tmp_path / "f.json", set()
    for step in count(1):
        path.write_bytes(b"old")
        with suppress(SaveError), disk(step, how) as made, atomic_file(path) as file:
            file.write(b"new")
        met.add(path.read_bytes())
        if made.changes < step:
            break
    assert met == {b"old", b"new"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_run_interrupted_while_its_pieces_are_made_leaves_the_old_one(tmp_path, error):
    def steps():
        yield NEW.steps_table
        raise error

    OLD.save(tmp_path / "r")
    half = Run(steps, NEW.requests_table, NEW.metadata, NEW.items_table)
    with pytest.raises((KeyboardInterrupt, SaveError)):
        half.save(tmp_path / "r")
    assert state(tmp_path / "r") == state_of(OLD)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


def test_the_items_of_a_loaded_run_are_not_those_of_the_next(tmp_path):
    OLD.save(tmp_path / "r")
    loaded, kept = load_run(tmp_path / "r"), load_run(tmp_path / "r")
    assert kept.items_table is not None
    NEW.save(tmp_path / "r")
    with pytest.raises(Exception, match="the run was saved anew since it was loaded"):
        assert loaded.items_table
    assert len(kept.items_table) == 6


def test_reading_and_writing_at_the_same_time(tmp_path):
    prefix, stop, found = tmp_path / "r", threading.Event(), set()
    OLD.save(prefix)

    def read():
        while not stop.is_set():
            found.add(load_run(prefix).content_hash())

    def write(run):
        for _ in range(15):
            run.save(prefix)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=[run]) for run in (OLD, NEW)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert found <= {OLD.content_hash(), NEW.content_hash()}
    assert state(prefix) in (state_of(OLD), state_of(NEW))
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("", "names no run"),
        (".", "names no run"),
        ("x/..", "names no run"),
        ("/dev/full", "is a device or a pipe"),
        ("/dev/full/r", "cannot be written"),
        ("a\0b", "is no name for a file"),
        ("n" * 300, "File name too long"),
        ("folder", r"folder\.steps\.parquet: is a folder"),
    ],
)
def test_names_that_no_run_can_have(tmp_path, monkeypatch, prefix, says):
    monkeypatch.chdir(tmp_path)
    Path("folder.steps.parquet").mkdir()
    with pytest.raises(SaveError, match=says) as caught:
        OLD.save(prefix)
    assert "\n" not in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["folder.steps.parquet"]


def test_a_folder_is_made(tmp_path):
    OLD.save(tmp_path / "runs" / "one")
    assert state(tmp_path / "runs" / "one") == state_of(OLD)


def test_a_disk_that_is_really_full(tmp_path):
    """A limit on the size of files, as the system itself enforces it."""
    OLD.save(tmp_path / "r")
    code = (
        "import resource, sys\n"
        "from mdi_traces.run import Run, load_run\n"
        "run = load_run(sys.argv[1])\n"
        "run.items_table\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "run.save(sys.argv[1], items=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("r: cannot be written: File too large")
    assert state(tmp_path / "r") == state_of(OLD)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
