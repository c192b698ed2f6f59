"""What a step-time model's own error does to a simulated result: simulate it slower and faster.

A cost model states the mean error of its step times held out (docs/calibration.md). If it were off
by that much in every step of a kind, how would the run come out? Only device times scale; the host
has no such figure. The chunk policy goes on believing the model, as it would in an engine.

Read next: `tune.py` (the user), docs/tuning.md (how to read the range), `diagnostics.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mdi_shared.cost.group import GroupCost
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.step_cost import HostCost, StepCost
from mdi_shared.cost.work import StepWork
from mdi_shared.errors import is_number

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class ModelError:
    """Mean relative error of single step times held out, by kind of step."""

    prefill: float
    decode: float

    def scale(self, cost: StepCost, *, slower: bool) -> "ScaledCost":
        """Return `cost` with device times longer by this error (`slower`), or shorter by it."""
        longer = 1.0 + self.prefill, 1.0 + self.decode
        return ScaledCost(cost, *(longer if slower else (1.0 / longer[0], 1.0 / longer[1])))


@dataclass(frozen=True, slots=True)
class ScaledCost:
    """`cost` with the device times of each kind of step multiplied by a factor."""

    cost: StepCost
    prefill: float
    decode: float

    @property
    def host(self) -> HostCost:
        return self.cost.host

    @property
    def group(self) -> GroupCost | None:
        """What exchanging rows adds, as `cost` has it: its error is not known apart."""
        return getattr(self.cost, "group", None)

    def device_ns(self, work: StepWork) -> int:
        scaled = self.cost.device_ns(work) * (self.prefill if work.is_prefill else self.decode)
        return max(int(scaled + 0.5), 1)

    def describe(self) -> dict[str, Any]:
        return {"kind": "scaled", "prefill": self.prefill, "decode": self.decode,
                "of": self.cost.describe()}  # fmt: skip


def held_out_error(cost: StepCost) -> ModelError | None:
    """Return the errors a fitted model states; None when it states none for a kind of step."""
    if not isinstance(cost, LinearCost):
        return None
    found = {}
    for kind in (PREFILL, DECODE):
        part = cost.fit.get(kind)
        error = part.get("held_out_mape") if isinstance(part, Mapping) else None
        if not is_number(error) or not error >= 0:
            return None
        found[kind] = float(error)
    return ModelError(found[PREFILL], found[DECODE])


def unfit_kinds(cost: StepCost) -> tuple[str, ...]:
    """Return the kinds of step whose fitted times are too uncertain to choose settings by."""
    if not isinstance(cost, LinearCost):
        return ()
    parts = {kind: cost.fit.get(kind) for kind in (PREFILL, DECODE)}
    return tuple(
        kind
        for kind, part in parts.items()
        if isinstance(part, Mapping) and part.get("usable_for_control", False) is not True
    )
