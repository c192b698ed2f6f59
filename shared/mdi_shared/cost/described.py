"""Any step-time model: built again from its own description, and checked when a user wrote it.

Read next: `step_cost.py` (what a model must be able to do), `files.py` (models in files).
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

from mdi_shared.cost.hardware import stated_hardware
from mdi_shared.cost.linear import LinearCost, host_from_json
from mdi_shared.cost.predicted import KIND as PREDICTED
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import Efficiencies, RooflineCost
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import ConstantCost, HostCost, StepCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.errors import ConfigError
from mdi_shared.json_input import require_mapping, require_object

OWN = (LinearCost, PredictedCost, RooflineCost, ConstantCost)
BUILT_AGAIN = ("roofline", "linear", PREDICTED, "constant")


def cost_from_description(data: object, shape: ModelShape) -> StepCost:
    """Build the model whose `describe` returned `data`, for a run of `shape`.

    Raises `ConfigError` for a kind that only its author can build, and for broken parts.
    """
    own = require_mapping("cost", data)
    kind = own.get("kind")
    if kind == "linear":
        return LinearCost.from_description(own)
    if kind == PREDICTED:
        return PredictedCost.from_json(own)
    if kind == "roofline":
        names = ("kind", "hardware", "ep", "efficiencies", "host")
        own = require_object("cost", own, names, optional=("peaks",))
        shares = tuple(field.name for field in fields(Efficiencies))
        return RooflineCost(
            stated_hardware(own), shape, ep=own["ep"],
            efficiencies=Efficiencies(
                **require_object("cost.efficiencies", own["efficiencies"], (), shares)
            ),
            host=host_from_json(own["host"]),
        )  # fmt: skip
    if kind == "constant":
        own = require_object("cost", own, ("kind", "prefill_ns", "decode_ns", "host"))
        return ConstantCost(own["prefill_ns"], own["decode_ns"], host_from_json(own["host"]))
    raise ConfigError("cost.kind", kind, f"can be built again for {', '.join(BUILT_AGAIN)} only")


def require_step_cost(cost: StepCost, shape: ModelShape) -> None:
    """Raise `ConfigError` unless a model that a user wrote can serve: attributes, times, text.

    A copy of it is asked for the times of a few steps, which must be ints of at least 1 ns: one
    that draws noise is not disturbed.
    """
    if isinstance(cost, OWN):
        return
    name = type(cost).__name__
    for attribute in ("host", "device_ns", "describe"):
        if not hasattr(cost, attribute):
            raise ConfigError("cost", name, f"has no attribute {attribute}: a step-time model has "
                              "host (a HostCost), device_ns(work) and describe()")  # fmt: skip
    if not isinstance(cost.host, HostCost):
        raise ConfigError("cost.host", cost.host, f"of {name} must be a HostCost")
    _require_json(name, cost.describe())
    probed = deepcopy(cost)
    for what, work in (
        ("a prefill step of 1 token", prefill_work(shape, [(1, 1, 1)])),
        ("a prefill step of 2,048 tokens", prefill_work(shape, [(2_048, 2_048, 2_048)])),
        ("a decode step of 1 sequence", decode_work(shape, [1])),
        ("a decode step of 64 sequences", decode_work(shape, [1_024] * 64)),
    ):
        ns = probed.device_ns(work)
        if type(ns) is not int or ns < 1:
            raise ConfigError("cost.device_ns", ns, f"of {name} must be an int of at least 1 ns; "
                              f"this is for {what}")  # fmt: skip


def _require_json(name: str, description: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(description, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError("cost.describe", repr(description), f"of {name} must return plain JSON "
                          f"data ({error})") from error  # fmt: skip
    if not isinstance(description, dict) or not isinstance(description.get("kind"), str):
        raise ConfigError("cost.describe", text, f"of {name} must return a dict whose 'kind' "
                          "names the model")  # fmt: skip
