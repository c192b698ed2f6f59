"""The experts' products alone, exact and folded, with random weights and routing of a given skew.

No model is built: it takes seconds where `bench_ops.py`, which has the model's own routing, takes
minutes. Experts are drawn by Gumbel noise plus a bias of each expert, normal with deviation
--skew: 0.45 loads the fullest expert about four times the mean at 4,096 tokens, as the model's own
routing does. The error is the relative L2 one against the float64 product, of two experts' rows;
rounding to bfloat16 alone makes 1.66e-3.

    python benchmarks/bench_experts.py [--tokens 4096 1024 256 64] [--skew 0 0.45] [--experts 384]
        [--out FILE]
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Table, finish, start
from torch import Tensor

from mdi_exec.engine.device_timing import Ceilings, median_ms
from mdi_exec.ops.expert_gemm import ExpertWeights, expert_gemm, tile_rows
from mdi_exec.ops.folding import fold_rows, fold_weight
from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.quantise import quantise_activation
from mdi_exec.ops.routing import RowGroups, group_rows

SHAPES = {"w1 and w3": (4608, 5120), "w2": (5120, 2304)}
CHOSEN = 6
CHECKED = 2  # experts whose results are compared
COLUMNS = {
    "tokens": 7, "skew": 5, "fullest": 8, "product": -10, "numerics": -8, "ms": 8, "TFLOP/s": 8,
    "GB/s": 7, "of floor": 8, "L2 error": 10,
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024, 256, 64])
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 0.45])
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    return parser.parse_args()


def random_weight(n: int, k: int, device: torch.device) -> QuantisedWeight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 122, (n, k // 32), dtype=torch.uint8, device=device)
    return QuantisedWeight(codes.view(torch.int8), scales.view(torch.float8_e8m0fnu))


def stacked(
    made: list[QuantisedWeight], form: Callable[[QuantisedWeight], ExpertWeights]
) -> ExpertWeights:
    """Return packed weights of all experts, one below the other."""
    parts: list[Tensor] = []
    for index, weight in enumerate(made):
        packed = form(weight).packed()
        if not parts:
            parts = [part.new_empty(len(made), *part.shape) for part in packed.parts]
        for whole, part in zip(parts, packed.parts, strict=True):
            whole.view(torch.uint8)[index] = part.view(torch.uint8)
    return type(packed)(*parts)


def routed(tokens: int, experts: int, skew: float, device: torch.device) -> Tensor:
    bias = torch.randn(experts, device=device) * skew
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, device=device)))
    return (bias + noise).topk(CHOSEN, dim=1).indices.sort(dim=1).values.to(torch.int32)


def error_of(x: Tensor, out: Tensor, weights: list[QuantisedWeight], groups: RowGroups) -> float:
    difference = total = 0.0
    for weight, (first, last) in zip(weights, pairwise(groups.offsets.tolist()), strict=False):
        exact = x[first:last].double() @ weight.dequantised().double().t()
        difference += float((out[first:last].double() - exact).square().sum())
        total += float(exact.square().sum())
    return float((difference / max(total, 1e-30)) ** 0.5)


def measure(
    name: str, made: list[QuantisedWeight], runs: list[tuple[int, float, Tensor]], table: Table,
    ceiling: Ceilings,
) -> None:  # fmt: skip
    """Time one product with both numerics, for all routings."""
    n, k = SHAPES[name]
    for numerics, form in (("exact", lambda weight: weight), ("folded", fold_weight)):
        weights = stacked(made, form)
        for tokens, skew, chosen in runs:
            rows, device = chosen.numel(), chosen.device
            x = quantise_activation(torch.randn(rows, k, device=device).to(torch.bfloat16))
            assert isinstance(x, Tensor)
            tile = tile_rows(x, rows, len(made))
            groups = group_rows(chosen, len(made), tile)
            operand: Any = fold_rows(x) if numerics == "folded" else x

            def product(operand=operand, groups=groups, tile=tile, weights=weights) -> Tensor:  # noqa: ANN001
                return expert_gemm(operand, weights, groups, tile)

            error = error_of(x, product(), made[:CHECKED], groups)
            ms = median_ms(product, device)
            touched = int((groups.counts > 0).sum())
            flops = 2.0 * rows * n * k
            num_bytes = touched * n * k * 17 / 32 + rows * (2 * n + (1 + (numerics == "exact")) * k)
            fullest = float(groups.counts.max()) * len(made) / rows
            rates = (
                flops / ms / 1e9,
                num_bytes / ms / 1e6,
                ceiling.floor_ms(flops, num_bytes) / ms,
            )
            table.add(tokens, skew, fullest, name, numerics, ms, *rates, error)


@torch.inference_mode()
def main() -> None:
    options = parse()
    device, document, ceiling = start(options)
    torch.manual_seed(0)
    runs = [(tokens, skew, routed(tokens, options.experts, skew, device))
            for skew in options.skew for tokens in options.tokens]  # fmt: skip
    table = Table("experts' products; of the floor of bfloat16 products and bytes", COLUMNS)
    table.head()
    for name, (n, k) in SHAPES.items():
        made = [random_weight(n, k, device) for _ in range(options.experts)]
        measure(name, made, runs, table, ceiling)
    document["tables"] = {"experts": table.rows}
    finish(options, document)


if __name__ == "__main__":
    main()
