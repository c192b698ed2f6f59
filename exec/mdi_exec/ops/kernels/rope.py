"""Rotary embedding in place: only the rotated tail of each vector is read and written."""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import CHUNK, FLAT_THREADS, require_multiple
from mdi_exec.ops.kernels.quantise import round_values_fp4
from mdi_exec.ops.quantise import GROUP
from mdi_exec.ops.rope import Rotation

PAIRS = CHUNK // 2


@T.macro
def turn(raw, cosines, sines, inverse):
    """Rotate a thread's 4 pairs, every product and sum rounded once, as the reference does."""
    even = T.alloc_local((1,), "float32")
    odd = T.alloc_local((1,), "float32")
    turned = T.alloc_local((CHUNK,), "float32")
    for i in T.unroll(PAIRS):
        even[0] = T.cast(raw[2 * i], "float32")
        odd[0] = T.cast(raw[2 * i + 1], "float32")
        sine = -sines[i] if inverse else sines[i]
        turned[2 * i] = T.ieee_sub(T.ieee_mul(even[0], cosines[i]), T.ieee_mul(odd[0], sine))
        turned[2 * i + 1] = T.ieee_add(T.ieee_mul(even[0], sine), T.ieee_mul(odd[0], cosines[i]))
    for i in T.vectorized(CHUNK):
        raw[i] = T.cast(turned[i], "bfloat16")


@T.macro
def rotate_chunk(cos, sin, row, pair, values):
    """Rotate 8 bfloat16 values, the first of which belongs to rotation `pair`."""
    cosines = T.alloc_local((PAIRS,), "float32")
    sines = T.alloc_local((PAIRS,), "float32")
    for i in T.vectorized(PAIRS):
        cosines[i] = cos[row, pair + i]
    for i in T.vectorized(PAIRS):
        sines[i] = sin[row, pair + i]
    turn(values, cosines, sines, False)


def rotate_rows(heads: int, width: int, rotated: int, inverse: bool):
    """Rotate the last `rotated` of x [rows, heads * width]; cos and sin float32 [rows, rotated/2].

    `rotated` is a multiple of 8.
    """
    require_multiple(rotated, CHUNK)
    rows, per_head = T.dynamic("rows"), rotated // CHUNK
    per_row = heads * per_head

    @T.prim_func
    def rotate_kernel(
        x: T.Tensor((rows, heads, width), "bfloat16"),
        cos: T.Tensor((rows, rotated // 2), "float32"),
        sin: T.Tensor((rows, rotated // 2), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows * per_row, FLAT_THREADS), threads=FLAT_THREADS) as block:
            chunk = block * FLAT_THREADS + T.get_thread_binding()
            raw = T.alloc_local((CHUNK,), "bfloat16")
            cosines = T.alloc_local((PAIRS,), "float32")
            sines = T.alloc_local((PAIRS,), "float32")
            row, head = chunk // per_row, chunk % per_row // per_head
            pair = chunk % per_head * PAIRS
            column = width - rotated + chunk % per_head * CHUNK
            if chunk < rows * per_row:
                for i in T.vectorized(CHUNK):
                    raw[i] = x[row, head, column + i]
                for i in T.vectorized(PAIRS):
                    cosines[i] = cos[row, pair + i]
                for i in T.vectorized(PAIRS):
                    sines[i] = sin[row, pair + i]
                turn(raw, cosines, sines, inverse)
                for i in T.vectorized(CHUNK):
                    x[row, head, column + i] = raw[i]

    return rotate_kernel


def rotate_round_rows(heads: int, width: int, rotated: int):
    """As `rotate_rows`, and all of x rounded to FP4 values (QI), in `out`."""
    require_multiple(rotated, CHUNK)
    require_multiple(width, GROUP)
    rows, per_head = T.dynamic("rows"), width // CHUNK
    per_row = heads * per_head

    @T.prim_func
    def rotate_round_kernel(
        x: T.Tensor((rows, heads, width), "bfloat16"),
        cos: T.Tensor((rows, rotated // 2), "float32"),
        sin: T.Tensor((rows, rotated // 2), "float32"),
        out: T.Tensor((rows, heads, width), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(rows * per_row, FLAT_THREADS), threads=FLAT_THREADS) as block:
            chunk = block * FLAT_THREADS + T.get_thread_binding()
            raw = T.alloc_local((CHUNK,), "bfloat16")
            values = T.alloc_local((CHUNK,), "float32")
            rounded = T.alloc_local((CHUNK,), "bfloat16")
            row, head = chunk // per_row, chunk % per_row // per_head
            column = chunk % per_head * CHUNK
            T.clear(raw)
            if row < rows:
                for i in T.vectorized(CHUNK):
                    raw[i] = x[row, head, column + i]
                if column >= width - rotated:
                    rotate_chunk(cos, sin, row, (column - width + rotated) // 2, raw)
            for i in T.vectorized(CHUNK):
                values[i] = T.cast(raw[i], "float32")
            round_values_fp4(values, rounded)  # all threads: their lanes exchange maxima
            if row < rows:
                for i in T.vectorized(CHUNK):
                    out[row, head, column + i] = rounded[i]

    return rotate_round_kernel


def rotate_round(x: Tensor, rotation: Rotation) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        kernel = compiled(rotate_round_rows, *x.shape[1:], 2 * rotation.cos.shape[-1])
        kernel(x.contiguous(), rotation.cos, rotation.sin, out)
    return out


def rotate(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    """Rotate x [T, d] or [T, H, d] in place (a copy of it if it is not contiguous)."""
    x = x.contiguous()
    heads = x.shape[1] if x.dim() == 3 else 1
    if x.numel():
        rotated = 2 * rotation.cos.shape[-1]
        kernel = compiled(rotate_rows, heads, x.shape[-1], rotated, inverse)
        kernel(x.view(x.shape[0], heads, x.shape[-1]), rotation.cos.contiguous(),
               rotation.sin.contiguous())  # fmt: skip
    return x


SAMPLES = (
    *(Sample(rotate_rows, (64, 512, 64, inverse)) for inverse in (False, True)),
    *(Sample(rotate_rows, (8, 64, 16, inverse)) for inverse in (False, True)),
    *(Sample(rotate_round_rows, shape) for shape in ((32, 128, 64), (16, 32, 16))),
)
