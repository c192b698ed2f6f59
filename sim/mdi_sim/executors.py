"""Where jobs run: in this process, in others of this machine, or on a cluster of an engine.

All speak the protocol of `concurrent.futures`: `submit` a call, wait for its future. A cluster is
somebody else's and is only connected to: `dask://HOST:PORT` (pip install 'mini-deepinfer[dask]')
or `ray://HOST:PORT` ('mini-deepinfer[ray]'). Its workers need this package, of the same version.

Read next: `many.py`, which hands out the jobs.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from mdi_shared.errors import ConfigError, first_line, require, require_int

CONNECT_S = 30  # for a cluster to answer, and to have a worker
_ADDRESS = re.compile(r"\S+:\d+")
AHEAD = 2  # tasks that a worker has at hand, so that it need not wait for the next


class Executor(Protocol):
    """What is used of an executor."""

    def submit(self, call: Callable[..., Any], /, *args: Any) -> "Future[Any]": ...  # noqa: ANN401


class Workers(NamedTuple):
    """An executor, and how many jobs to give it at a time."""

    executor: Executor
    at_a_time: int


class _Inline:
    """Runs each call in this process, when it is submitted."""

    def submit(self, call: Callable[..., Any], /, *args: Any) -> "Future[Any]":  # noqa: ANN401
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


INLINE = Workers(_Inline(), 1)


def open_workers(jobs: int, cluster: str | None = None) -> AbstractContextManager[Workers]:
    """Return the workers of a cluster, or else `jobs` processes, to be entered.

    Raises `ConfigError` for an address of another kind; entering it, where the engine is not
    installed or does not answer within CONNECT_S seconds.
    """
    require_cluster(cluster)
    if cluster is None:
        return processes(jobs)
    engine, _, address = cluster.partition("://")
    return _ENGINES[engine](address)


def require_cluster(cluster: str | None) -> None:
    """Raise `ConfigError` unless `cluster` is None or the address of an engine there is."""
    engine, _, address = (cluster or "").partition("://")
    holds = cluster is None or (engine in _ENGINES and _ADDRESS.fullmatch(address) is not None)
    require(holds, "cluster", cluster, "must be dask://HOST:PORT or ray://HOST:PORT")


@contextmanager
def processes(jobs: int) -> Iterator[Workers]:
    """Give processes of this machine, for 1 this one; an error or an interrupt ends them."""
    require_int("jobs", jobs, 1)
    if jobs == 1:
        yield INLINE
        return
    from joblib.externals.loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=jobs)
    try:
        yield Workers(executor, AHEAD * jobs)
    except BaseException:
        executor.shutdown(wait=True, kill_workers=True)
        raise


@contextmanager
def _dask(address: str) -> Iterator[Workers]:
    """Connect to the scheduler of a Dask cluster."""
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise _not_installed("dask", error) from error
    try:
        client = Client(f"tcp://{address}", timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise _unreachable(f"dask://{address}", error) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError as error:
            raise ConfigError("cluster", f"dask://{address}", "has no worker") from error
        executor = client.get_executor(pure=False)
        try:
            yield Workers(executor, AHEAD * sum(client.ncores().values()))
        finally:
            executor.shutdown(wait=False)


class _RayExecutor:
    """Remote functions of Ray as futures."""

    def __init__(self, ray: Any) -> None:  # noqa: ANN401 - a module that may not be there
        self._call = ray.remote(_call)

    def submit(self, call: Callable[..., Any], /, *args: Any) -> "Future[Any]":  # noqa: ANN401
        future: Future[Any] = self._call.remote(call, *args).future()
        return future


def _call(call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
    return call(*args)


@contextmanager
def _ray(address: str) -> Iterator[Workers]:
    """Connect to a Ray cluster through its client server."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise _not_installed("ray", error) from error
    try:
        ray.init(f"ray://{address}", log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise _unreachable(f"ray://{address}", error) from error
    try:
        cores = int(ray.cluster_resources().get("CPU", 0))
        if cores < 1:
            raise ConfigError("cluster", f"ray://{address}", "has no worker")
        yield Workers(_RayExecutor(ray), AHEAD * cores)
    finally:
        ray.shutdown()


_ENGINES: dict[str, Callable[[str], AbstractContextManager[Workers]]] = {
    "dask": _dask, "ray": _ray,
}  # fmt: skip


def _not_installed(engine: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError("cluster", f"{engine}://", f"needs {error.name}: pip install "
                       f"'mini-deepinfer[{engine}]'")  # fmt: skip


def _unreachable(cluster: str, error: Exception) -> ConfigError:
    said = first_line(error) or type(error).__name__
    return ConfigError("cluster", cluster, f"cannot be reached within {CONNECT_S} s: {said:.200}")
