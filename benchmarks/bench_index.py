"""The indexer's ops alone: scores of all entries, scores of listed candidates, top-k.

Rows are those of a prompt's last chunk, or (`decode`) one of each sequence. Candidates are drawn
at random for each row, so that rows share few; a model's neighbouring rows share most. Keys are of
one ratio: a layer that compresses two tokens into an entry has half as many as there are tokens.

    python benchmarks/bench_index.py [--rows 4096] [--entries 32768 65536] [--sequences 64 1]
        [--out FILE]

To try it without a GPU: --device cpu --rows 8 --entries 1024. The last line of output is one JSON
document with everything that was printed.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_timing import Table, finish, start
from torch import Tensor

from mdi_exec.engine.device_timing import Call, Ceilings, median_ms
from mdi_exec.numerics import Numerics
from mdi_exec.ops.index_scores import Listed, PagedRows, score_entries
from mdi_exec.ops.quantise import round_fp4
from mdi_exec.ops.row_pool import RowPool, key_format, store_rows
from mdi_exec.ops.step_rows import listed_columns
from mdi_exec.ops.top_entries import candidate_blocks, top_visible

HEADS, WIDTH, PAGE, LISTED_BLOCK = 32, 128, 128, 8
CANDIDATE_BLOCKS, SELECTED = 2_048, 512
KEYS_AT_ONCE = 2**18
COLUMNS = {
    "rows": 6, "entries": 7, "op": -24, "ms": 9, "TFLOP/s": 8, "GB/s": 7, "of ceiling": 10,
}  # fmt: skip


class Case(NamedTuple):
    """Queries [T, H, d] with head weights [T, H], keys, and where each row's keys are."""

    q: Tensor
    head_weights: Tensor
    keys: RowPool
    pages: PagedRows
    entries: int

    @property
    def listed(self) -> Listed:
        """Some blocks of each row, always the newest."""
        blocks, rows = self.entries // LISTED_BLOCK, len(self.q)
        drawn = torch.rand(rows, blocks, device=self.q.device).argsort(dim=1)
        ids = drawn[:, :CANDIDATE_BLOCKS].sort(dim=1).values.to(torch.int32)
        ids[:, -1] = blocks - 1
        limit = listed_columns(self.pages.visible, LISTED_BLOCK, ids.shape[1])
        return Listed(ids.contiguous(), LISTED_BLOCK, limit)

    @property
    def key_bytes(self) -> int:
        return self.keys.format.bytes_per_row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--rows", type=int, default=4_096, help="rows of one sequence")
    parser.add_argument("--entries", type=int, nargs="+", default=[32_768, 65_536])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 1],
                        help="sequences of one row each")  # fmt: skip
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    return parser.parse_args()


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def made(rows: int, sequences: int, entries: int, device: torch.device) -> Case:
    """Make a case: the last rows of one sequence, or a row of each of several."""
    pages_each = entries // PAGE
    num_keys = (1 + pages_each * sequences) * PAGE
    keys = RowPool(key_format(WIDTH, Numerics.QUANTISED), num_keys, device)
    for numbers in torch.arange(num_keys, device=device).split(KEYS_AT_ONCE):
        store_rows(keys, numbers, normal(len(numbers), WIDTH, device=device))
    tables = torch.randperm(pages_each * sequences, device=device) + 1
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    is_one = sequences == rows
    seq, place = (numbers, numbers * 0) if is_one else (numbers * 0, numbers)
    visible = numbers * 0 + entries if is_one else numbers + (entries - rows + 1)
    tables = tables.view(sequences, pages_each).to(torch.int32)
    pages = PagedRows(tables, PAGE, seq, place, visible, is_one)
    q = round_fp4(normal(rows, HEADS, WIDTH, device=device))
    return Case(q, normal(rows, HEADS, device=device) / HEADS, keys, pages, entries)


def measure(case: Case, table: Table, ceiling: Ceilings) -> None:
    """Time the ops on one case; scores in table rows with operations, selections with bytes."""
    rows, (q, weights, keys, pages, entries) = len(case.q), case
    few = min(entries, CANDIDATE_BLOCKS * LISTED_BLOCK)
    listed, sequences = case.listed, len(pages.block_tables)
    scores = score_entries(q, weights, keys, pages, entries)
    inside = score_entries(q, weights, keys, pages, few, listed)
    blocks = partial(candidate_blocks, block_size=LISTED_BLOCK, k=CANDIDATE_BLOCKS)
    calls: dict[str, tuple[Call, float, float]] = {
        "scores of all": (partial(score_entries, *case[:4], entries), 2.0 * HEADS * WIDTH * entries,
                          case.key_bytes * entries * sequences / rows),
        "scores of candidates": (partial(score_entries, *case[:4], few, listed),
                                 2.0 * HEADS * WIDTH * few, case.key_bytes * float(few)),
        "top of all": (partial(top_visible, scores, pages.visible, SELECTED), 0.0, 2.0 * entries),
        "top of candidates": (partial(top_visible, inside, listed.limit, SELECTED), 0.0, 2.0 * few),
        "candidate blocks": (partial(blocks, scores, pages.visible), 0.0, 2.0 * entries),
    }  # fmt: skip
    for op, (call, flops, moved) in calls.items():
        ms = median_ms(call, q.device)
        by_flops, by_bytes = rows * flops / ms / 1e9, rows * moved / ms / 1e6
        share = max(1e12 * by_flops / ceiling.flops_per_s, 1e9 * by_bytes / ceiling.bytes_per_s)
        table.add(rows, entries, op, ms, by_flops or None, by_bytes, share)


@torch.inference_mode()
def main() -> None:
    options = parse()
    device, document, ceiling = start(options)
    torch.manual_seed(0)
    table = Table(f"{HEADS} heads x {WIDTH}, {SELECTED} selected", COLUMNS)
    table.head()
    for entries in options.entries:
        measure(made(options.rows, 1, entries, device), table, ceiling)
    for sequences in options.sequences:
        measure(made(sequences, sequences, max(options.entries), device), table, ceiling)
    document["table"] = table.rows
    finish(options, document)


if __name__ == "__main__":
    main()
