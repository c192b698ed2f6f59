"""Hyper-connection coefficients per token: sigmoids, a softmax, and Sinkhorn's iteration.

n neighbouring lanes work on a token, each on one row of its n x n matrix: row sums stay in a lane,
column sums are butterflies, and nothing leaves the registers. Read next: `hyper_connections.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.hyper_connections import HcCoefficients
from mdi_exec.ops.kernels.jit import Sample, compiled

SPLIT_THREADS = 64  # few, so that a step's tokens spread over many multiprocessors


def _affine(value, scale, base):
    """value * scale + base, rounded twice as the reference does."""
    return T.ieee_add(T.ieee_mul(value, scale), base)


def _sigmoid(value):
    return T.float32(1) / (T.float32(1) + T.exp(-value))


@T.macro
def normalise_rows(mix, n, eps, total):
    """Divide a lane's row of the n x n matrix by its sum + eps."""
    total[0] = mix[0]
    for k in T.unroll(1, n):
        total[0] = total[0] + mix[k]
    for k in T.unroll(n):
        mix[k] = mix[k] / (total[0] + T.float32(eps))


@T.macro
def normalise_columns(mix, n, eps, total):
    """Divide each column by its sum + eps; the n rows lie in n neighbouring lanes."""
    for k in T.unroll(n):
        total[0] = mix[k]
        for step in T.unroll(n.bit_length() - 1):
            total[0] = total[0] + T.shfl_xor(total[0], T.shift_left(1, step))
        mix[k] = mix[k] / (total[0] + T.float32(eps))


@T.macro
def softmax_row(mix, n, eps, total):
    """Softmax of a lane's row, plus eps."""
    highest = T.alloc_local((1,), "float32")
    highest[0] = mix[0]
    for k in T.unroll(1, n):
        highest[0] = T.max(highest[0], mix[k])
    total[0] = T.float32(0)
    for k in T.unroll(n):
        mix[k] = T.exp(mix[k] - highest[0])
        total[0] = total[0] + mix[k]
    for k in T.unroll(n):
        mix[k] = mix[k] / total[0] + T.float32(eps)


@T.macro
def split_token(u, base, scale, token, valid, lane, n, iterations, eps, read, write, mix):
    """Coefficients of a token from its projections: lane q of n holds u[q], u[n + q], row q."""
    row = T.alloc_local((n,), "float32")
    total = T.alloc_local((1,), "float32")
    for k in T.unroll(n):
        row[k] = _affine(u[2 + k], scale[2], base[2 * n + lane * n + k])
    softmax_row(row, n, eps, total)
    normalise_columns(row, n, eps, total)
    for _ in T.serial(iterations - 1):
        normalise_rows(row, n, eps, total)
        normalise_columns(row, n, eps, total)
    if valid:
        read[token, lane] = _sigmoid(_affine(u[0], scale[0], base[lane])) + T.float32(eps)
        write[token, lane] = T.float32(2) * _sigmoid(_affine(u[1], scale[1], base[n + lane]))
        for k in T.vectorized(n):
            mix[token, lane * n + k] = row[k]


def hc_split_tokens(n: int, iterations: int, eps: float):
    """mixes float32 [rows, (2 + n) * n] to coefficients read, write [rows, n], mix [rows, n * n].

    n lanes work on a token; n is a power of two.
    """
    rows, size, tokens = T.dynamic("rows"), (2 + n) * n, SPLIT_THREADS // n

    @T.prim_func
    def hc_split_kernel(
        mixes: T.Tensor((rows, size), "float32"),
        base: T.Tensor((size,), "float32"),
        scale: T.Tensor((3,), "float32"),
        read: T.Tensor((rows, n), "float32"),
        write: T.Tensor((rows, n), "float32"),
        mix: T.Tensor((rows, n * n), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, tokens), threads=SPLIT_THREADS) as block:
            thread = T.get_thread_binding()
            token, lane = block * tokens + thread // n, thread % n
            u = T.alloc_local((2 + n,), "float32")
            T.clear(u)
            if token < rows:
                for k in T.unroll(2):
                    u[k] = mixes[token, k * n + lane]
                for k in T.unroll(n):
                    u[2 + k] = mixes[token, 2 * n + lane * n + k]
            split_token(
                u, base, scale, token, token < rows, lane, n, iterations, eps, read, write, mix
            )

    return hc_split_kernel


def hc_finish_tokens(parts: int, width: int, norm_eps: float, n: int, iterations: int, eps: float):
    """As `hc_split_tokens`, from partial projections and sums of squares, added part by part.

    projections float32 [parts, rows, (2 + n) * n], squares [parts, rows]; width: how many squares.
    """
    rows, size, tokens = T.dynamic("rows"), (2 + n) * n, SPLIT_THREADS // n

    @T.prim_func
    def hc_finish_kernel(
        projections: T.Tensor((parts, rows, size), "float32"),
        squares: T.Tensor((parts, rows), "float32"),
        base: T.Tensor((size,), "float32"),
        scale: T.Tensor((3,), "float32"),
        read: T.Tensor((rows, n), "float32"),
        write: T.Tensor((rows, n), "float32"),
        mix: T.Tensor((rows, n * n), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, tokens), threads=SPLIT_THREADS) as block:
            thread = T.get_thread_binding()
            token, lane = block * tokens + thread // n, thread % n
            u = T.alloc_local((2 + n,), "float32")
            square = T.alloc_local((1,), "float32")
            T.clear(u)
            T.clear(square)
            if token < rows:
                for part in T.unroll(parts):
                    square[0] = square[0] + squares[part, token]
                    for k in T.unroll(2):
                        u[k] = u[k] + projections[part, token, k * n + lane]
                    for k in T.unroll(n):
                        u[2 + k] = u[2 + k] + projections[part, token, 2 * n + lane * n + k]
            rstd = T.rsqrt(square[0] * T.float32(1.0 / width) + T.float32(norm_eps))
            for k in T.unroll(2 + n):
                u[k] = u[k] * rstd
            split_token(
                u, base, scale, token, token < rows, lane, n, iterations, eps, read, write, mix
            )

    return hc_finish_kernel


def _empty_coefficients(rows: int, n: int, device: torch.device) -> HcCoefficients:
    def empty(*shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=torch.float32, device=device)

    return HcCoefficients(empty(n), empty(n), empty(n, n))


def hc_split(
    mixes: Tensor, base: Tensor, scale: Tensor, *, n: int, iterations: int, eps: float
) -> HcCoefficients:
    found = _empty_coefficients(mixes.shape[0], n, mixes.device)
    if mixes.shape[0]:
        kernel = compiled(hc_split_tokens, n, iterations, eps)
        kernel(mixes.contiguous(), base, scale, found.read, found.write, found.mix.flatten(1))
    return found


def hc_finish(
    parts: Tensor, squares: Tensor, base: Tensor, scale: Tensor, *, width: int, norm_eps: float,
    n: int, iterations: int, eps: float,
) -> HcCoefficients:  # fmt: skip
    found = _empty_coefficients(parts.shape[1], n, parts.device)
    if parts.shape[1]:
        kernel = compiled(hc_finish_tokens, parts.shape[0], width, norm_eps, n, iterations, eps)
        kernel(parts.contiguous(), squares.contiguous(), base, scale,
               found.read, found.write, found.mix.flatten(1))  # fmt: skip
    return found


_N = 4
SAMPLES = (
    Sample(hc_split_tokens, (_N, 20, 1e-6)),
    *(Sample(hc_finish_tokens, (8, _N * width, 1e-20, _N, 20, 1e-6)) for width in (5120, 128)),
)
