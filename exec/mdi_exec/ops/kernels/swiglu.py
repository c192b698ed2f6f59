"""The experts' activation with the rounding (QA) of its result, as bfloat16 values.

The gate and linear halves come side by side, as the expert GEMM leaves them, or as two tensors.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import CHUNK, require_multiple, row_chunks, row_threads
from mdi_exec.ops.kernels.quantise import load_chunk, round_fp8
from mdi_exec.ops.quantise import GROUP
from mdi_exec.ops.swiglu import RowWeights


def _activate(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, +-limit), float32 with the reference's roundings."""
    a = T.min(gate, T.float32(limit))
    b = T.max(T.min(up, T.float32(limit)), T.float32(-limit))
    return T.ieee_mul(T.ieee_fdiv(a, T.float32(1) + T.exp(-a)), b)


@T.macro
def swiglu_row(gate, up, up_column, row_weights, order, out, row, inner, limit):
    """One row's results; up_column is where the linear half starts in `up`."""
    threads, thread = row_threads(inner), T.get_thread_binding()
    gates = T.alloc_local((CHUNK,), "float32")
    ups = T.alloc_local((CHUNK,), "float32")
    hidden = T.alloc_local((CHUNK,), "bfloat16")
    rounded = T.alloc_local((CHUNK,), "bfloat16")
    for c in T.unroll(row_chunks(inner)):
        column = (c * threads + thread) * CHUNK
        T.clear(gates)
        if column < inner:
            load_chunk(gate, row, column, gates)
            load_chunk(up, row, up_column + column, ups)
            for i in T.unroll(CHUNK):
                gates[i] = _activate(gates[i], ups[i], limit)
                if row_weights is not None:
                    gates[i] = T.ieee_mul(row_weights[order[row]], gates[i])
        for i in T.vectorized(CHUNK):
            hidden[i] = T.cast(gates[i], "bfloat16")
        for i in T.vectorized(CHUNK):
            gates[i] = T.cast(hidden[i], "float32")
        round_fp8(gates, rounded)  # all threads: their lanes exchange maxima
        if column < inner:
            for i in T.vectorized(CHUNK):
                out[row, column + i] = rounded[i]


def swiglu_halves_rows(inner: int, limit: float, weighted: bool):
    """both [rows, 2 * inner] (gate, up) and row weights to rounded [rows, inner].

    Row weights are float32 [count], of which order [rows] picks; only if `weighted`.
    """
    require_multiple(inner, GROUP)
    rows, count = T.dynamic("rows"), T.dynamic("count")

    if weighted:

        @T.prim_func
        def weighted_swiglu_kernel(
            both: T.Tensor((rows, 2 * inner), "bfloat16"),
            row_weights: T.Tensor((count,), "float32"),
            order: T.Tensor((rows,), "int32"),
            out: T.Tensor((rows, inner), "bfloat16"),
        ):
            with T.Kernel(rows, threads=row_threads(inner)) as row:
                swiglu_row(both, both, inner, row_weights, order, out, row, inner, limit)

        return weighted_swiglu_kernel

    @T.prim_func
    def swiglu_kernel(
        both: T.Tensor((rows, 2 * inner), "bfloat16"),
        out: T.Tensor((rows, inner), "bfloat16"),
    ):
        with T.Kernel(rows, threads=row_threads(inner)) as row:
            swiglu_row(both, both, inner, None, None, out, row, inner, limit)

    return swiglu_kernel


def swiglu_rows(inner: int, limit: float, weighted: bool):
    """As `swiglu_halves_rows`, from two tensors gate and up [rows, inner]."""
    require_multiple(inner, GROUP)
    rows, count = T.dynamic("rows"), T.dynamic("count")

    if weighted:

        @T.prim_func
        def weighted_swiglu_pair_kernel(
            gate: T.Tensor((rows, inner), "bfloat16"),
            up: T.Tensor((rows, inner), "bfloat16"),
            row_weights: T.Tensor((count,), "float32"),
            order: T.Tensor((rows,), "int32"),
            out: T.Tensor((rows, inner), "bfloat16"),
        ):
            with T.Kernel(rows, threads=row_threads(inner)) as row:
                swiglu_row(gate, up, 0, row_weights, order, out, row, inner, limit)

        return weighted_swiglu_pair_kernel

    @T.prim_func
    def swiglu_pair_kernel(
        gate: T.Tensor((rows, inner), "bfloat16"),
        up: T.Tensor((rows, inner), "bfloat16"),
        out: T.Tensor((rows, inner), "bfloat16"),
    ):
        with T.Kernel(rows, threads=row_threads(inner)) as row:
            swiglu_row(gate, up, 0, None, None, out, row, inner, limit)

    return swiglu_pair_kernel


def _halves(gate: Tensor, up: Tensor) -> Tensor | None:
    """Return the [R, 2I] tensor whose halves gate and up [R, I] are, or None."""
    rows, inner = gate.shape
    is_split = (
        gate.stride() == up.stride() == (2 * inner, 1)
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and up.storage_offset() == gate.storage_offset() + inner
    )
    return gate.as_strided((rows, 2 * inner), (2 * inner, 1)) if is_split else None


def _launch(builder, inputs: tuple[Tensor, ...], limit: float, row_weights: RowWeights | None, out):
    weights = () if row_weights is None else (row_weights.values.contiguous(), row_weights.order)
    if out.numel():
        kernel = compiled(builder, out.shape[1], limit, bool(weights))
        kernel(*(tensor.contiguous() for tensor in inputs), *weights, out)
    return out


def swiglu_halves(both: Tensor, limit: float, row_weights: RowWeights | None = None) -> Tensor:
    """Activate both [R, 2I] = (gate | up). Returns [R, I]."""
    rows, width = both.shape
    out = torch.empty(rows, width // 2, dtype=both.dtype, device=both.device)
    return _launch(swiglu_halves_rows, (both,), limit, row_weights, out)


def swiglu_quantise(
    gate: Tensor, up: Tensor, limit: float, row_weights: RowWeights | None
) -> Tensor:
    both = _halves(gate, up)
    if both is not None:
        return swiglu_halves(both, limit, row_weights)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return _launch(swiglu_rows, (gate, up), limit, row_weights, out)


SAMPLES = tuple(
    Sample(builder, (inner, limit, weighted))
    for builder in (swiglu_halves_rows, swiglu_rows)
    for inner, limit in ((2304, 10.0), (64, 2.5))
    for weighted in (True, False)
)
