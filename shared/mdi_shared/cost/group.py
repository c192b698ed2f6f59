"""What a step of a data-parallel group takes, given what its ranks would take (docs/rules.md,
R34).

Ranks that share the experts meet in every layer, so a step ends for all of them at once: the
slowest rank's own part, and the exchange, which grows with the rows of all ranks.

Read next: `linear.py` (a rank's own time), `mdi_sim/group.py` (who asks).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mdi_shared.cost.hardware import Hardware
from mdi_shared.cost.roofline import Efficiencies
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.stated import require_assumed_group, require_fitted_group
from mdi_shared.cost.step_cost import MOST_NS
from mdi_shared.cost.traffic import step_bytes
from mdi_shared.cost.work import StepWork, prefill_work
from mdi_shared.errors import ConfigError, require_int, require_number
from mdi_shared.json_input import require_mapping, require_object

FITTED, ASSUMED = "fitted", "assumed"
MOST_OWN = 1_000.0  # times the slowest rank's own time


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """T = const + own * max A + rows * (sum N) / ranks, in ns, of one kind of step (R34).

    A is a rank's own time, as a rank with all experts would take; N is its rows. `own` differs
    from 1 where a rank reads only its own experts, or launches op by op what A replays as a graph.
    Expert imbalance is not apart: it is part of `rows`. All are at least 0;
    `own` is at most MOST_OWN, the others at most MOST_NS.
    """

    const: float = 0.0
    own: float = 1.0
    rows: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require_number(f"group.{name}", value, MOST_OWN if name == "own" else MOST_NS)

    def device_ns(self, own_ns: Sequence[int], rows: Sequence[int]) -> int:
        """Return the time of a step from its ranks' own times, ns, and rows; at least 1."""
        return next(self.times(iter((max(own_ns),)), rows))

    def times(self, slowest_ns: Iterator[int], rows: Sequence[int]) -> Iterator[int]:
        """Yield the times of steps of so many rows from the longest of their ranks' own times."""
        const, own, mean_rows = self.const, self.own, sum(rows) / len(rows)
        return (max(int(const + own * ns + self.rows * mean_rows + 0.5), 1) for ns in slowest_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """The group terms of prefill and decode steps, for a group of `ranks`.

    `basis` says where they come from: its "kind" is FITTED or ASSUMED, the rest is carried along.
    Raises `ConfigError` for fewer than two ranks or a basis without such a kind.
    """

    ranks: int
    prefill: GroupTerms
    decode: GroupTerms
    basis: Mapping[str, Any]

    def __post_init__(self) -> None:
        require_int("group.ranks", self.ranks, 2)
        kind = self.basis.get("kind")
        if kind not in (FITTED, ASSUMED):
            raise ConfigError("group.basis.kind", kind, f"must be {FITTED!r} or {ASSUMED!r}")
        (require_fitted_group if kind == FITTED else require_assumed_group)(self.basis)

    def device_ns(self, own_ns: Sequence[int], works: Sequence[StepWork]) -> int:
        """Return the time of a step whose ranks have these works and times of their own, ns.

        The ranks' steps are of one kind.
        """
        terms = self.prefill if works[0].is_prefill else self.decode
        return terms.device_ns(own_ns, [work.rows for work in works])

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and numbers; `from_json` inverts it."""
        return {"ranks": self.ranks, "prefill": asdict(self.prefill),
                "decode": asdict(self.decode), "basis": dict(self.basis)}  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> "GroupCost":
        """Build from what `to_json` returned. Raises `ConfigError` for what does not fit."""
        own = require_object("group", data, ("ranks", "prefill", "decode", "basis"))
        names = tuple(f.name for f in fields(GroupTerms))
        kinds = [
            GroupTerms(**require_object(f"group.{kind}", own[kind], names))
            for kind in ("prefill", "decode")
        ]
        return cls(ranks=own["ranks"], prefill=kinds[0], decode=kinds[1],
                   basis=require_mapping("group.basis", own["basis"]))  # fmt: skip


def assumed_group_cost(hardware: Hardware, shape: ModelShape, ranks: int) -> GroupCost:
    """Return an exchange that nobody has measured, for a model fitted on a single rank.

    A row takes as long as the fewest bytes it exchanges (`traffic.py`) take at the assumed share of
    the link's rate; bounded replay would send less. Each layer adds the roofline's fixed time. A
    rank's own part stays what a rank with all experts takes. Raises `ConfigError` when `ranks` does
    not divide the experts.
    """
    share = Efficiencies()
    row_bytes = step_bytes(shape, prefill_work(shape, [(1, 1, 1)]), ranks).exchange
    terms = GroupTerms(
        const=float(shape.num_hidden_layers * share.overhead_ns_per_layer),
        rows=1e9 * row_bytes / (hardware.nvlink_bytes_per_s * share.link),
    )
    basis = {"kind": ASSUMED, "hardware": hardware.name, "link": share.link,
             "overhead_ns_per_layer": share.overhead_ns_per_layer}  # fmt: skip
    return GroupCost(ranks=ranks, prefill=terms, decode=terms, basis=basis)
