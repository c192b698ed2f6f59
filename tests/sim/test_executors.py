"""Where jobs run: processes and clusters alike, dead workers, and waits that end."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_sim.executors import INLINE, Workers, open_workers, processes
from mdi_sim.many import as_they_end

BIN = Path(sys.executable).parent


def squared(number):
    return number * number


def stuck(number):
    raise ConfigError("number", number, "must be another")


def fault(number):
    return 1 // number


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def all_of(workers, job, numbers=range(5)):
    return sorted(as_they_end(workers, job, enumerate(numbers)))


def check(workers):
    """What holds of every kind of worker."""
    assert all_of(workers, squared) == [(n, n * n) for n in range(5)]
    with pytest.raises(ConfigError, match=r"number = \d: must be another"):
        all_of(workers, stuck)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        all_of(workers, fault)


def test_this_process():
    check(INLINE)


def test_processes():
    with processes(2) as workers:
        check(workers)


def test_a_dead_process_is_told_in_a_line():
    told = pytest.raises(MiniDeepInferError, match=r"^a worker has died \(Terminated")
    with told as caught, processes(2) as workers:
        all_of(workers, die)
    assert "\n" not in str(caught.value)
    with processes(2) as workers:  # and the next ones are there
        assert all_of(workers, squared, [3]) == [(0, 9)]


def test_a_wait_has_an_end():
    class Never:
        def submit(self, call, /, *args):
            return Future()

    with pytest.raises(MiniDeepInferError, match=r"no run has ended for 0 s"):
        list(as_they_end(Workers(Never(), 2), squared, enumerate([1, 2]), longest_s=0.01))


def test_tasks_are_asked_for_when_there_is_a_worker():
    asked = []

    def tasks():
        for number in range(4):
            asked.append(number)
            yield number, number

    found = as_they_end(INLINE, squared, tasks())
    assert next(found) == (0, 0)
    assert asked == [0]


def test_an_engine_that_is_absent(monkeypatch):
    for engine, module in (("dask", "distributed"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, module, None)
        with (
            pytest.raises(
                ConfigError, match=rf"needs {module}: pip install 'mini-deepinfer\[{engine}"
            ),
            open_workers(1, f"{engine}://localhost:1"),
        ):
            pass


@pytest.fixture
def dask_cluster(tmp_path):
    distributed = pytest.importorskip("distributed", reason="needs pip install '.[dask]'")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=tmp_path
    ) as cluster:
        yield cluster.scheduler_address.removeprefix("tcp://")


@pytest.mark.filterwarnings("ignore")  # of a package that is not ours
def test_dask(dask_cluster):
    with open_workers(1, f"dask://{dask_cluster}") as workers:
        assert workers.at_a_time == 4
        check(workers)
        with pytest.raises(MiniDeepInferError, match=r"^a worker has died \(KilledWorker"):
            all_of(workers, die, [1])


@pytest.fixture
def ray_cluster(tmp_path):
    """A head with two workers. It takes half a minute to start, so CI does without it."""
    pytest.importorskip("ray", reason="needs pip install '.[ray]'")
    pytest.importorskip("grpc", reason="needs pip install '.[ray]'")
    ports = [free_port() for _ in range(2)]
    # Polling works where epoll does not, as in some sandboxes.
    env = {**os.environ, "GRPC_POLL_STRATEGY": "poll"}
    os.environ["GRPC_POLL_STRATEGY"] = "poll"
    head = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", "--num-cpus", "2", "--port", str(ports[0]),
         "--ray-client-server-port", str(ports[1]), "--include-dashboard=false",
         "--object-store-memory", "100000000", "--disable-usage-stats",
         "--temp-dir", f"/tmp/ray-{os.getpid()}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env,
    )  # fmt: skip
    try:
        wait_for(ports[1], 90)
        yield f"127.0.0.1:{ports[1]}"
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(timeout=60)
        shutil.rmtree(f"/tmp/ray-{os.getpid()}", ignore_errors=True)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(port, most_s):
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"no cluster within {most_s} s")


@pytest.mark.skipif("CI" in os.environ, reason="a Ray cluster takes longer to start than CI has")
@pytest.mark.filterwarnings("ignore")
def test_ray(ray_cluster):
    with open_workers(1, f"ray://{ray_cluster}") as workers:
        assert workers.at_a_time == 4
        check(workers)
        with pytest.raises(MiniDeepInferError, match=r"^a worker has died \("):
            all_of(workers, die, [1])
