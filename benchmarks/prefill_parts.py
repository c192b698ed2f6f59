"""A prefill step by kind of layer, and what all 40 layers of the released model would take.

Kinds of layers follow the released plan, so a full model's step is implied by adding up the medians
of its 40 layers. Read next: `bench_prefill.py`, which measures the medians.
"""

import statistics
from typing import Any

from gpu_timing import Table

from mdi_exec.engine.device_timing import Ceilings
from mdi_exec.model.config import ModelConfig
from mdi_exec.model.floors import StepShape, Work, engram_work, head_work, layer_work
from mdi_exec.model.transformer import Transformer
from mdi_exec.weights.presets import layer_kinds

ENGRAM = "+engram"
OTHERS = ("embedding", "engram", "head", "the rest")


def part_times(config: ModelConfig, found: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of one layer of each kind and of one of each other part."""
    by_kind: dict[str, list[float]] = {}
    for layer, kind in enumerate(layer_kinds(config)):
        by_kind.setdefault(kind.removesuffix(ENGRAM), []).append(found[f"layer {layer}"])
    times = {kind: statistics.median(values) for kind, values in by_kind.items()}
    for part in OTHERS:
        count = len(config.engram_layer_ids) if part == "engram" else 1
        times[part] = found.get(part, 0.0) / max(count, 1)
    return times


def part_floors(config: ModelConfig, step: StepShape, size: int) -> dict[str, Work]:
    """Return the least work of one layer of each kind and of the parts that have any.

    On one of `size` ranks, whose experts get as many rows as its own batch sends out.
    """
    floors: dict[str, Work] = {}
    own = config.n_routed_experts / size
    for layer, kind in enumerate(layer_kinds(config)):
        work = layer_work(config, config.layer_plan(layer), step, own)
        floors.setdefault(kind.removesuffix(ENGRAM), work)
    if config.engram_layer_ids:
        floors["engram"] = engram_work(config, step)
    floors["head"] = head_work(config, step.num_seqs)
    return floors


def implied(config: ModelConfig, times: dict[str, float]) -> dict[str, Any]:
    """Add the kinds' times up over the plan of `config`."""
    kinds = layer_kinds(config)
    counts = {kind: 0 for kind in times}
    for kind in kinds:
        counts[kind.removesuffix(ENGRAM)] += 1
    counts["engram"] = sum(kind.endswith(ENGRAM) for kind in kinds)
    counts |= {part: 1 for part in OTHERS if part != "engram"}
    return {"layers": len(kinds), "counts": counts,
            "step_ms": sum(counts[part] * times[part] for part in times)}  # fmt: skip


def report(
    model: Transformer, times: dict[str, float], step: StepShape, ceiling: Ceilings,
    target: ModelConfig,
) -> dict[str, Any]:  # fmt: skip
    """Print a line for each part and the implied step; returns both for the document.

    In a group of ranks layers' times include the exchange, and the floor has none.
    """
    floors = part_floors(model.config, step, model.exchange.size)
    whole = implied(target, times)
    table = Table(
        f"one layer of each kind, {step.rows} rows at context {step.context}",
        {"part": -24, "ms": 9, "floor ms": 9, "of floor": 9, "TFLOP/s": 9, "in model": 9,
         "share": 7},
    )  # fmt: skip
    table.head()
    floor_sum = 0.0
    for part, ms in times.items():
        work, count = floors.get(part, Work()), whole["counts"][part]
        floor = ceiling.floor_ms(work.flops, work.num_bytes)
        floor_sum += count * floor
        table.add(part, ms, floor or None, floor / ms if ms and floor else None,
                  work.flops / ms / 1e9 if ms and work.flops else None, count,
                  f"{count * ms / whole['step_ms']:.1%}")  # fmt: skip
    whole["floor_ms"] = floor_sum
    whole["input_tok_s_gpu"] = 1e3 * step.total_rows / whole["step_ms"]
    print(f"implied step of {whole['layers']} layers: {whole['step_ms']:.4g} ms, "
          f"{whole['input_tok_s_gpu']:.5g} tokens/s, floor {floor_sum:.4g} ms "
          "(added up from the table, not run)")  # fmt: skip
    return {"parts": table.rows, "implied": whole}
