"""What the ranks of a data-parallel group say to each other: ballots, row counts, the first error.

Every rank has its own engine, scheduler and cache; they agree on each step's kind and run it
together (docs/rules.md, R6 and R27). What they say here are a few integers on the host, over
gloo, so that no device is waited for; tensors go another way. `RankGroup` itself is a group of one,
for which all of it is a no-op. All ranks must make the same calls in the same order.

Read next: `meeting.py` (how ranks find each other), `engine.py` (who calls), docs/parallel.md.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mdi_exec.errors import GroupError
from mdi_exec.ranks.collectives import Collectives
from mdi_shared.errors import ConfigError, first_line
from mdi_shared.loop import Vote
from mdi_shared.vote import ALL, ANY, NONE, decide

NOTHING_COMES, MAY_COME, HAS_COME = range(3)  # what a rank without work knows of arrivals

_TOPICS = ("unfinished", "prefill", "admitted")
_RULES = (NONE, ALL, ANY)
ERROR_KEY = "first_error"
_STORE_ANSWER_S = 5.0  # for the store to take in an error


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


class ProcessGroup(RankGroup):
    """Ranks that are processes. A call into a group whose other ranks are gone raises `GroupError`.

    gloo notices at once when a process dies, because its connections close; one that hangs is
    given up after the group's timeout, which holds for every wait.
    """

    def __init__(
        self, rank: int, size: int, local_rank: int, store: Store, timeout: timedelta
    ) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
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
        """Write `told` where all ranks find it, unless one was faster; return what stands there.

        A thread asks, because torch waits without end for a store whose rank was stopped.
        """
        found: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store has died with its rank
                found.append(self._store.compare_set(ERROR_KEY, "", told).decode())

        thread = threading.Thread(target=ask, name="first error", daemon=True)
        thread.start()
        thread.join(_STORE_ANSWER_S)
        return found[0] if found else told

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            dist.destroy_process_group()


def _describe(error: BaseException) -> str:
    name, text = type(error).__name__, first_line(error)
    return text if isinstance(error, ConfigError) else f"{name}: {text}" if text else name


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
