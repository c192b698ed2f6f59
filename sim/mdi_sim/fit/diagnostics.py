"""How well a fit predicts: errors on its own steps, on what was held out, and beyond its range.

Errors are relative to the measured time and counted per step, shapes seen often more often. What
is held out is predicted by a fit that has seen nothing of it, columns chosen anew: whole recordings
(what a new workload will meet), or shapes out of all of them (easier: clocks, routing and lengths
of the same recordings stay in the fit).

Read next: `steps.py`, docs/calibration.md (how to read the figures).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mdi_sim.fit.features import FEATURES, Floats, Steps
from mdi_sim.fit.steps import FittedSteps, fit_steps, predict
from mdi_traces.columns import Bools, Ints

OnFit = Callable[[int], None] | None

FOLDS = 5
FEWEST_TO_TRAIN = 10
LAST_DECILE = 90.0
CONTROL_MAPE, CONTROL_P90 = 0.10, 0.20  # larger errors: not fit to choose chunk sizes by (R32)


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


def diagnose(
    steps: Steps,
    fitted: FittedSteps,
    recording: Ints,
    on_fit: OnFit = None,
) -> dict[str, Any]:
    """Return everything known about the errors of `fitted`, JSON-able.

    `recording` [steps] is equal for steps of one recording. The error to go by is that on
    recordings held out, or on shapes where recordings cannot be. `on_fit` is called with 1 behind
    each fit.
    """
    by_shape = _held_out_shapes(steps, on_fit)
    held_out = _held_out_recordings(steps, recording, on_fit)
    if held_out["mape"] is None:
        held_out = {**by_shape, "why_not_recordings": held_out["why_not"]}
    mape = held_out["mape"]
    kept = [name for name in FEATURES[steps.kind] if name not in fitted.dropped]
    return {
        **errors(steps.ns, predict(fitted.terms, steps)),
        "held_out_mape": mape,
        "held_out": held_out,
        "held_out_shapes": by_shape,
        "extrapolation": _extrapolation(steps, on_fit),
        "usable_for_control": (
            mape is not None and mape <= CONTROL_MAPE and held_out["p90"] <= CONTROL_P90
        ),
        "dropped": dict(fitted.dropped),
        "zero": [name for name in kept if getattr(fitted.terms, name) == 0],
        "left_out": dict(steps.left_out),
    }


def folds(groups: Sequence[tuple[int, ...]], count: int = FOLDS) -> Ints:
    """Return the fold of each step; a group is in one fold, the largest group is placed first."""
    members = Counter(groups)
    loads = [0] * min(count, len(members))
    fold_of = {}
    for group in sorted(members, key=lambda group: (-members[group], group)):
        fold_of[group] = loads.index(min(loads))
        loads[fold_of[group]] += members[group]
    return np.array([fold_of[group] for group in groups], dtype=np.int64)


def _held_out_shapes(steps: Steps, on_fit: OnFit) -> dict[str, Any]:
    """Predict each shape by a fit on the others; errors in all, per fold and per class."""
    groups = steps.groups()
    fold = folds(groups)
    if not fold.any():
        return {"by": "shape", "mape": None, "why_not": "all steps have one shape"}
    whole, parts = _held_out(steps, fold, on_fit)
    return {"by": "shape", **whole, "shapes": len(set(groups)),
            "mape_of_folds": [errors(*part)["mape"] for part in parts]}  # fmt: skip


def _held_out_recordings(steps: Steps, recording: Ints, on_fit: OnFit) -> dict[str, Any]:
    """Predict each recording by a fit on the others; errors in all, per recording and per class."""
    names, counts = np.unique(recording, return_counts=True)
    if len(steps) - int(counts.max()) < FEWEST_TO_TRAIN:
        return {"mape": None, "why_not": f"without one recording, fewer than {FEWEST_TO_TRAIN} "
                                         f"{steps.kind} steps are left"}  # fmt: skip
    whole, parts = _held_out(steps, recording, on_fit)
    runs = [np.unique(steps.run[recording == name]).tolist() for name in names]
    return {"by": "recording", **whole,
            "recordings": [{"runs": own, **errors(*part)}
                           for own, part in zip(runs, parts, strict=True)]}  # fmt: skip


def _held_out(
    steps: Steps, part: Ints, on_fit: OnFit
) -> tuple[dict[str, Any], list[tuple[Floats, Floats]]]:
    """Predict each part by a fit on the others: errors, and (measured, predicted) of each part."""
    predicted = np.zeros(len(steps))
    masks = [part == each for each in np.unique(part)]
    for own in masks:
        predicted[own] = _predict_part(steps, own, on_fit)
    by_class = {name: errors(steps.ns[own], predicted[own])
                for name, own in steps.classes().items()}  # fmt: skip
    pairs = [(steps.ns[own], predicted[own]) for own in masks]
    return {**errors(steps.ns, predicted), "by_class": by_class}, pairs


def _predict_part(steps: Steps, test: Bools, on_fit: OnFit) -> Floats:
    """Predict the steps of `test` by a fit on all others."""
    predicted = predict(fit_steps(steps.take(~test)).terms, steps.take(test))
    if on_fit is not None:
        on_fit(1)
    return predicted


def _extrapolation(steps: Steps, on_fit: OnFit) -> dict[str, Any]:
    """Predict the tenth of the steps with the longest contexts by a fit on all shorter ones."""
    border = float(np.percentile(steps.max_k, LAST_DECILE))
    test = steps.max_k > border
    if not test.any() or int((~test).sum()) < FEWEST_TO_TRAIN:
        return {"mape": None, "why_not": "too few steps, or contexts too much alike"}
    predicted = _predict_part(steps, test, on_fit)
    return {
        **errors(steps.ns[test], predicted),
        "fitted_up_to_max_k": int(steps.max_k[~test].max()),
        "tested_up_to_max_k": int(steps.max_k[test].max()),
    }
