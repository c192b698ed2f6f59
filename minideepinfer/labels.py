"""What a simulated figure rests on, in one line: the cost model and how far it is calibrated.

The line is made from a run's metadata, so a run read from its files says the same as a fresh one.
It judges nothing: whether an error is small enough is the reader's business.

Read next: `run_summary.py`, which prints it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdi_analysis import MetadataLike


def label(metadata: "MetadataLike") -> str | None:
    """Return what the times of a run rest on; None for a run that was not simulated."""
    if metadata.source != "simulator":
        return None
    cost = (metadata.config or {}).get("cost")
    if not isinstance(cost, Mapping) or "kind" not in cost:
        return "simulated; the cost model was not recorded"
    ranks = (metadata.config or {}).get("ranks", 1)
    group = _group_label(cost.get("group"), ranks) if ranks > 1 else ""
    return f"simulated; step times: {cost_label(cost)}{group}"


def cost_label(cost: Mapping[str, Any]) -> str:
    """Return name and calibration of a cost model, given what its `describe()` said."""
    kind = cost["kind"]
    if kind == "roofline":
        return (
            f"roofline of {cost['hardware']} (ep {cost['ep']}), uncalibrated: "
            "peak rates times assumed efficiencies"
        )
    if kind == "linear":
        return f"fitted linear model, {_held_out(cost.get('fit', {}))}"
    if kind == "predicted":
        basis = cost.get("basis", {})
        return (
            f"predicted for {cost['hardware']} (ep {cost['ep']}), not measured: its roofline at "
            f"the efficiencies of {basis.get('model')} on {basis.get('hardware')}"
        )
    if kind == "constant":
        return "constant, an assumption"
    return f"{kind}, calibration not stated"


def _group_label(group: object, ranks: int) -> str:
    """Return what a fitted model's group term rests on; nothing when there is none."""
    if not isinstance(group, Mapping):
        return ""
    basis = group.get("basis", {})
    if basis.get("kind") == "assumed":
        return f"; exchange of {ranks} ranks assumed"
    found = {kind: basis.get(kind, {}).get("held_out", {}) for kind in ("prefill", "decode")}
    errors = [f"{kind} {each['mape']:.1%}" for kind, each in found.items() if each.get("mape")]
    stated = f", held-out error: {', '.join(errors)}" if errors else ""
    return f"; exchange fitted to groups of {group.get('ranks')}{stated}"


def _held_out(fit: Mapping[str, Any]) -> str:
    """Return the held-out error of a fit: `held_out_mape` of its prefill and decode parts."""
    errors = []
    for kind in ("prefill", "decode"):
        part = fit.get(kind)
        error = part.get("held_out_mape") if isinstance(part, Mapping) else None
        if isinstance(error, int | float) and not isinstance(error, bool):
            errors.append(f"{kind} {error:.1%}")
    return f"held-out error: {', '.join(errors)}" if errors else "held-out error not stated"
