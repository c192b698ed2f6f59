"""Predicts step times on hardware, or for a model, that nothing was recorded on.

`transfer(fitted, …) -> PredictedCost`: the target's roofline at the efficiencies that the recorded
steps of a fitted model reach, prefill and decode apart. Host times are carried over.

Read next: `reached.py` (the efficiencies), `mdi_shared/cost/predicted.py` (the result),
docs/calibration.md ("Transfer").
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mdi_shared.cost.hardware import HARDWARE, Hardware, hardware_in
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import Efficiencies
from mdi_shared.cost.shape import ModelShape, shape_from_mapping
from mdi_shared.cost.work import StepWork
from mdi_shared.errors import ConfigError
from mdi_sim.fit.calibrate import read_recorded, require_alike
from mdi_sim.fit.diagnostics import errors
from mdi_sim.fit.features import DECODE, PREFILL, Steps, gather_steps
from mdi_sim.fit.reached import even_work, reached_by
from mdi_traces.schema import this_generator


def transfer(
    fitted: LinearCost,
    *,
    hardware: Hardware | None = None,
    shape: ModelShape | None = None,
    ep: int = 1,
    source_hardware: Hardware | None = None,
    origin: dict[str, Any] | None = None,
) -> PredictedCost:
    """Predict `shape` on `hardware` by what `fitted` reaches of its own hardware.

    Left out, hardware and shape are those `fitted` was fitted on: a prediction beyond its ranges.
    `source_hardware` states the peak rates of the recorded hardware where its name tells none.
    `origin` (file name and hash of the fitted model) goes into the basis. Raises `ConfigError`
    for a model that states no dimensions or no known hardware, and for ranges too narrow.
    """
    source = source_hardware if source_hardware is not None else known_hardware(fitted)
    own = fitted_shape(fitted)
    decode = reached_by(fitted, source, own, is_prefill=False)
    # From some hundred rows on a prefill step reads all experts, so that reading looks like fixed
    # time. Decode batches tell the two apart; the memory is the same.
    expected = Efficiencies(memory=decode.efficiencies.memory)
    prefill = reached_by(fitted, source, own, is_prefill=True, expected=expected)
    reached = {PREFILL: prefill, DECODE: decode}
    basis = {
        "generator": this_generator(),
        **(origin or {}),
        "hardware": source.name,
        "model": own.name,
        "ranges": {PREFILL: _lists(fitted.prefill_ranges), DECODE: _lists(fitted.decode_ranges)},
        "held_out_mape": {
            kind: fitted.fit.get(kind, {}).get("held_out_mape") for kind in (PREFILL, DECODE)
        },
        **{kind: each.describe() for kind, each in reached.items()},
    }
    return PredictedCost(
        hardware=hardware if hardware is not None else source,
        shape=shape if shape is not None else own,
        ep=ep,
        prefill=reached[PREFILL].efficiencies,
        decode=reached[DECODE].efficiencies,
        host=fitted.host,
        basis=basis,
    )


def known_hardware(fitted: LinearCost) -> Hardware:
    """Return the peak rates of the hardware whose name a fitted model states, as "NVIDIA H200"."""
    stated = str(fitted.fit.get("hardware"))
    hardware = hardware_in(stated)
    if hardware is not None:
        return hardware
    raise ConfigError("from_hardware", stated, "is what the model was fitted on, and no known peak "
                      f"rates bear that name: state one of {', '.join(HARDWARE)}")  # fmt: skip


def _lists(ranges: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    return {name: list(seen) for name, seen in ranges.items()}


def fitted_shape(fitted: LinearCost) -> ModelShape:
    """Return the dimensions a model was fitted for; raise `ConfigError` when it states none."""
    stated = fitted.fit.get("shape")
    if not isinstance(stated, dict):
        raise ConfigError("fit.shape", stated, "must hold the dimensions the model was fitted for")
    return shape_from_mapping(stated)


def prediction_errors(
    cost: PredictedCost, paths: Sequence[str | os.PathLike[str]]
) -> dict[str, dict[str, Any]]:
    """Return the errors of a prediction, by kind of step, on runs of its model and hardware.

    Steps are those a calibration would use; a decode batch counts as equally long contexts of the
    same sum. Raises `TraceError` and `ConfigError` as `calibrate` does, and for runs of another
    model or of other hardware.
    """
    runs = [read_recorded(path) for path in paths]
    require_alike(runs)
    name = str(runs[0].metadata.hardware)
    if hardware_in(name) not in (None, cost.hardware):
        raise ConfigError("hardware", cost.hardware.name, f"is predicted, but {runs[0].name} was "
                          f"recorded on {name}")  # fmt: skip
    stated = runs[0].metadata.config.get("shape")
    if isinstance(stated, dict) and shape_from_mapping(stated) != cost.shape:
        raise ConfigError("model", cost.shape.name, f"is predicted, but {runs[0].name} has the "
                          f"dimensions of {runs[0].metadata.model}")  # fmt: skip
    by_kind = {}
    for kind in (PREFILL, DECODE):
        steps = gather_steps([run.steps for run in runs], kind)
        if len(steps):
            predicted = [cost.device_ns(work) for work in _works(steps, cost.shape)]
            by_kind[kind] = errors(steps.ns, np.array(predicted, dtype=np.float64))
    return by_kind


def _works(steps: Steps, shape: ModelShape) -> list[StepWork]:
    """Return the work of recorded steps from their features."""
    works = []
    for features in steps.x.astype(np.int64).tolist():
        if steps.kind == DECODE:
            rows, sum_k, n_seqs = features
            works.append(even_work(shape, rows, n_seqs, sum_k, is_prefill=False))
            continue
        rows, consumers, idx_r2, idx_r1, core, swa, sum_k, n_seqs = features
        # The table has the pairs; index keys and what they cost are those of equal sequences.
        even = even_work(shape, rows, n_seqs, sum_k, is_prefill=True)
        exact = even._replace(consumer_rows=consumers, idx_pairs_r2=idx_r2, idx_pairs_r1=idx_r1,
                              core_pairs=core, swa_pairs=swa)  # fmt: skip
        works.append(exact)
    return works
