"""What a model file states about its own making, as far as somebody reads it: checked when read.

The rest of it, diagnostics for people, is carried along as it is.

Read next: `linear.py` and `group.py`, whose files these are.
"""

from collections.abc import Mapping
from typing import Any

from mdi_shared.cost.shape import shape_from_mapping
from mdi_shared.cost.step_cost import MOST_NS
from mdi_shared.errors import require, require_number
from mdi_shared.json_input import require_mapping

KINDS = ("prefill", "decode")
MOST_ERROR = 1e6  # mean relative error


def require_fit(fit: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless a fitted model's `fit` says what it says in the form it should."""
    for name in ("hardware", "model", "source", "generator"):
        _require_text(f"fit.{name}", fit.get(name))
    if fit.get("shape") is not None:
        shape_from_mapping(require_mapping("fit.shape", fit["shape"]))
    for kind in KINDS:
        part = _part("fit", fit, kind)
        _require_error(f"fit.{kind}.held_out_mape", part.get("held_out_mape"))
        usable = part.get("usable_for_control", False)
        require(type(usable) is bool, f"fit.{kind}.usable_for_control", usable,
                "must be true or false")  # fmt: skip
        _part(f"fit.{kind}", part, "dropped")


def require_fitted_group(basis: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the errors that the basis of a fitted group states are errors."""
    for kind in KINDS:
        where = f"group.basis.{kind}"
        held_out = _part(where, _part("group.basis", basis, kind), "held_out")
        _require_error(f"{where}.held_out.mape", held_out.get("mape"))


def require_assumed_group(basis: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless an assumed exchange says what it assumes."""
    hardware = basis.get("hardware")
    require(isinstance(hardware, str), "group.basis.hardware", hardware, "must be a text")
    require_number("group.basis.link", basis.get("link"), 1, above_zero=True)
    overhead = basis.get("overhead_ns_per_layer")
    require_number("group.basis.overhead_ns_per_layer", overhead, MOST_NS)


def _part(where: str, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    return require_mapping(f"{where}.{name}", data[name]) if name in data else {}


def _require_text(where: str, value: object) -> None:
    require(value is None or isinstance(value, str), where, value, "must be a text or null")


def _require_error(where: str, value: object) -> None:
    if value is not None:
        require_number(where, value, MOST_ERROR)
