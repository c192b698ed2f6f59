"""Kernels of routing: choosing experts, and adding results up.

The first is small and bound by latency, `combine` by memory: it reads each routed row once. Read
next: `grouping.py`, `ops/routing.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import WARP
from mdi_exec.ops.routing import WEIGHT_EPS

LOWEST = -3.0e38  # above minus infinity, which marks what is taken
LINEAR_FROM = 20.0  # torch's softplus is the identity above
ROUTE_WARPS = 4  # tokens a block of `route`
VECTOR = 8  # bfloat16 values of a 16-byte access


def route_program(num_experts: int, k: int, scale: float, parts: int):
    """Give each token a warp, which takes the best expert k times over."""
    tokens, bias_rows = T.dynamic("tokens"), T.dynamic("bias_rows")
    per_lane = -(-num_experts // WARP)

    @T.prim_func
    def main(
        logits: T.Tensor((parts, tokens, num_experts), "float32"),
        bias: T.Tensor((bias_rows, num_experts), "float32"),
        experts: T.Tensor((tokens, k), "int32"),
        weights: T.Tensor((tokens, k), "float32"),
    ):
        with T.Kernel(T.ceildiv(tokens, ROUTE_WARPS), threads=ROUTE_WARPS * WARP) as block:
            thread = T.get_thread_binding()
            lane = thread % WARP
            token = block * ROUTE_WARPS + thread // WARP
            scores = T.alloc_local((per_lane,), "float32")
            biased = T.alloc_local((per_lane,), "float32")
            chosen = T.alloc_local((k,), "int32")
            chosen_scores = T.alloc_local((k,), "float32")
            best, best_score = T.alloc_var("float32"), T.alloc_var("float32")
            best_id = T.alloc_var("int32")
            other, other_score = T.alloc_var("float32"), T.alloc_var("float32")
            other_id = T.alloc_var("int32")
            total, rank = T.alloc_var("float32"), T.alloc_var("int32")
            if token < tokens:
                _score_experts(logits, bias, token, lane, scores, biased)
                total = 0.0
                for slot in T.unroll(k):
                    best = -T.infinity("float32")
                    best_score = 0.0
                    best_id = num_experts
                    for i in T.unroll(per_lane):
                        if biased[i] > best:
                            best = biased[i]
                            best_score = scores[i]
                            best_id = i * WARP + lane
                    for step in T.unroll(5):
                        other = T.shfl_xor(best, 1 << step)
                        other_score = T.shfl_xor(best_score, 1 << step)
                        other_id = T.shfl_xor(best_id, 1 << step)
                        if other > best or (other == best and other_id < best_id):
                            best = other
                            best_score = other_score
                            best_id = other_id
                    chosen[slot] = best_id
                    chosen_scores[slot] = best_score
                    total = total + best_score
                    for i in T.unroll(per_lane):
                        if i * WARP + lane == best_id:
                            biased[i] = -T.infinity("float32")
                for slot in T.unroll(k):
                    if lane == slot:
                        rank = 0
                        for i in T.unroll(k):
                            rank = rank + T.if_then_else(chosen[i] < chosen[slot], 1, 0)
                        experts[token, rank] = chosen[slot]
                        weights[token, rank] = (
                            chosen_scores[slot] / (total + WEIGHT_EPS) * T.float32(scale)
                        )

    return main


@T.macro
def _score_experts(logits, bias, token, lane, scores, biased):
    """Compute this lane's experts' scores; minus infinity, biased, for those beyond the last."""
    x = T.alloc_local((1,), "float32")
    for i in T.unroll(scores.shape[0]):
        scores[i] = 0.0
        biased[i] = -T.infinity("float32")
        if i * WARP + lane < logits.shape[2]:
            x[0] = logits[0, token, i * WARP + lane]
            for part in T.unroll(1, logits.shape[0]):
                x[0] = x[0] + logits[part, token, i * WARP + lane]
            soft = T.if_then_else(x[0] > LINEAR_FROM, x[0], T.log1p(T.exp(x[0])))
            scores[i] = T.sqrt(soft)
            biased[i] = scores[i] + bias[T.min(token, bias.shape[0] - 1), i * WARP + lane]
            # No number: still an expert, so that what follows stays in bounds.
            biased[i] = T.max(biased[i], LOWEST)


def route(logits: Partial, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Launch `route_program`; see `ops.routing.route`."""
    parts, num_tokens, num_experts = logits.parts.shape
    experts = torch.empty((num_tokens, k), dtype=torch.int32, device=bias.device)
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=bias.device)
    if num_tokens:
        bias = bias.to(torch.float32).reshape(-1, num_experts).contiguous()
        program = compiled(route_program, num_experts, k, scale, parts)
        program(logits.parts.contiguous(), bias, experts, weights)
    return experts, weights


def combine_program(width: int, k: int):
    """Give each token a block; a thread adds up 8 neighbouring columns at a time."""
    assert width % VECTOR == 0, f"rows of {width} values do not consist of 16-byte vectors"
    tokens, num_rows = T.dynamic("tokens"), T.dynamic("num_rows")
    vectors = width // VECTOR
    threads = min(128, -(-vectors // WARP) * WARP)

    @T.prim_func
    def main(
        routed: T.Tensor((num_rows, width), "bfloat16"),
        position: T.Tensor((num_rows,), "int32"),
        shared: T.Tensor((tokens, width), "bfloat16"),
        out: T.Tensor((tokens, width), "bfloat16"),
    ):
        with T.Kernel(tokens, threads=threads) as token:
            thread = T.get_thread_binding()
            part = T.alloc_local((k + 1, VECTOR), "bfloat16")
            total = T.alloc_local((VECTOR,), "float32")
            for i in T.serial(T.ceildiv(vectors, threads)):
                vector = i * threads + thread
                if vector < vectors:
                    for slot in T.unroll(k):
                        row = position[token * k + slot]
                        for j in T.vectorized(VECTOR):
                            part[slot, j] = routed[row, vector * VECTOR + j]
                    for j in T.vectorized(VECTOR):
                        part[k, j] = shared[token, vector * VECTOR + j]
                    for j in T.unroll(VECTOR):
                        total[j] = 0.0
                        for slot in T.unroll(k + 1):
                            total[j] = total[j] + T.cast(part[slot, j], "float32")
                    for j in T.unroll(VECTOR):
                        part[k, j] = T.cast(total[j], "bfloat16")
                    for j in T.vectorized(VECTOR):
                        out[token, vector * VECTOR + j] = part[k, j]

    return main


def combine(routed: Tensor, position: Tensor, shared: Tensor) -> Tensor:
    """Launch `combine_program`; see `ops.routing.combine`."""
    num_tokens, width = shared.shape
    out = torch.empty_like(shared, memory_format=torch.contiguous_format)
    if num_tokens:
        program = compiled(combine_program, width, position.shape[0] // num_tokens)
        program(routed.contiguous(), position, shared.contiguous(), out)
    return out


SAMPLES = (
    Sample(route_program, (384, 6, 1.5, 8)),
    Sample(route_program, (128, 3, 1.5, 1)),
    Sample(route_program, (16, 3, 1.5, 1)),
    Sample(combine_program, (5120, 6)),
    Sample(combine_program, (128, 3)),
)
