"""Step times predicted for hardware or a model that nothing was recorded on.

A roofline whose efficiencies are those a fitted model reached where it was recorded, one set for
prefill and one for decode steps. It is a prediction: no error of it is known before the target is
measured. The efficiencies are found elsewhere (`mdi_sim/fit/transfer.py`); here they are only used,
written and read.

Read next: `roofline.py` (the times), `linear.py` (a fitted model).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mdi_shared.cost.hardware import HARDWARE, Hardware, stated_hardware
from mdi_shared.cost.linear import UNITS, host_from_json
from mdi_shared.cost.roofline import Efficiencies, RooflineCost
from mdi_shared.cost.shape import ModelShape, shape_from_mapping
from mdi_shared.cost.step_cost import HostCost
from mdi_shared.cost.work import StepWork
from mdi_shared.errors import ConfigError
from mdi_shared.json_input import require_mapping, require_object

KIND = "predicted"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCost:
    """Step time of one rank of `shape` on `hardware`, its experts split over `ep` ranks.

    `prefill` and `decode` are the efficiencies of each kind of step, `host` the host times of the
    run they come from. `basis` says where they come from and is carried along, not interpreted.
    Raises `ConfigError` when `ep` does not divide the experts.
    """

    hardware: Hardware
    shape: ModelShape
    ep: int
    prefill: Efficiencies
    decode: Efficiencies
    host: HostCost
    basis: Mapping[str, Any]
    _rooflines: tuple[RooflineCost, RooflineCost] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        both = [
            RooflineCost(self.hardware, self.shape, ep=self.ep, efficiencies=efficiencies)
            for efficiencies in (self.prefill, self.decode)
        ]
        object.__setattr__(self, "_rooflines", tuple(both))

    def roofline(self, *, is_prefill: bool) -> RooflineCost:
        """Return the roofline of a kind of step; its `explain` takes a step apart."""
        prefill, decode = self._rooflines
        return prefill if is_prefill else decode

    def device_ns(self, work: StepWork) -> int:
        """Return the device time of a step, at least 1 ns."""
        return self.roofline(is_prefill=work.is_prefill).device_ns(work)

    def describe(self) -> dict[str, Any]:
        """Return the whole model, as `to_json` does."""
        return self.to_json()

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers; `from_json` inverts it."""
        known = HARDWARE.get(self.hardware.name) == self.hardware
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "units": UNITS,
            "hardware": self.hardware.name,
            **({} if known else {"peaks": asdict(self.hardware)}),
            "ep": self.ep,
            "shape": {name: list(value) if isinstance(value, tuple) else value
                      for name, value in asdict(self.shape).items()},
            "efficiencies": {"prefill": asdict(self.prefill), "decode": asdict(self.decode)},
            "host": asdict(self.host),
            "basis": dict(self.basis),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PredictedCost":
        """Build from what `to_json` returned.

        Raises `ConfigError` for a missing or unknown key, unknown hardware, and values that are
        out of range.
        """
        names = ("kind", "schema_version", "units", "hardware", "ep", "shape", "efficiencies",
                 "host", "basis")  # fmt: skip
        own = require_object("cost model", data, names, optional=("peaks",))
        for name, expected in (("kind", KIND), ("schema_version", SCHEMA_VERSION),
                               ("units", UNITS)):  # fmt: skip
            if own[name] != expected:
                raise ConfigError(name, own[name], f"must be {expected!r}")
        kinds = require_object("efficiencies", own["efficiencies"], ("prefill", "decode"))
        return cls(
            hardware=stated_hardware(own),
            shape=shape_from_mapping(require_mapping("shape", own["shape"])),
            ep=own["ep"],
            prefill=_efficiencies("efficiencies.prefill", kinds["prefill"]),
            decode=_efficiencies("efficiencies.decode", kinds["decode"]),
            host=host_from_json(own["host"]),
            basis=require_mapping("basis", own["basis"]),
        )


def _efficiencies(where: str, data: object) -> Efficiencies:
    names = tuple(f.name for f in fields(Efficiencies))
    stated = require_object(where, data, names)
    try:
        return Efficiencies(**stated)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error.field}", error.value, error.allowed) from error
