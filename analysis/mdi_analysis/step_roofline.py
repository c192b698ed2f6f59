"""How fast a step could be: its work, the fewest bytes it must move, and the time of both at peak.

Work is read back from the columns of the step table, to the last pair; formulas are those of
docs/rules.md, R31, in `mdi_shared.cost.flops` and `mdi_shared.cost.traffic`. A floor is no
prediction: no kernel reaches a machine's peak.

Read next: `mdi_shared/cost/roofline.py` (the model), `step_frames.py` (the frame).
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from mdi_analysis.frames import NS_PER_MS, OWN_KINDS, RunLike, floats, ints, is_kind, kind_codes
from mdi_analysis.step_times import device_ms
from mdi_shared.cost.flops import coefficients
from mdi_shared.cost.hardware import Hardware, hardware_by_name
from mdi_shared.cost.roofline import Efficiencies, RooflineCost
from mdi_shared.cost.shape import SHAPES, ModelShape, shape_from_mapping
from mdi_shared.cost.work import StepWork
from mdi_shared.errors import ConfigError

AT_PEAK = Efficiencies(tensor=1.0, vector=1.0, memory=1.0, link=1.0, overhead_ns_per_layer=0)
TOLERANCE = 1e-9  # of FLOPs: they are stored as float64

_COUNTS = ("n_seqs", "n_tokens", "n_consumer_rows", "sum_k", "max_k", "min_k", "sum_qk",
           "idx_pairs_r2", "idx_pairs_r1", "core_pairs", "swa_pairs")  # fmt: skip


def roofline_position(
    frame: pd.DataFrame, shape: ModelShape, hardware: Hardware | str, *, ep: int = 1
) -> pd.DataFrame:
    """Return where each step lies on the roofline of `hardware`; the index is the frame's.

    `frame` is a step table or a `steps_frame`, `shape` the dimensions it ran with, `ep` over how
    many ranks experts are split. `flops` are FP8-equivalent (R31), `moved_bytes` the fewest,
    `intensity` their ratio in FLOP/byte. `compute_ms` and `memory_ms` are what each alone takes at
    peak; `floor_ms` takes, part of the model by part, the longer of the two, one part after the
    other. `roofline_share` is floor_ms / device time, and `bound` says which of the two makes up
    more of the floor, compute or memory. Steps without rows have NaN. Raises `ConfigError` when
    `shape` does not give the recorded FLOPs, `ep` does not divide the experts, or `hardware` names
    no known one.
    """
    peak = hardware_by_name(hardware) if isinstance(hardware, str) else hardware
    model = RooflineCost(peak, shape, ep=ep, efficiencies=AT_PEAK)
    rows = [_position(model, work) for work in step_works(frame, shape)]
    names = ("flops", "moved_bytes", "compute_ms", "memory_ms", "floor_ms", "bound")
    found = pd.DataFrame(rows, columns=names, index=frame.index)
    found.insert(2, "intensity", found["flops"] / found["moved_bytes"])
    device = device_ms(frame)
    share = found["floor_ms"] / np.where(device > 0, device, np.nan)
    found.insert(6, "roofline_share", share)
    return found


def _position(
    model: RooflineCost, work: StepWork | None
) -> tuple[float, float, float, float, float, str]:
    if work is None:
        return (np.nan, np.nan, np.nan, np.nan, np.nan, "")
    parts = model.explain(work).values()
    floor = sum(part.ns for part in parts)
    by_compute = sum(part.ns for part in parts if part.bound == "compute")
    return (
        float(sum(part.flops for part in parts)),
        float(sum(part.moved_bytes for part in parts)),
        sum(part.compute_ns for part in parts) / NS_PER_MS,
        sum(part.memory_ns for part in parts) / NS_PER_MS,
        floor / NS_PER_MS,
        "compute" if by_compute >= floor - by_compute else "memory",
    )


def run_shape(run: RunLike) -> ModelShape:
    """Return the dimensions a run was made with, from its metadata.

    They lie in the configuration of a recorded run; a simulated one names a built-in model. Raises
    `ConfigError` when neither is there.
    """
    stated = (run.metadata.config or {}).get("shape")
    if isinstance(stated, Mapping):
        return shape_from_mapping(stated)
    if run.metadata.model in SHAPES:
        return SHAPES[run.metadata.model]
    raise ConfigError("shape", None, f"the metadata of the run have no dimensions, and its model "
                      f"{run.metadata.model!r} is none of {', '.join(SHAPES)}")  # fmt: skip


def step_works(frame: pd.DataFrame, shape: ModelShape) -> list[StepWork | None]:
    """Return the work of every step, None for steps without rows.

    Index keys made are not a column; they follow from the recorded FLOPs of attention. Raises
    `ConfigError` when `shape` does not give the recorded FLOPs.
    """
    own = is_kind(kind_codes(frame), *OWN_KINDS)
    prefill = is_kind(kind_codes(frame), "prefill", "mixed").tolist()
    counts = np.stack([ints(frame, "steps", name) for name in _COUNTS], axis=1).tolist()
    attn, total = (floats(frame, "steps", f"flops_{of}").tolist() for of in ("attn", "total"))
    works: list[StepWork | None] = []
    for i, row in enumerate(counts):
        if not own[i] or row[1] == 0:
            works.append(None)
            continue
        work = _work(shape, prefill[i], row, attn[i])
        if not (_close(work.flops_attn, attn[i]) and _close(work.flops_total, total[i])):
            at = f"step {frame['step'].iloc[i]} of rank {frame['rank'].iloc[i]}"
            raise ConfigError("shape", shape.name, f"is not what the run was made with: {at} has "
                              f"flops_total = {total[i]:.0f}, these dimensions give "
                              f"{work.flops_total}")  # fmt: skip
        works.append(work)
    return works


def _work(shape: ModelShape, is_prefill: bool, counts: list[int], flops_attn: float) -> StepWork:
    n_seqs, rows, consumers, sum_k, max_k, min_k, sum_qk, idx_r2, idx_r1, core, swa = counts
    c = coefficients(shape)
    without_keys, _ = c.flops(rows, consumers, 0, core + swa, idx_r2 + idx_r1)
    keys = max(round((flops_attn - without_keys) / c.key_row), 0)
    attn, total = c.flops(rows, consumers, keys, core + swa, idx_r2 + idx_r1)
    logits = n_seqs if is_prefill else rows
    return StepWork(
        is_prefill, n_seqs, rows, consumers, logits, sum_k, max_k, min_k, sum_qk,
        keys, idx_r2, idx_r1, core, swa, attn, total + c.logit_row * logits,
    )  # fmt: skip


def _close(ours: int, recorded: float) -> bool:
    return abs(ours - recorded) <= TOLERANCE * max(abs(recorded), 1.0)
