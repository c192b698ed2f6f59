"""How tokens reach experts, and hashes Engram rows, that other ranks hold (docs/rules.md, R27).

Every rank has its own batch and all of the model but the routed experts and Engram's tables, of
which it holds one part (`ExpertShard`). In each layer all ranks exchange rows, in the same order.
Two ways, which give the same bits as one rank:

| | sent by a rank to each other one | the host |
|---|---|---|
| all_gather | all rows; back, all (row, slot) pairs, mostly zeros | never waits |
| all_to_all | rows it has experts for; back, the pairs asked for | waits once a layer |

Results come back by (row, slot) rather than summed by rank: the sum over a row's experts then runs
at home, in the order a single rank has. Padding `all_to_all` to fixed sizes, to spare the wait,
would send exactly what `all_gather` sends. Read next: `collectives.py`, `model/moe.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.routing import group_rows
from mdi_exec.ranks.collectives import Collectives, pack, pad_rows, unpack
from mdi_shared.errors import ConfigError

KINDS = ("all_gather", "all_to_all")
_TILE = 64  # of a grouping by rank, whose tiles nobody uses

# Runs a rank's experts: rows x [R, D], own experts int32 [R, k] (their number = elsewhere) and
# weights [R, k] in; outputs [R * k, D] in some order and each pair's place in it, int32, out.
RunExperts = Callable[[Quantised | Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# Reads own table rows: numbers int64 [n], from 0 on, in; uint8 [n, B] out.
ReadRows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Which part of routed experts and Engram rows a rank holds: contiguous, in rank order."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("expert_parallel_size", self.size, "must be at least 1")
        if not 0 <= self.rank < self.size:
            raise ConfigError("rank", self.rank, f"must lie in 0 .. {self.size - 1}")

    def experts(self, num_experts: int) -> range:
        """Return the rank's experts; raises `ConfigError` when they cannot be split evenly."""
        if num_experts % self.size:
            raise ConfigError("expert_parallel_size", self.size,
                              f"must divide the model's {num_experts} routed experts")  # fmt: skip
        own = num_experts // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def rows_per_rank(self, num_rows: int) -> int:
        """Return how many rows of a table each rank has; the last one may have fewer."""
        return -(-num_rows // self.size)

    def rows(self, num_rows: int) -> range:
        """Return the rank's rows of a table; raises `ConfigError` when there are none."""
        own = self.rows_per_rank(num_rows)
        found = range(self.rank * own, min((self.rank + 1) * own, num_rows))
        if not found:
            raise ConfigError("expert_parallel_size", self.size,
                              f"leaves a rank none of {num_rows} Engram rows")  # fmt: skip
        return found


WHOLE = ExpertShard()


class StepRows(NamedTuple):
    """Rows of one rank's step: in producer layers, and in consumer layers (bounded replay)."""

    rows: int
    kept: int


class ExpertExchange(Protocol):
    """A rank's way to the others' experts; the model calls `start`, then the rest, layer by layer.

    `sent_bytes` counts what this rank has had to send to others so far.
    """

    rank: int
    size: int

    @property
    def sent_bytes(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """Rows of the rank that has most, in the layers now running; 0 without a group."""

    def begin_step(self, rows: Sequence[tuple[int, int]]) -> None:
        """Announce all ranks' `StepRows` of a step to come; steps take them in order.

        May be called ahead, from another thread. A step is announced on all ranks or on none: then
        `start` asks the others.
        """

    def start(self, own: StepRows) -> None:
        """Begin a forward pass of so many rows here."""

    def cut(self) -> None:
        """Go over to the rows kept in consumer layers."""

    def routed(
        self, x: Quantised | Tensor, experts: Tensor, weights: Tensor, num_own: int, run: RunExperts
    ) -> tuple[Tensor, Tensor]:
        """Have every row's experts run, each where it is held.

        Rows x [T, D] are rounded; experts int32 [T, k] and weights float32 [T, k] are the
        router's; each rank holds `num_own` experts and answers with `run`. Returns outputs
        [T * k, D] and, int32 [T * k], where among them each (row, slot) is.
        """

    def look_up(self, rows: Tensor, num_own: int, read: ReadRows) -> Tensor:
        """Return table rows by number, int64 [T, C]: uint8 [T * C, B].

        Each rank holds `num_own` of the table, the last one maybe fewer, and answers with `read`.
        """


class NoExchange:
    """A rank that holds everything, alone or in a group of such."""

    rank, size, sent_bytes, most_rows = 0, 1, 0, 0

    def begin_step(self, rows: Sequence[tuple[int, int]]) -> None:
        pass

    def start(self, own: StepRows) -> None:
        pass

    def cut(self) -> None:
        pass

    def routed(
        self, x: Quantised | Tensor, experts: Tensor, weights: Tensor, num_own: int, run: RunExperts
    ) -> tuple[Tensor, Tensor]:
        return run(x, experts, weights)

    def look_up(self, rows: Tensor, num_own: int, read: ReadRows) -> Tensor:
        return read(rows.flatten())


NO_EXCHANGE = NoExchange()


def require_kind(kind: str) -> None:
    """Raise `ConfigError` unless `kind` names an exchange."""
    if kind not in KINDS:
        raise ConfigError("exchange", kind, f"must be one of {', '.join(KINDS)}")


def make_exchange(
    kind: str, group: dist.ProcessGroup | Collectives | None, *,
    rows_group: dist.ProcessGroup | None = None,
) -> ExpertExchange:  # fmt: skip
    """Return the exchange of `kind` over `group`; None, or a group of one, needs no exchange.

    `rows_group` is a CPU group on which ranks tell their rows when steps are not announced: one
    that nobody else uses meanwhile. `group` itself serves when it is on the CPU. Raises
    `ConfigError` for an unknown kind.
    """
    require_kind(kind)
    wire = Collectives(group) if isinstance(group, dist.ProcessGroup) else group
    if wire is None or wire.size == 1:
        return NO_EXCHANGE
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "gloo":
        rows_group = rows_group or group
    way = AllGatherExchange if kind == "all_gather" else AllToAllExchange
    return way(wire, rows_group)


def share_rows(own: StepRows, group: dist.ProcessGroup) -> list[StepRows]:
    """Tell every rank of a CPU group this rank's rows; returns everybody's, in rank order."""
    gathered = Collectives(group).all_gather(torch.tensor([own], dtype=torch.int64))
    return [StepRows(*row) for row in gathered.tolist()]


class _GroupExchange:
    """What both ways share: whose turn has how many rows."""

    def __init__(self, wire: Collectives, rows_group: dist.ProcessGroup | None) -> None:
        self.wire = wire
        self.rank, self.size = wire.rank, wire.size
        self._rows_group = rows_group
        self._announced: deque[list[StepRows]] = deque()
        self._rows: list[StepRows] = []
        self._is_cut = False

    @property
    def sent_bytes(self) -> int:
        return self.wire.sent_bytes

    @property
    def most_rows(self) -> int:
        return max(step.kept if self._is_cut else step.rows for step in self._rows)

    def begin_step(self, rows: Sequence[tuple[int, int]]) -> None:
        assert len(rows) == self.size, f"rows of {len(rows)} ranks, but there are {self.size}"
        self._announced.append([StepRows(*step) for step in rows])

    def start(self, own: StepRows) -> None:
        if self._announced:
            self._rows = self._announced.popleft()
        else:
            assert self._rows_group is not None, "steps must be announced: there is no CPU group"
            self._rows = share_rows(own, self._rows_group)
        assert self._rows[self.rank] == own, f"announced {self._rows[self.rank]}, but have {own}"
        self._is_cut = False

    def cut(self) -> None:
        self._is_cut = True

    def _own_ids(self, ids: Tensor, num_own: int) -> Tensor:
        """Number ids by this rank's part, 0 .. num_own - 1; those of other ranks get num_own."""
        local = ids - self.rank * num_own
        return torch.where((local >= 0) & (local < num_own), local, num_own)


class AllGatherExchange(_GroupExchange):
    """Every rank sees all rows, padded to the longest rank's, and answers what it can."""

    def routed(
        self, x: Quantised | Tensor, experts: Tensor, weights: Tensor, num_own: int, run: RunExperts
    ) -> tuple[Tensor, Tensor]:
        num_pairs = experts.numel()
        everybody = self._gather(pack(*_parts(x), experts, weights))
        *parts, ids, all_weights = unpack(everybody, *_parts(x), experts, weights)
        ids = self._own_ids(ids, num_own)
        outputs, position = run(_joined(parts), ids, all_weights)
        is_own = (ids < num_own).view(-1, 1)
        # A slot's expert is on one rank; where the others have zeros, a sum of bytes is a copy.
        answers = torch.where(is_own, outputs[position], 0)
        (mine,) = unpack(self._scatter(pack(answers))[:num_pairs], outputs)
        return mine, torch.arange(num_pairs, dtype=torch.int32, device=mine.device)

    def look_up(self, rows: Tensor, num_own: int, read: ReadRows) -> Tensor:
        (everybody,) = unpack(self._gather(pack(rows)), rows)
        ids = self._own_ids(everybody.flatten(), num_own)
        is_own = ids < num_own
        found = torch.where(is_own.unsqueeze(1), read(ids.masked_fill(~is_own, 0)), 0)
        return self._scatter(found)[: rows.numel()]

    def _gather(self, rows: Tensor) -> Tensor:
        return self.wire.all_gather(pad_rows(rows, self.most_rows))

    def _scatter(self, answers: Tensor) -> Tensor:
        return self.wire.reduce_scatter(answers)


class AllToAllExchange(_GroupExchange):
    """A row goes once to each rank that holds one of its experts; only what was asked comes back.

    How much that is depends on the router, so the host reads the counts before it sends: once for
    each layer.
    """

    def routed(
        self, x: Quantised | Tensor, experts: Tensor, weights: Tensor, num_own: int, run: RunExperts
    ) -> tuple[Tensor, Tensor]:
        num_rows, owners = experts.shape[0], experts // num_own
        pairs = group_rows(owners, self.size, _TILE)
        goes = torch.zeros(num_rows, self.size, dtype=torch.bool, device=experts.device)
        goes.scatter_(1, owners.to(torch.int64), True)
        counts = torch.stack((goes.sum(dim=0, dtype=torch.int32), pairs.counts), dim=1)
        sent, received = self.wire.swap_counts(counts)
        # True entries first, by rank and then by row: the rows each rank gets.
        going = _first_true(goes.t().flatten(), sum(sent[0])) % max(num_rows, 1)
        like = (*_parts(x), experts, weights)
        arrived = self.wire.all_to_all(pack(*like)[going], sent[0], received[0])
        *parts, ids, row_weights = unpack(arrived, *like)
        answers = self._answer(
            _joined(parts), self._own_ids(ids, num_own), row_weights, num_own, sum(received[1]), run
        )
        returned = self.wire.all_to_all(pack(answers), received[1], sent[1])
        return unpack(returned, answers)[0], pairs.position

    def look_up(self, rows: Tensor, num_own: int, read: ReadRows) -> Tensor:
        by_owner = group_rows(rows // num_own, self.size, _TILE)
        sent, received = self.wire.swap_counts(by_owner.counts.unsqueeze(1))
        asking = pack(rows.view(-1, 1)[by_owner.order])
        asked = self.wire.all_to_all(asking, sent[0], received[0]).view(torch.int64).flatten()
        found = read(asked - self.rank * num_own)
        return self.wire.all_to_all(found, received[0], sent[0])[by_owner.position]

    @staticmethod
    def _answer(
        x: Quantised | Tensor, ids: Tensor, weights: Tensor, num_own: int, num_pairs: int,
        run: RunExperts,
    ) -> Tensor:  # fmt: skip
        """Return own experts' outputs [num_pairs, D] in the order of the rows that asked."""
        if not num_pairs:
            none = x.codes.to(torch.bfloat16) if isinstance(x, Quantised) else x
            return none[:0]
        outputs, position = run(x, ids, weights)
        return outputs[position[_first_true((ids < num_own).flatten(), num_pairs)]]


def _first_true(flags: Tensor, count: int) -> Tensor:
    """Return the places of the `count` true flags, ascending, without asking the device."""
    return torch.argsort((~flags).to(torch.uint8), stable=True)[:count]


def _parts(x: Quantised | Tensor) -> tuple[Tensor, ...]:
    return (x.codes, x.scales) if isinstance(x, Quantised) else (x,)


def _joined(parts: Sequence[Tensor]) -> Quantised | Tensor:
    return Quantised(*parts) if len(parts) == 2 else parts[0]
