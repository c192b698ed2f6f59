"""How the ranks of a group find each other: a store that one of them runs, or torchrun.

A rank enters the store, waits until all have, and makes the group. Every wait has a limit, and who
waits in vain says which ranks are missing. Read next: `parallel.py`, docs/parallel.md.
"""

import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mdi_exec.errors import GroupError
from mdi_exec.ranks.parallel import ERROR_KEY, ProcessGroup, RankGroup
from mdi_shared.errors import ConfigError, MiniDeepInferError, first_line

START_TIMEOUT_S = 30.0  # for all ranks to come; they are started together
DEFAULT_TIMEOUT_S = 600.0  # for a rank that is there to be heard of again
_STORE_TIMEOUT_S = 30.0  # for the group's store to answer
_RETRY_S = 0.1  # between two looks for the store
LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE, LEAST_TOKEN = "MDI_GROUP_TOKEN", 16


@dataclass(frozen=True, slots=True)
class RankAddress:
    """A rank's place in its group, and where the group's store is.

    The store is a small key-value server; `leads` says that this rank runs it, `is_hosted` that
    torchrun does. `local_rank` counts the ranks of one machine. `token` is a secret of the group:
    who does not know it finds none of its keys in the store. `is_local` says that all ranks are on
    this machine.
    """

    rank: int
    size: int
    host: str
    port: int
    leads: bool = False
    local_rank: int = 0
    token: str = ""
    is_hosted: bool = False

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
                    token=os.environ.get(TOKEN_VARIABLE, ""), is_hosted=is_hosted)  # fmt: skip
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
                    timeout=timedelta(seconds=_STORE_TIMEOUT_S),
                    master_listen_fd=listener.detach())  # fmt: skip


def join_group(
    address: RankAddress, timeout_s: float = DEFAULT_TIMEOUT_S, start_s: float = START_TIMEOUT_S
) -> RankGroup:
    """Meet the other ranks within `start_s`. A rank not heard of for `timeout_s` ends the group.

    Raises `ConfigError` when they or their store cannot be reached, and `GroupError` on the ranks
    that another one has told why first.
    """
    if dist.is_initialized():
        raise ConfigError("WORLD_SIZE", address.size, "this process is in a group already; close "
                          "the LLM before making another")  # fmt: skip
    deadline = time.monotonic() + start_s
    own = group_store(address, find_store(address, start_s))
    try:
        _enter(address, own)
        _await_ranks(address, own, start_s, deadline)
        _require_one_size(address, own)
    except RuntimeError as error:
        raise ConfigError("WORLD_SIZE", address.size, "rank 0, where all ranks meet, has left: "
                          f"{first_line(error)}") from error  # fmt: skip
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
                          f"{address.port}: {first_line(error)}") from error  # fmt: skip
    return ProcessGroup(address.rank, address.size, address.local_rank, own, timeout)


def group_store(address: RankAddress, store: Store) -> PrefixStore:
    """Return the part of a store that is this group's, in this of torchrun's tries."""
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"minideepinfer-{run}-{address.token}", store)


def _keys(address: RankAddress) -> list[str]:
    return [f"rank{rank}" for rank in range(address.size)]


def _enter(address: RankAddress, store: Store) -> None:
    """Say in the store that this rank is here. Raises `ConfigError` when somebody else says so."""
    entry = f"{address.size} {secrets.token_hex(8)}"
    if store.compare_set(f"rank{address.rank}", "", entry).decode() != entry:
        raise ConfigError("RANK", address.rank, "another process of this group has it, too")


def _await_ranks(address: RankAddress, store: Store, start_s: float, deadline: float) -> None:
    """Wait for all ranks to come to the store. Raises what one of them says of those missing."""
    keys = _keys(address)
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if missing:  # else the last one has just come
            have = f"rank {missing[0]} has" if len(missing) == 1 else (
                f"ranks {', '.join(missing)} have")  # fmt: skip
            raise _of_one(address, store, ConfigError(
                "WORLD_SIZE", address.size, f"{have} not come within {start_s:g} s "
                "(group_start_timeout_s)")) from None  # fmt: skip


def _require_one_size(address: RankAddress, store: Store) -> None:
    """Raise when ranks were started for groups of different sizes."""
    sizes = [int(store.get(key).split()[0]) for key in _keys(address)]
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise _of_one(address, store, ConfigError(
                "WORLD_SIZE", sizes[0], f"ranks must agree, but rank {rank} has {size} where "
                "rank 0 has this"))  # fmt: skip


def _of_one(address: RankAddress, store: Store, error: ConfigError) -> MiniDeepInferError:
    """Return an error that several ranks find on the first of them, and a quotation on others."""
    mine = f"rank {address.rank}: {error}"
    first = store.compare_set(ERROR_KEY, "", mine).decode()
    return error if first == mine else GroupError(first, is_quoted=True)


def find_store(address: RankAddress, start_s: float) -> Store:
    """Lead the group's store or connect to it within `start_s`. Raises `ConfigError`.

    A thread connects, because torch waits without end for a server that is none of its own.
    """
    if address.leads:
        return lead_store(address.host, address.port)
    deadline = time.monotonic() + start_s
    _await_server(address, start_s, deadline)
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
    thread.join(max(deadline - time.monotonic(), 1.0))
    if found:
        return found[0]
    raise _alone(address, start_s, first_line(failed[0]) if failed else "who listens is silent")


def _await_server(address: RankAddress, start_s: float, deadline: float) -> None:
    """Wait until somebody listens where the store should be, or raise `ConfigError`."""
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=start_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise _alone(address, start_s, error.strerror or str(error)) from error
            time.sleep(_RETRY_S)
        else:
            return


def _alone(address: RankAddress, start_s: float, reason: str) -> ConfigError:
    missing = "torchrun" if address.is_hosted else "rank 0, where all ranks meet,"
    return ConfigError("WORLD_SIZE", address.size, f"{missing} has not come within {start_s:g} s "
                       f"(group_start_timeout_s): rank {address.rank} looked for it at "
                       f"MASTER_ADDR:MASTER_PORT = {address.host}:{address.port} "
                       f"({reason})")  # fmt: skip
