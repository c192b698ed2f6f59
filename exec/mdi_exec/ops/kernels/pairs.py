"""Gated averages of pairs of tokens: a block a row, a thread four values at a time."""

import tilelang.language as T
from torch import Tensor

from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import require_multiple
from mdi_exec.ops.pairs import Tail
from mdi_exec.ops.step_rows import StepTables

VECTOR = 4
THREADS = 128


@T.macro
def _load(product, row, column, values):
    """Add up four values of a product [parts, rows, width]."""
    parts = product.shape[0]
    loaded = T.alloc_local((parts, VECTOR), "float32")
    for part in T.unroll(parts):
        for i in T.vectorized(VECTOR):
            loaded[part, i] = product[part, row, column + i]
    for i in T.unroll(VECTOR):
        values[i] = loaded[0, i]
        for part in T.unroll(1, parts):
            values[i] = values[i] + loaded[part, i]


def pool_pairs_program(width, parts, length):
    require_multiple(width, VECTOR)
    rows, seqs, tail_rows = T.dynamic("rows"), T.dynamic("seqs"), T.dynamic("tail_rows")

    @T.prim_func
    def pool_pairs_kernel(
        product: T.Tensor((parts, rows, width), "float32"),
        gates: T.Tensor((parts, rows, width), "float32"),
        tail: T.Tensor((tail_rows, 2, width), "float32"),
        positions: T.Tensor((rows,), "int64"),
        seq_of_row: T.Tensor((rows,), "int64"),
        starts: T.Tensor((seqs,), "int64"),
        slots: T.Tensor((seqs,), "int64"),
        pooled: T.Tensor((1, rows, width), "float32"),
        own: T.Tensor((rows, 2, width), "float32"),
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            value, gate = T.alloc_local((VECTOR,), "float32"), T.alloc_local((VECTOR,), "float32")
            value_0, gate_0 = (
                T.alloc_local((VECTOR,), "float32"),
                T.alloc_local((VECTOR,), "float32"),
            )
            at, before = T.alloc_var("int64"), T.alloc_var("int64")
            highest, low, high = (
                T.alloc_var("float32"),
                T.alloc_var("float32"),
                T.alloc_var("float32"),
            )
            seq, kept = seq_of_row[row], T.alloc_var("int64")
            at = positions[row]
            before = T.max(at - 1, T.int64(0))
            kept = slots[seq] * length + before % length
            for step in T.serial(T.ceildiv(width, THREADS * VECTOR)):
                column = (step * THREADS + T.get_thread_binding()) * VECTOR
                if column < width:
                    _load(product, row, column, value)
                    _load(gates, row, column, gate)
                    if before >= starts[seq]:
                        _load(product, row - T.cast(at - before, "int32"), column, value_0)
                        _load(gates, row - T.cast(at - before, "int32"), column, gate_0)
                    else:
                        for i in T.vectorized(VECTOR):
                            value_0[i] = tail[kept, 0, column + i]
                        for i in T.vectorized(VECTOR):
                            gate_0[i] = tail[kept, 1, column + i]
                    for i in T.vectorized(VECTOR):
                        own[row, 0, column + i] = value[i]
                    for i in T.vectorized(VECTOR):
                        own[row, 1, column + i] = gate[i]
                    for i in T.unroll(VECTOR):
                        highest = T.max(gate[i], gate_0[i])
                        low = T.exp(gate_0[i] - highest)
                        high = T.exp(gate[i] - highest)
                        value[i] = T.ieee_add(
                            T.ieee_mul(value_0[i], low / (low + high)),
                            T.ieee_mul(value[i], high / (low + high)),
                        )
                    for i in T.vectorized(VECTOR):
                        pooled[0, row, column + i] = value[i]

    return pool_pairs_kernel


def pool_pairs(
    product: Partial, gates: Partial, tail: Tail, step: StepTables
) -> tuple[Partial, Tensor]:
    """Launch `pool_pairs_program`; see `ops.pairs.pool_pairs`."""
    parts, rows, width = product.parts.shape
    pooled = product.parts.new_empty(1, rows, width)
    own = product.parts.new_empty(rows, 2, width)
    if rows:
        compiled(pool_pairs_program, width, parts, tail.length)(
            product.parts, gates.parts, tail.values, step.positions, step.seq_of_row, step.starts,
            step.slots, pooled, own,
        )  # fmt: skip
    return Partial(pooled, product.dtype), own


SAMPLES = (Sample(pool_pairs_program, (512, 8, 1)), Sample(pool_pairs_program, (64, 1, 1)))
