"""Engram's gate: one block for each token and stream, statistics in float32.

A block reads its stream and key once and keeps them in registers; the value is shared by a token's
streams and comes from the cache but once. Sums have a fixed order: in a thread, in a warp, over
warps. Read next: `ops/engram.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.engram import BLOCKED, GATE_FLOOR, STATISTIC_EPS
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import WARP
from mdi_exec.ops.step_rows import StepTables

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


def ids_before_program(depth: int, length: int):
    """Look up to depth - 1 ids back from each token; a thread an id."""
    tokens, seqs, slots = T.dynamic("tokens"), T.dynamic("seqs"), T.dynamic("num_slots")

    @T.prim_func
    def ids_before_kernel(
        ids: T.Tensor((tokens,), "int64"),
        history: T.Tensor((slots, length), "int32"),
        positions: T.Tensor((tokens,), "int64"),
        seq_of_row: T.Tensor((tokens,), "int64"),
        starts: T.Tensor((seqs,), "int64"),
        slot_of_seq: T.Tensor((seqs,), "int64"),
        out: T.Tensor((tokens, depth), "int64"),
    ):
        with T.Kernel(T.ceildiv(tokens * depth, MOST_THREADS), threads=MOST_THREADS) as block:
            token = (block * MOST_THREADS + T.get_thread_binding()) // depth
            back = (block * MOST_THREADS + T.get_thread_binding()) % depth
            at, found = T.alloc_var("int64"), T.alloc_var("int64")
            if token < tokens:
                at = positions[token] - back
                found = BLOCKED
                if at >= T.int64(0):
                    if at >= starts[seq_of_row[token]]:
                        found = ids[token - back]
                    else:
                        found = T.cast(
                            history[slot_of_seq[seq_of_row[token]], at % length], "int64"
                        )
                out[token, back] = found

    return ids_before_kernel


def ids_before(ids: Tensor, history: Tensor, step: StepTables, depth: int) -> Tensor:
    """Launch `ids_before_program`; see `ops.engram.ids_before`."""
    out = ids.new_empty(len(ids), depth)
    if len(ids):
        compiled(ids_before_program, depth, history.shape[1])(
            ids, history, step.positions, step.seq_of_row, step.starts, step.slots, out
        )
    return out


def engram_rows_program(depth: int, heads: int, pad_id: int):
    """Hash each token's n-grams of 2 to `depth` ids, for every head; a thread a row number."""
    tokens, sizes = T.dynamic("tokens"), depth - 1
    columns = sizes * heads

    @T.prim_func
    def engram_rows_kernel(
        ids: T.Tensor((tokens, depth), "int64"),
        multipliers: T.Tensor((depth,), "int64"),
        primes: T.Tensor((sizes, heads), "int64"),
        offsets: T.Tensor((sizes, heads), "int64"),
        out: T.Tensor((tokens, columns), "int64"),
    ):
        with T.Kernel(T.ceildiv(tokens * columns, MOST_THREADS), threads=MOST_THREADS) as block:
            at = block * MOST_THREADS + T.get_thread_binding()
            token, size, head = at // columns, at % columns // heads, at % heads
            mixed, known = T.alloc_var("int64"), T.alloc_var("int32")
            if token < tokens:
                known = 1  # sticky: what lies behind a gap is not seen
                mixed = 0
                for back in T.unroll(depth):
                    if ids[token, back] == BLOCKED:
                        known = 0
                    if back <= size + 1:
                        mixed = mixed ^ (
                            T.if_then_else(known == 1, ids[token, back], T.int64(pad_id))
                            * multipliers[back]
                        )
                out[token, at % columns] = mixed % primes[size, head] + offsets[size, head]

    return engram_rows_kernel


def engram_rows(
    ids: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Launch `engram_rows_program`; see `ops.engram.engram_rows`."""
    out = ids.new_empty(len(ids), primes.numel())
    if len(ids):
        run = compiled(engram_rows_program, ids.shape[1], primes.shape[1], pad_id)
        run(ids.contiguous(), multipliers, primes, offsets, out)
    return out


SAMPLES = (
    *(
        Sample(engram_add_program, (4, width, has_gaps))
        for width in (5120, 128)
        for has_gaps in (False, True)
    ),
    Sample(ids_before_program, (4, 3)),
    Sample(engram_rows_program, (4, 8, 2)),
)
