"""What the ranks of a data-parallel group say to each other: ballots, row counts, the first error.

Every rank has its own engine, scheduler and cache; they agree on each step's kind and run it
together (docs/rules.md, R6 and R27). What they say here are a few integers on the host, over
gloo, so that no device is waited for; tensors go another way. `RankGroup` itself is a group of one,
for which all of it is a no-op. All ranks must make the same calls in the same order.

Read next: `engine.py` (who calls), `workers.py` (ranks as child processes), docs/parallel.md.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mdi_exec.errors import GroupError
from mdi_exec.ranks.collectives import Collectives
from mdi_shared.errors import ConfigError
from mdi_shared.loop import Vote
from mdi_shared.vote import ALL, ANY, NONE, decide

STORE_TIMEOUT_S = 30.0  # for the group's store to answer; ranks are started together
_RETRY_S = 0.1  # between two looks for the store
LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE, LEAST_TOKEN = "MDI_GROUP_TOKEN", 16
DEFAULT_TIMEOUT_S = 600.0  # for a rank that is there to be heard of again
NOTHING_COMES, MAY_COME, HAS_COME = range(3)  # what a rank without work knows of arrivals

_TOPICS = ("unfinished", "prefill", "admitted")
_RULES = (NONE, ALL, ANY)
_ERROR_KEY = "first_error"


class RankGroup:
    """A group of one. Subclasses give it a way to reach others: `gather`, `gather_plain`."""

    rank = 0
    size = 1
    local_rank = 0
    is_open = True

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return every rank's integers, in rank order; all ranks give equally many."""
        return [tuple(values)]

    def gather_plain(self, value: object) -> list[Any]:
        """Return every rank's plain data (what JSON holds), in rank order; tuples become lists.

        For starts and ends: it is slow. Nothing that a peer sends is run, as pickles would be.
        """
        return [json.loads(json.dumps(value))]

    def vote(self, vote: Vote) -> bool:
        """Combine the ranks' ballots by the rule in force."""
        topic, rule = _TOPICS.index(vote.topic), _RULES.index(vote.ballot.rule)
        ballots = self.gather((topic, rule, vote.ballot.want))
        assert {ballot[:2] for ballot in ballots} == {(topic, rule)}, (
            f"ranks vote on different things: {ballots}"
        )
        return decide(vote.ballot.rule, [bool(ballot[2]) for ballot in ballots])

    def arrivals(self, known: int) -> int:
        """Return what the rank that knows most has heard of: NOTHING_COMES to HAS_COME.

        Idle ranks meet for it: one that looked on its own could miss what another just took.
        """
        return max(values[0] for values in self.gather((known,)))

    def require_equal(self, stated: Mapping[str, object]) -> None:
        """Raise the same `ConfigError` on every rank when one states another value than rank 0."""
        first, *others = self.gather_plain(dict(stated))
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other.get(name) != value:
                    raise ConfigError(name, value, f"ranks must agree, but rank {rank} has "
                                      f"{other.get(name)!r} where rank 0 has this")  # fmt: skip

    def fail(self, error: BaseException) -> BaseException:
        """End the group because of `error`; return the error to raise on this rank.

        The first rank to fail raises its own error, all others a `GroupError` that quotes it.
        """
        return error

    @contextmanager
    def ends_with(self) -> Iterator[None]:
        """End the group when the block fails: nobody may wait for a rank that is not coming."""
        try:
            yield
        except BaseException as error:
            first = self.fail(error)
            if first is error:
                raise
            raise first from error

    def tensor_group(self, device: torch.device) -> dist.ProcessGroup | Collectives | None:
        """Return the group in which the ranks' devices exchange tensors; None for a group of one.

        It is another one than that of the votes, because a step exchanges while the next is voted
        on. A collective call: all ranks make it, once.
        """
        return None

    def rows_group(self) -> dist.ProcessGroup | None:
        """Return a further group, of hosts, for steps whose rows nobody announces (warm-up).

        A collective call too.
        """
        return None

    def close(self) -> None:
        """Leave the group; harmless when done twice."""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """A rank's place in its group, and where the group's store is.

    The store is a small key-value server; `leads` says that this rank runs it. `local_rank` counts
    the ranks of one machine. `token` is a secret of the group: who does not know it finds none of
    its keys in the store. `is_local` says that all ranks are on this machine.
    """

    rank: int
    size: int
    host: str
    port: int
    leads: bool = False
    local_rank: int = 0
    token: str = ""

    @classmethod
    def from_environment(cls) -> "RankAddress | None":
        """Read what torchrun sets for its processes; None for a process of its own.

        Raises `ConfigError` when a variable is missing or no number, and when ranks of several
        machines have no token.
        """
        if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
            return None
        numbers = {name: _env_number(name) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
        size, rank = numbers["WORLD_SIZE"], numbers["RANK"]
        if not 0 <= rank < size:
            raise ConfigError("RANK", rank, f"must be from 0 to WORLD_SIZE - 1 = {size - 1}")
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        local_rank = _env_number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
        found = cls(rank, size, os.environ.get("MASTER_ADDR", LOOPBACK), numbers["MASTER_PORT"],
                    leads=rank == 0 and not is_hosted, local_rank=local_rank,
                    token=os.environ.get(TOKEN_VARIABLE, ""))  # fmt: skip
        if not found.is_local and len(found.token) < LEAST_TOKEN:
            raise ConfigError(TOKEN_VARIABLE, found.token, "ranks on several machines need this "
                              f"environment variable, the same random text of {LEAST_TOKEN} "
                              "characters or more on all of them")  # fmt: skip
        return found

    @property
    def is_local(self) -> bool:
        local_size = os.environ.get("LOCAL_WORLD_SIZE", str(self.size))
        own_names = (LOOPBACK, "::1", "localhost", socket.gethostname(), socket.getfqdn())
        return local_size == str(self.size) and self.host in own_names


def _env_number(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal():
        raise ConfigError(name, text, "this environment variable must be a whole number wherever "
                          "WORLD_SIZE is above 1 (torchrun sets it)")  # fmt: skip
    return int(text)


def lead_store(host: str, port: int) -> TCPStore:
    """Run a group's store at `port` (0: any free one) of the address `host` alone.

    Raises `ConfigError` when it cannot be had. The socket is bound here, because the store of
    torch would listen on every address of the machine.
    """
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise ConfigError("group_port", port, f"cannot be had on {host} ({error.strerror}); give "
                          "another, or 0 for any free one") from error  # fmt: skip
    return TCPStore(host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
                    timeout=timedelta(seconds=STORE_TIMEOUT_S),
                    master_listen_fd=listener.detach())  # fmt: skip


def join_group(
    address: RankAddress, timeout_s: float = DEFAULT_TIMEOUT_S, start_s: float = STORE_TIMEOUT_S
) -> RankGroup:
    """Meet the other ranks. Raises `ConfigError` when they or their store cannot be reached.

    A rank that is not heard of for `timeout_s` ends the group.
    """
    if dist.is_initialized():
        raise ConfigError("WORLD_SIZE", address.size, "this process is in a group already; close "
                          "the LLM before making another")  # fmt: skip
    store = _find_store(address, start_s)
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"minideepinfer-{run}-{address.token}", store)
    _await_ranks(address, own, start_s)
    if address.is_local:  # else gloo would listen on the address that the machine's name has
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0] if loopback else "")
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            "gloo", store=own, rank=address.rank, world_size=address.size, timeout=timeout
        )
    except RuntimeError as error:
        raise ConfigError("WORLD_SIZE", address.size, f"not all ranks have met at {address.host}:"
                          f"{address.port}: {_first_line(error)}") from error  # fmt: skip
    return ProcessGroup(address, own, timeout)


def _await_ranks(address: RankAddress, store: Store, start_s: float) -> None:
    """Wait for all ranks to come to the store; raises `ConfigError` naming those that do not."""
    keys = [f"rank{rank}" for rank in range(address.size)]
    store.set(keys[address.rank], "here")
    try:
        store.wait(keys, timedelta(seconds=start_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise ConfigError("WORLD_SIZE", address.size, f"not all ranks have come within {start_s:g} "
                          f"s: missing {', '.join(map(str, missing))}") from error  # fmt: skip


def _find_store(address: RankAddress, start_s: float) -> Store:
    """Lead the group's store or connect to it.

    A thread connects, because torch waits without end for a server that is none of its own.
    """
    if address.leads:
        return lead_store(address.host, address.port)
    _await_server(address, start_s)
    found: list[Store] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            found.append(
                TCPStore(address.host, address.port, is_master=False, wait_for_workers=False,
                              timeout=timedelta(seconds=start_s))
            )  # fmt: skip
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    thread.join(start_s + 1.0)
    if found:
        return found[0]
    raise _alone(address, start_s, "a group", _first_line(failed[0]) if failed else "it is silent")


def _await_server(address: RankAddress, start_s: float) -> None:
    """Wait until somebody listens where the store should be, or raise `ConfigError`."""
    deadline = time.monotonic() + start_s
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=start_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or str(error)
                raise _alone(address, start_s, "anybody", reason) from error
            time.sleep(_RETRY_S)
        else:
            return


def _alone(address: RankAddress, start_s: float, whom: str, reason: str) -> ConfigError:
    return ConfigError("WORLD_SIZE", address.size, f"rank {address.rank} has not met {whom} at "
                       f"MASTER_ADDR:MASTER_PORT = {address.host}:{address.port} within "
                       f"{start_s:g} s ({reason}); were all ranks started?")  # fmt: skip


class ProcessGroup(RankGroup):
    """Ranks that are processes. A call into a group whose other ranks are gone raises `GroupError`.

    gloo notices at once when a process dies, because its connections close; one that hangs is
    given up after the group's timeout, which holds for every wait.
    """

    def __init__(self, address: RankAddress, store: Store, timeout: timedelta) -> None:
        self.rank = address.rank
        self.size = address.size
        self.local_rank = address.local_rank
        self._store = store
        self._timeout = timeout
        self.is_open = True

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        mine = torch.tensor(values, dtype=torch.int64)
        gathered = list(torch.empty(self.size, len(values), dtype=torch.int64))
        self._collect(lambda: dist.all_gather(gathered, mine))
        return [tuple(row.tolist()) for row in gathered]

    def gather_plain(self, value: object) -> list[Any]:
        text = json.dumps(value).encode()
        lengths = [length for (length,) in self.gather((len(text),))]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = list(torch.empty(self.size, max(lengths), dtype=torch.uint8))
        self._collect(lambda: dist.all_gather(gathered, mine))
        return [json.loads(bytes(row[:length].numpy()))
                for row, length in zip(gathered, lengths, strict=True)]  # fmt: skip

    def _collect(self, collective: Callable[[], object]) -> None:
        if not self.is_open:
            raise GroupError("it was left already")
        try:
            collective()
        except RuntimeError as error:
            raise self.fail(error) from error

    def tensor_group(self, device: torch.device) -> dist.ProcessGroup | None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        return made

    def rows_group(self) -> dist.ProcessGroup | None:
        made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        return made

    def fail(self, error: BaseException) -> BaseException:
        if not self.is_open:
            return error
        is_own = not isinstance(error, GroupError) and not _is_lost_connection(error)
        told = f"rank {self.rank}: {_describe(error)}" if is_own else (
            f"rank {self.rank} has lost the others; one of them has died, or was not heard of "
            "for too long"
        )  # fmt: skip
        first = self._first_error(told)
        self.close()
        return error if is_own and first == told else GroupError(first, is_quoted=first != told)

    def _first_error(self, told: str) -> str:
        """Write `told` where all ranks find it, unless one was faster; return what stands there."""
        try:
            found: bytes = self._store.compare_set(_ERROR_KEY, "", told)
            return found.decode()
        except RuntimeError:  # the store has died with its rank
            return told

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            dist.destroy_process_group()


def _describe(error: BaseException) -> str:
    name, text = type(error).__name__, _first_line(error)
    return text if isinstance(error, ConfigError) else f"{name}: {text}" if text else name


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _is_lost_connection(error: BaseException) -> bool:
    """Say whether a collective failed for what another rank did, going by gloo's and NCCL's words.

    They have no error type of their own.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)


def require_even_experts(n_routed_experts: int, size: int) -> None:
    """Raise `ConfigError` unless `size` ranks can share the routed experts evenly."""
    if n_routed_experts % size:
        raise ConfigError("data_parallel_size", size, f"must divide the model's "
                          f"{n_routed_experts} routed experts")  # fmt: skip


def own_device(device: str, group: RankGroup) -> str:
    """Give each rank of a machine a GPU of its own, unless one is named."""
    if group.size == 1 or device != "cuda":
        return device
    return f"cuda:{group.local_rank}"
