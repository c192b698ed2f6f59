"""Many simulations at once: the same results in the same order, and an end when one is wanted."""

import signal
import subprocess
import sys
import time
from functools import partial

import pytest

import minideepinfer as mdi
from mdi_shared.cost.shape import TINY
from mdi_shared.errors import ConfigError, MiniDeepInferError, TraceError
from mdi_sim.many import run_many

WAITING = """
import os, time
from mdi_sim.many import run_many

def wait(seconds):
    os.write(1, b"begun\\n")  # whole, whoever else writes
    time.sleep(seconds)

list(run_many(wait, [("one", 600), ("two", 600)], jobs=2))
"""
AT_MOST_S = 60  # far below 600


def test_the_number_of_processes_does_not_show():
    work = mdi.generate_workload("azure-conv", num_requests=12, seed=3, rate=500)
    changes = {f"{n} seats": {"scheduler": {"max_num_seqs": n}} for n in (8, 1, 3)}
    run = partial(mdi.simulate_many, work, changes, shape=TINY, ranks=1, measure=latencies)
    one, two = run(), run(jobs=2)
    assert one == two
    assert list(one) == list(changes)
    alone = mdi.simulate(work, shape=TINY, ranks=1, scheduler={"max_num_seqs": 1})
    assert one["1 seats"] == latencies(alone)
    assert len(set(one.values())) == 3


def latencies(run):
    found = run.summary()
    return found.latency.e2e_ms, found.latency.itl_ms


def stuck(number):
    if number == 2:
        raise TraceError("x.csv", "is cut off")
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_names_its_run(jobs):
    found = run_many(stuck, [("first", 1), ("second", 2), ("third", 3)], jobs=jobs)
    if jobs == 1:  # several processes may tell the error before the first result is asked for
        assert next(found) == 1
    with pytest.raises(MiniDeepInferError, match=r"^second: .*is cut off"):
        list(found)


def test_bad_options_are_found_before_anything_runs():
    work = mdi.generate_workload("azure-conv", num_requests=2, seed=3)
    with pytest.raises(ConfigError, match="max_num_seqs = 0"):
        mdi.simulate_many(work, {"a": {}, "b": {"scheduler": {"max_num_seqs": 0}}}, measure=id)
    with pytest.raises(ConfigError, match="jobs = 0: must be at least 1"):
        list(run_many(abs, [("a", 1)], jobs=0))


def test_an_interrupt_ends_the_processes_too(tmp_path):
    """The signal goes to the parent alone, as a supervisor sends it."""
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    began = time.monotonic()
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True, text=True) as parent:  # fmt: skip
        assert [parent.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        parent.send_signal(signal.SIGINT)
        # The pipe closes when the last of the processes that hold it has ended.
        _, said = parent.communicate(timeout=AT_MOST_S)
    assert "KeyboardInterrupt" in said
    assert parent.returncode not in (0, None)
    assert time.monotonic() - began < 2 * AT_MOST_S
