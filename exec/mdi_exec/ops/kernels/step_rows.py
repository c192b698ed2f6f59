"""A step's row numbers and rotations, a block a row; see `ops/step_rows.py` for what they mean."""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.sparse_attention import NO_COLUMN, NONE
from mdi_exec.ops.step_rows import RATIOS, YARN, YARN_PAIR, StepRows, StepShape, StepTables

THREADS = 128
_TURNS = 3


@T.macro
def _window_row(shape, where, num_seqs, own, given, column, row):
    """Set row[0] to the row that a list of window keys has at `column`."""
    at, first, start, seq, slot = where
    ring = shape.rings[0]
    target = first + column
    if shape.in_ring:
        row[0] = slot * ring + target % ring
    else:
        row[0] = T.if_then_else(
            target >= start, num_seqs * ring + own + target - start, seq * ring + target % ring
        )
    if target > at:
        row[0] = NONE
    if at < given and given < shape.window and column >= given:
        row[0] = NO_COLUMN


@T.macro
def _put_entry(block_tables, seq, at, ratio, per_block, out, r, row):
    """Write the pool row of the entry that a row completes; 0 if it completes none."""
    entry = T.max(at - (ratio - 1), 0) // ratio
    out[r, row] = T.int64(0)
    if at % ratio == ratio - 1:
        block = T.cast(block_tables[seq, entry // per_block], "int64")
        out[r, row] = block * per_block + entry % per_block


@T.macro
def _put_target(at, end, slot, ring, out, r, row):
    """Write where in a slot's ring a row goes."""
    out[r, row] = T.int64(0)
    if ring > 0:
        out[r, row] = T.cast(T.if_then_else(at >= end - ring, slot, 0), "int64") * ring + at % ring


def _listed(visible, size, most):
    blocks = T.min((visible + size - 1) // size, most)
    newest = T.if_then_else(visible > 0, (visible - 1) % size + 1, 0)
    return T.max(blocks - 1, 0) * size + newest


def step_rows_program(window, rings, in_ring, block_tokens, list_size, list_ratio, half):
    shape = StepShape(window, rings, in_ring, block_tokens, list_size, list_ratio, 0)
    rows, seqs, width = T.dynamic("rows"), T.dynamic("seqs"), T.dynamic("width")

    @T.prim_func
    def step_rows_kernel(
        positions: T.Tensor((rows,), "int64"),
        seq_of_row: T.Tensor((rows,), "int64"),
        starts: T.Tensor((seqs,), "int64"),
        cu_q: T.Tensor((seqs + 1,), "int64"),
        k_len: T.Tensor((seqs,), "int64"),
        slots: T.Tensor((seqs,), "int64"),
        given_len: T.Tensor((seqs,), "int64"),
        window_from: T.Tensor((seqs,), "int64"),
        block_tables: T.Tensor((seqs, width), "int32"),
        frequencies: T.Tensor((2, half), "float32"),
        window_rows: T.Tensor((rows, window), "int32"),
        targets: T.Tensor((len(rings), rows), "int64"),
        seq_out: T.Tensor((rows,), "int32"),
        place: T.Tensor((rows,), "int32"),
        visible: T.Tensor((len(RATIOS), rows), "int32"),
        entries: T.Tensor((len(RATIOS), rows), "int64"),
        listed: T.Tensor((rows,), "int32"),
        cos: T.Tensor((_TURNS, rows, half), "float32"),
        sin: T.Tensor((_TURNS, rows, half), "float32"),
        most_listed: T.int32,
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            thread = T.get_thread_binding()
            at, seq = T.alloc_var("int32"), T.alloc_var("int32")
            start, first = T.alloc_var("int32"), T.alloc_var("int32")
            slot, given = T.alloc_var("int32"), T.alloc_var("int32")
            end, angle = T.alloc_var("int32"), T.alloc_var("float32")
            found = T.alloc_local((1,), "int32")
            at = T.cast(positions[row], "int32")
            seq = T.cast(seq_of_row[row], "int32")
            start = T.cast(starts[seq], "int32")
            slot = T.cast(slots[seq], "int32")
            given = T.cast(given_len[seq], "int32")
            end = T.cast(k_len[seq], "int32")
            first = T.max(T.max(at - (window - 1), T.cast(window_from[seq], "int32")), 0)
            for i in T.serial(T.ceildiv(window, THREADS)):
                if i * THREADS + thread < window:
                    _window_row(shape, (at, first, start, seq, slot), seqs,
                                T.cast(cu_q[seq], "int32"), given, i * THREADS + thread,
                                found)  # fmt: skip
                    window_rows[row, i * THREADS + thread] = found[0]
            for i in T.serial(T.ceildiv(_TURNS * half, THREADS)):
                turn, pair = (i * THREADS + thread) // half, (i * THREADS + thread) % half
                if turn < _TURNS:
                    angle = T.cast(T.if_then_else(turn == YARN_PAIR, T.max(at - 1, 0), at),
                                   "float32")  # fmt: skip
                    angle = angle * frequencies[T.min(turn, YARN), pair]
                    cos[turn, row, pair] = T.cos(angle)
                    sin[turn, row, pair] = T.sin(angle)
            if thread == 0:
                seq_out[row] = seq
                place[row] = at - start
                listed[row] = _listed((at + 1) // list_ratio, list_size, most_listed)
                for r, ratio in enumerate(RATIOS):
                    visible[r, row] = (at + 1) // ratio
                    _put_entry(block_tables, seq, at, ratio, block_tokens // ratio, entries, r, row)
                for r, ring in enumerate(rings):
                    _put_target(at, end, slot, ring, targets, r, row)

    return step_rows_kernel


def step_rows(step: StepTables, shape: StepShape, frequencies: Tensor) -> StepRows:
    num_rows, half, on = len(step.positions), frequencies.shape[1], step.positions.device

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=on)

    found = StepRows(
        empty(num_rows, shape.window), empty(len(shape.rings), num_rows, dtype=torch.int64),
        empty(num_rows), empty(num_rows), empty(len(RATIOS), num_rows),
        empty(len(RATIOS), num_rows, dtype=torch.int64), empty(num_rows),
        *(empty(_TURNS, num_rows, half, dtype=torch.float32) for _ in range(2)),
    )  # fmt: skip
    if num_rows:
        run = compiled(step_rows_program, *shape[:-1], half)
        run(*step, frequencies, *found, shape.most_listed)
    return found


SAMPLES = (
    Sample(step_rows_program, (128, (128, 1, 3), True, 128, 8, 1, 32)),
    Sample(step_rows_program, (128, (128, 1, 3), False, 128, 8, 1, 32)),
)
