"""Engram's gate: one block for each token and stream, statistics in float32.

A block reads its stream and key once and keeps them in registers; the value is shared by a token's
streams and comes from the cache but once. Sums have a fixed order: in a thread, in a warp, over
warps. Read next: `ops/engram.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.engram import GATE_FLOOR, STATISTIC_EPS
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import WARP

VECTOR = 8  # bfloat16 values of a 16-byte access
MOST_THREADS = 128


@T.macro
def _add_up(sums, in_warp):
    """Add each of the three sums up over the block's threads."""
    thread = T.get_thread_binding()
    for s in T.unroll(3):
        sums[s] = T.warp_reduce_sum(sums[s])
        if thread % WARP == 0:
            in_warp[s, thread // WARP] = sums[s]
    T.sync_threads()
    for s in T.unroll(3):
        sums[s] = 0.0
        for w in T.unroll(in_warp.shape[1]):
            sums[s] = sums[s] + in_warp[s, w]


@T.macro
def _gate(sums, width: int, gate):
    """Set gate[0] from a stream's three sums: dot, squares of the stream, squares of the key."""
    root = T.alloc_var("float32")
    rstd_x = T.rsqrt(sums[1] / width + STATISTIC_EPS)
    rstd_key = T.rsqrt(sums[2] / width + STATISTIC_EPS)
    gate[0] = sums[0] * rstd_x * rstd_key * T.float32(width**-0.5)
    root = T.sqrt(T.max(T.abs(gate[0]), T.float32(GATE_FLOOR)))
    gate[0] = 1.0 / (1.0 + T.exp(-T.copysign(root, gate[0])))


def engram_add_program(streams_of_token: int, width: int, has_gaps: bool):
    """Add the gated value to every stream; `has_gaps`: a closed token's gate is 0."""
    assert width % VECTOR == 0, f"streams of {width} values do not consist of 16-byte vectors"
    tokens, n, vectors = T.dynamic("tokens"), streams_of_token, width // VECTOR
    threads = min(MOST_THREADS, -(-vectors // WARP) * WARP)
    turns, warps = -(-vectors // threads), threads // WARP

    @T.prim_func
    def main(
        streams: T.Tensor((tokens, n, width), "bfloat16"),
        looked_up: T.Tensor((tokens, n + 1, width), "bfloat16"),
        q_weight: T.Tensor((n, width), "bfloat16"),
        k_weight: T.Tensor((n, width), "bfloat16"),
        is_open: T.Tensor((tokens,), "uint8"),
        out: T.Tensor((tokens, n, width), "bfloat16"),
    ):
        with T.Kernel(tokens * n, threads=threads) as block:
            thread = T.get_thread_binding()
            token, stream = block // n, block % n
            x, key = (
                T.alloc_local((turns, VECTOR), "bfloat16"),
                T.alloc_local((VECTOR,), "bfloat16"),
            )
            q, k = T.alloc_local((VECTOR,), "bfloat16"), T.alloc_local((VECTOR,), "bfloat16")
            sums, gate = T.alloc_local((3,), "float32"), T.alloc_local((1,), "float32")
            in_warp = T.alloc_shared((3, warps), "float32")
            for s in T.unroll(3):
                sums[s] = 0.0
            for turn in T.unroll(turns):
                at = turn * threads + thread
                if at < vectors:
                    for j in T.vectorized(VECTOR):
                        x[turn, j] = streams[token, stream, at * VECTOR + j]
                    for j in T.vectorized(VECTOR):
                        key[j] = looked_up[token, stream, at * VECTOR + j]
                    for j in T.vectorized(VECTOR):
                        q[j] = q_weight[stream, at * VECTOR + j]
                    for j in T.vectorized(VECTOR):
                        k[j] = k_weight[stream, at * VECTOR + j]
                    for j in T.unroll(VECTOR):
                        a, b = T.cast(x[turn, j], "float32"), T.cast(key[j], "float32")
                        weighted = a * T.cast(q[j], "float32") * T.cast(k[j], "float32")
                        sums[0] = sums[0] + weighted * b
                        sums[1] = sums[1] + a * a
                        sums[2] = sums[2] + b * b
            _add_up(sums, in_warp)
            _gate(sums, width, gate)
            if has_gaps:
                gate[0] = T.if_then_else(is_open[token] == 0, T.float32(0.0), gate[0])
            for turn in T.unroll(turns):
                at = turn * threads + thread
                if at < vectors:
                    for j in T.vectorized(VECTOR):
                        key[j] = looked_up[token, n, at * VECTOR + j]
                    for j in T.unroll(VECTOR):
                        x[turn, j] = T.cast(
                            T.cast(x[turn, j], "float32") + gate[0] * T.cast(key[j], "float32"),
                            "bfloat16",
                        )
                    for j in T.vectorized(VECTOR):
                        out[token, stream, at * VECTOR + j] = x[turn, j]

    return main


def engram_add(
    streams: Tensor, looked_up: Tensor, q_weight: Tensor, k_weight: Tensor,
    is_open: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launch `engram_add_program`; see `ops.engram.engram_add`."""
    num_tokens, n, width = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if num_tokens:
        has_gaps = is_open is not None
        if is_open is None:
            is_open = torch.empty(num_tokens, dtype=torch.bool, device=streams.device)
        pairs = looked_up.contiguous().view(num_tokens, n + 1, width)
        weights = q_weight.contiguous(), k_weight.contiguous()
        program = compiled(engram_add_program, n, width, has_gaps)
        program(streams.contiguous(), pairs, *weights, is_open.view(torch.uint8), out)
    return out


SAMPLES = tuple(
    Sample(engram_add_program, (4, width, has_gaps))
    for width in (5120, 128)
    for has_gaps in (False, True)
)
