"""Every op of the model on its own, at the shapes and with the data a forward pass gives it.

Three steps are run whose ops are caught (op_calls.py): a prefill step of --rows new tokens, and
decode steps of 64 sequences and of one, all ending at context --context. Each distinct call is then
timed alone (median, caches cold), beside the floor its operations and bytes set. Bytes count every
input and output once; of weights and pools, what is used. The error against the op's reference on
the same device is the largest difference over the reference's rms, at the decode steps (at the
prefill step with --check-all: references need much time and memory there).

    python benchmarks/bench_ops.py [--device cuda] [--preset flash-slice] [--experts N]
        [--rows 4096] [--context 131072] [--only NAME] [--quick] [--check-all] [--out FILE]
    python benchmarks/bench_ops.py --peers      # others' kernels beside ours instead (peers.py)

To try it without a GPU: --device cpu --preset tiny --context 512 --rows 64 --quick. The last line
of output is one JSON document with everything that was printed.
"""

import argparse
import traceback
from typing import Any

import torch
from gpu_timing import Table, add_common_options, finish, start
from op_calls import CallCatcher, OpCall, bytes_of, numbers_in, references_only
from peers import compare
from slice_model import build
from torch import Tensor

from mdi_exec.engine.device_timing import Ceilings, median_ms
from mdi_exec.engine.made_up_steps import filled_cache, random_batch
from mdi_exec.model.floors import StepShape, Work
from mdi_exec.model.transformer import Transformer
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.row_pool import RowPool

COLUMNS = {
    "op": -22, "shapes": -44, "calls": 5, "kernel": 6, "ms": 9, "floor ms": 9, "of floor": 8,
    "TFLOP/s": 8, "GB/s": 8, "error": 9,
}  # fmt: skip
PRODUCTS = ("matmul", "partial_matmul", "partial_gemm", "quantised_gemm", "expert_gemm", "hc_mixes")


def catch(model: Transformer, step: StepShape) -> list[OpCall]:
    """Return the calls of one step, the second time it runs."""
    cache, batch = filled_cache(model, step), random_batch(model, step)
    catcher = CallCatcher()
    model.forward(batch, cache)
    with catcher.catching():
        model.forward(batch, cache)
    return list(catcher.calls.values())


def work_of(call: OpCall, out: object, num_seqs: int) -> Work:
    """Return the least work of a call: operations of products, and the bytes it must move."""
    given = call.arguments
    if call.name in PRODUCTS:
        return _product_work(given, out)
    pools = [value for value in given.values() if isinstance(value, RowPool)]
    plain = sum(bytes_of(v) for v in given.values() if not isinstance(v, RowPool))
    moved = float(plain + bytes_of(out))
    if call.name.startswith("row_pool."):
        return Work(0.0, moved)  # the pool's rows weigh little against their values
    q = given.get("q")
    if call.name == "attend_staged":
        return _staged_work(given, moved)
    if not isinstance(q, Tensor) or not pools:
        return Work(0.0, moved)
    heads_width = q.shape[1] * q.shape[2]
    if call.name == "sparse_attention":
        lists = [
            given[name] for name in ("window_rows", "entry_rows") if given.get(name) is not None
        ]
        pairs = sum(int((rows >= 0).sum()) for rows in lists)
        read = pairs * sum(p.format.bytes_per_row for p in pools) / len(pools) / len(lists)
        return Work(4.0 * pairs * heads_width, moved + min(read, sum(map(bytes_of, pools))))
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    columns = outs[0].shape[-1]
    keys = num_seqs * columns * pools[0].format.bytes_per_row
    return Work(2.0 * outs[0].shape[0] * columns * heads_width, moved + keys)


def _staged_work(given: dict[str, Any], moved: float) -> Work:
    """Attention's operations over staged keys; of the keys, no more than all is read."""
    q, keys = given["q"], given["keys"]
    pairs = int((given["key_rows"] >= 0).sum())
    spared = max(0, bytes_of(keys) - pairs * bytes_of(keys[0]))
    return Work(4.0 * pairs * q.shape[1] * q.shape[2], moved - spared)


def _product_work(given: dict[str, Any], out: object) -> Work:
    """A product's operations; of stacked weights only as many experts as rows can ask for."""
    x = next(iter(given.values()))
    values = getattr(x, "codes", x)
    if isinstance(out, Partial):
        out = out.parts[0]
    results = out if isinstance(out, tuple) else (out,)
    rows, width = values.shape[0], values[0].numel()
    out_width = results[0][0].numel() if rows else 0
    weight = next(
        (v for name, v in given.items() if "weight" in name or name == "projection"), None
    )
    weight_bytes = float(bytes_of(weight))
    codes = getattr(weight, "codes", weight)
    if isinstance(codes, Tensor) and codes.dim() >= 3:
        weight_bytes *= min(1.0, rows / codes.shape[0])
    groups = given.get("groups")
    parts = groups if isinstance(groups, int) else 1
    return Work(2.0 * rows * width * out_width / parts, weight_bytes + bytes_of(x) + bytes_of(out))


# Two results, of which the rounded one has another form in a reference than in a kernel.
NORM_AND_ROUNDED = ("rms_norm_round", "hc_read_norm", "hc_write_read")


def error_of(call: OpCall) -> float | None:
    """Return the largest difference from the reference, over the reference's rms."""
    got = _result(call)
    with references_only():
        wanted = _result(call)
    if got is None or wanted is None or got.numel() == 0:
        return None
    if got.shape != wanted.shape:
        return float("nan")
    is_same = (got == wanted) | (got.isnan() & wanted.isnan())
    difference = torch.where(is_same, 0.0, (got - wanted).abs()).nan_to_num(nan=torch.inf)
    rms = wanted[torch.isfinite(wanted)].to(torch.float64).square().mean().sqrt()
    return float(difference.max() / max(float(rms), 1e-30))


def _result(call: OpCall) -> Tensor | None:
    """Return what a call gives as numbers: what it stored, or what of its output means anything."""
    if call.name == "rotate":  # in place: what comes next must find its input as it was
        return numbers_in(call.function(call.args[0].clone(), *call.args[1:], **call.options))
    out, given = call(), call.arguments
    if call.name in NORM_AND_ROUNDED:
        out = out[0]
    if isinstance(out, Partial):
        out = out.total()  # a reference has one part
    if call.name == "store_rows":
        return given["pool"].gather(given["index"]).to(torch.float32)
    if call.name == "score_entries":
        visible, listed = given["pages"].visible, given.get("listed")
        limit = visible if listed is None else listed.limit
        columns = torch.arange(out.shape[1], device=out.device)
        return out.to(torch.float32).masked_fill(columns >= limit.unsqueeze(1), 0.0)
    return numbers_in(out)


def shapes_of(call: OpCall) -> str:
    """Describe a call's arguments shortly."""
    parts = []
    for value in call.arguments.values():
        shown = getattr(value, "codes", value)
        if isinstance(shown, Tensor):
            parts.append("x".join(map(str, shown.shape)))
        elif isinstance(shown, bool | int):
            parts.append(str(shown))
    return " ".join(parts)


def measure(
    call: OpCall, num_seqs: int, ceiling: Ceilings, device: torch.device, *, repeat: int,
    checks: bool,
) -> list[Any]:  # fmt: skip
    """Return a table row. An op that fails gives a row that says so: the others still count."""
    name, shapes = call.name, shapes_of(call)
    kernel = "yes" if call.on_kernel else "no"
    try:
        error = error_of(call) if checks else None
        work = work_of(call, call(), num_seqs)
        ms = median_ms(call, device, repeat=repeat)
    except Exception as failure:  # noqa: BLE001 (one op's failure must not cost the others' rows)
        traceback.print_exception(failure, limit=-2)
        return [name, shapes, call.count, kernel, *[None] * 5, type(failure).__name__]
    floor = ceiling.floor_ms(*work)
    return [name, shapes, call.count, kernel, ms, floor, floor / ms,
            work.flops / ms / 1e9 or None, work.num_bytes / ms / 1e6, error]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser, preset="flash-slice")
    parser.add_argument("--rows", type=int, default=4_096, help="new tokens of the prefill step")
    parser.add_argument("--context", type=int, default=131_072, help="context at the step's end")
    parser.add_argument("--only", default="", help="ops whose names contain this")
    parser.add_argument("--quick", action="store_true", help="5 calls each instead of 20")
    parser.add_argument("--check-all", action="store_true", help="errors at the prefill step too")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="instead, the heavy ops of a prefill step beside others' kernels",
    )
    options = parser.parse_args()
    if not 1 <= options.rows <= options.context:
        parser.error("--rows must be at least 1 and at most --context")
    return options


@torch.inference_mode()
def main() -> None:
    options = parse()
    device, document, ceiling = start(options)
    document["tables"] = {}
    if options.peers:
        table = compare(options.rows, device, ceiling, repeat=5 if options.quick else 20)
        document["tables"]["peers"] = table.rows
        finish(options, document)
        return
    _, model = build(options, device)
    for title, num_seqs, rows in (
        ("prefill", 1, options.rows), ("decode 64", 64, 1), ("decode 1", 1, 1),
    ):  # fmt: skip
        calls = catch(model, StepShape(num_seqs, rows, options.context))
        table = Table(f"{title}: {num_seqs} x {rows} rows at context {options.context}", COLUMNS)
        table.head()
        for call in sorted(calls, key=lambda call: call.name):
            if options.only in call.name:
                table.add(*measure(
                    call, num_seqs, ceiling, device, repeat=5 if options.quick else 20,
                    checks=options.check_all or title != "prefill",
                ))  # fmt: skip
        document["tables"][title] = table.rows
        del calls, table
        if device.type == "cuda":
            torch.cuda.empty_cache()
    finish(options, document)


if __name__ == "__main__":
    main()
