"""How well a fit predicts: errors on its own steps, on shapes held out, and beyond its range.

Errors are relative to the measured time and counted per step, shapes seen often more often. What
is held out is predicted by a fit that has seen nothing of its shape, columns chosen anew.

Read next: `steps.py`, docs/calibration.md (how to read the figures).
"""

from typing import Any

import numpy as np

from mdi_sim.fit.features import FEATURES, Floats, Steps
from mdi_sim.fit.steps import FittedSteps, fit_steps
from mdi_traces.columns import Ints

FOLDS = 5
FEWEST_TO_TRAIN = 10
LAST_DECILE = 90.0
CONTROL_MAPE, CONTROL_P90 = 0.10, 0.20  # larger errors: not fit to choose chunk sizes by (§7.3)


def errors(measured: Floats, predicted: Floats) -> dict[str, Any]:
    """Return n, r2, and of relative errors: mape, p50, p90, max (absolute), bias (signed mean)."""
    relative = (predicted - measured) / measured
    size = np.abs(relative)
    total = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - predicted) ** 2).sum())
    return {
        "n": len(measured),
        "r2": 1.0 - missed / total if total > 0 else None,
        "mape": float(size.mean()),
        "p50": float(np.percentile(size, 50)),
        "p90": float(np.percentile(size, 90)),
        "max": float(size.max()),
        "bias": float(relative.mean()),
    }


def diagnose(steps: Steps, fitted: FittedSteps) -> dict[str, Any]:
    """Return everything known about the errors of `fitted`, JSON-able."""
    held_out = _held_out(steps)
    mape, p90 = held_out.get("mape"), held_out.get("p90")
    kept = [name for name in FEATURES[steps.kind] if name not in fitted.dropped]
    zero = [name for name in kept if getattr(fitted.terms, name) == 0]
    return {
        **errors(steps.ns, fitted.predict(steps)),
        "held_out_mape": mape,
        "held_out": held_out,
        "extrapolation": _extrapolation(steps),
        "usable_for_control": (
            mape is not None and p90 is not None and mape <= CONTROL_MAPE and p90 <= CONTROL_P90
        ),
        "dropped": dict(fitted.dropped),
        "zero": zero,
        "left_out": dict(steps.left_out),
    }


def folds(groups: list[tuple[int, ...]], count: int = FOLDS) -> Ints:
    """Return the fold of each step; a group is in one fold, the largest group is placed first."""
    members: dict[tuple[int, ...], int] = {}
    for group in groups:
        members[group] = members.get(group, 0) + 1
    loads = [0] * min(count, len(members))
    fold_of = {}
    for group in sorted(members, key=lambda group: (-members[group], group)):
        fold = loads.index(min(loads))
        loads[fold] += members[group]
        fold_of[group] = fold
    return np.array([fold_of[group] for group in groups], dtype=np.int64)


def _held_out(steps: Steps) -> dict[str, Any]:
    """Predict each shape by a fit on the others; errors in all, per fold and per class."""
    groups = steps.groups()
    fold = folds(groups)
    names = sorted(set(fold.tolist()))
    if len(names) < 2:
        return {"mape": None, "p90": None, "why_not": "all steps have one shape"}
    predicted = np.zeros(len(steps))
    for each in names:
        test = fold == each
        predicted[test] = fit_steps(steps.take(~test)).predict(steps.take(test))
    return {
        **errors(steps.ns, predicted),
        "shapes": len(set(groups)),
        "mape_of_folds": [_mape(steps.ns, predicted, fold == each) for each in names],
        "by_class": {
            name: errors(steps.ns[which], predicted[which])
            for name, which in steps.classes().items()
        },
    }


def _mape(measured: Floats, predicted: Floats, which: Any) -> float:  # noqa: ANN401 - a mask
    return float(np.abs(predicted[which] / measured[which] - 1.0).mean())


def _extrapolation(steps: Steps) -> dict[str, Any]:
    """Predict the tenth of the steps with the longest contexts by a fit on all shorter ones."""
    border = float(np.percentile(steps.max_k, LAST_DECILE))
    test = steps.max_k > border
    if not test.any() or int((~test).sum()) < FEWEST_TO_TRAIN:
        return {"mape": None, "why_not": "too few steps, or contexts too much alike"}
    seen, beyond = steps.take(~test), steps.take(test)
    return {
        **errors(beyond.ns, fit_steps(seen).predict(beyond)),
        "fitted_up_to_max_k": int(seen.max_k.max()),
        "tested_up_to_max_k": int(beyond.max_k.max()),
    }
