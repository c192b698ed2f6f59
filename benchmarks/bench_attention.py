"""Sparse attention alone: from quantised pools, and over staged keys, with staging beside it.

Each row sees a window of its own and as many entries as it selects: "random" ones, or "near" ones,
which rows beside one another share for the most part. "all in" adds what staging costs a layer:
its window, and its share of the entries when 6 layers read them. `bench_ops.py --peers` puts
FlashMLA beside it.

    python benchmarks/bench_attention.py [--rows 4096] [--entries 32768 65536] [--out FILE]

To try it without a GPU: --device cpu --rows 8 --entries 1024. The last line of output is one JSON
document with everything that was printed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_timing import Table, finish, start
from torch import Tensor

from mdi_exec.engine.device_timing import Ceilings, median_ms
from mdi_exec.numerics import Numerics
from mdi_exec.ops.row_pool import RowFormat, RowPool, entry_format, store_rows, window_format
from mdi_exec.ops.sparse_attention import attend_staged, sparse_attention

HEADS, WIDTH, WINDOW, SELECTED = 64, 512, 128, 512
SHARING_LAYERS = 6  # of a KV source, at least
COLUMNS = {
    "entries": 7, "selection": -9, "attention": -12, "ms": 8, "TFLOP/s": 8, "of ceiling": 10,
    "all in ms": 9, "TFLOP/s all in": 14,
}  # fmt: skip


class Queries(NamedTuple):
    """Queries [T, H, d], window keys and each row's of them [T, WINDOW], and the sink [H]."""

    q: Tensor
    window: RowPool
    window_rows: Tensor
    sink: Tensor


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--rows", type=int, default=4_096, help="queries")
    parser.add_argument("--entries", type=int, nargs="+", default=[32_768, 65_536])
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    return parser.parse_args()


def random_pool(row_format: RowFormat, rows: int, device: torch.device) -> RowPool:
    pool = RowPool(row_format, rows, device)
    values = torch.randn(rows, row_format.width, device=device).to(torch.bfloat16)
    store_rows(pool, torch.arange(rows, device=device), values)
    return pool


def selections(rows: int, entries: int, device: torch.device) -> dict[str, Tensor]:
    """Return rows of entries, int32 [rows, SELECTED], for either kind of selection."""
    drawn = [torch.rand(min(512, rows - at), entries, device=device).topk(SELECTED).indices
             for at in range(0, rows, 512)]  # fmt: skip
    random = torch.cat(drawn).sort(dim=1).values
    near = (torch.arange(rows, device=device).unsqueeze(1) // 64 * 8 + random % 2048) % entries
    return {"random": random.to(torch.int32), "near": near.to(torch.int32)}


def measure(queries: Queries, count: int, table: Table, ceiling: Ceilings) -> None:
    """Time attention over `count` entries, all ways and selections."""
    q, window, window_rows, sink = queries
    device, flops = q.device, 4.0 * q.shape[0] * HEADS * WIDTH * (WINDOW + SELECTED)
    entries = random_pool(entry_format(WIDTH, Numerics.QUANTISED), count, device)
    numbers = torch.arange(count + len(window.codes), device=device)
    keys = torch.empty(len(numbers), WIDTH, dtype=torch.bfloat16, device=device)
    window_keys, window_numbers = keys[count:], numbers[count:] - count
    staging = median_ms(partial(entries.gather, numbers[:count], keys[:count]), device)
    staging = staging / SHARING_LAYERS + median_ms(
        partial(window.gather, window_numbers, window_keys), device
    )
    for kind, selected in selections(q.shape[0], count, device).items():
        listed = torch.cat((window_rows + count, selected), dim=1)
        ways: dict[str, Callable[[], object]] = {
            "pools": partial(sparse_attention, *queries, entries=entries, entry_rows=selected),
            "staged": partial(attend_staged, q, keys, listed, sink),
        }
        for way, call in ways.items():
            ms = median_ms(call, device)
            whole = ms + staging * (way != "pools")
            share = 1e3 * flops / ms / ceiling.flops_per_s
            table.add(count, kind, way, ms, flops / ms / 1e9, share, whole, flops / whole / 1e9)


@torch.inference_mode()
def main() -> None:
    options = parse()
    device, document, ceiling = start(options)
    torch.manual_seed(0)
    rows = options.rows
    own = torch.arange(rows, device=device).unsqueeze(1)
    queries = Queries(
        torch.randn(rows, HEADS, WIDTH, device=device).to(torch.bfloat16),
        random_pool(window_format(WIDTH, Numerics.QUANTISED), rows + WINDOW, device),
        (own + torch.arange(WINDOW, device=device)).to(torch.int32),
        torch.randn(HEADS, device=device),
    )
    table = Table(f"{rows} rows, {HEADS} heads x {WIDTH}, {WINDOW + SELECTED} keys a row", COLUMNS)
    table.head()
    for count in options.entries:
        measure(queries, count, table, ceiling)
    document["table"] = table.rows
    finish(options, document)


if __name__ == "__main__":
    main()
