"""The experts' products on sm_90a, exact with bfloat16 or folded to FP8, and launchers for all.

The programs here give out memory, barriers and roles; what the roles do is `expert_source.py` and
`folded_source.py`. Other architectures multiply by `weight_gemm.py`'s loop.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.expert_gemm import portable_tile_rows
from mdi_exec.ops.folding import FoldedWeight
from mdi_exec.ops.gemm import QuantisedWeight
from mdi_exec.ops.kernels.expert_source import EXPERT_SOURCE
from mdi_exec.ops.kernels.folded_source import FOLDED_SOURCE
from mdi_exec.ops.kernels.jit import (
    Sample,
    by_hand,
    compiled,
    has_known_registers,
    multiprocessors,
)
from mdi_exec.ops.kernels.weight_gemm import portable_expert_gemm
from mdi_exec.ops.packing import FP4_BLOCK
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.routing import RowGroups

TILE = 128  # tokens of an item at most; more do not fit in registers
BAND = 256  # weight rows of an item
BOX = 16  # tokens of one copy
WORKERS = 16  # warps that decode and multiply
LOADERS = 2  # and one that loads weights, one that loads tokens
WARPGROUP = 128
# Below 48 tokens decoding takes longer than the product.
SIZES = (16, 32, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
FOLDED_SIZES = (16, 32, 48, 56, 64, 80, 96, 128)
STAGES = 4  # of bfloat16 tokens, 49 KB each
FOLDED_STAGES = 6  # of FP8 tokens, 33 KB each
# Numbers of the driver's interface for tensor copies: element types, and how copies are arranged.
UINT8, BFLOAT16 = 0, 9
NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_128_BYTES, FILL_WITH_ZEROS = 0, 3, 2, 0


@dataclass(frozen=True, slots=True)
class Ring:
    """Stages of a block's inputs, and barriers: a stage is filled, a stage was read by all.

    items holds two items in turn; `told`: there is an item, `heard`: everybody has read it.
    """

    tokens: Any
    codes: Any
    scales: Any
    items: Any
    ready: Any
    free: Any
    told: Any
    heard: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """A program's sizes: weights [experts, n, k], inputs in blocks, tokens in `parts` a block."""

    experts: int
    n: int
    k: int
    stages: int
    parts: int

    @property
    def blocks(self) -> int:
        return -(-self.k // FP4_BLOCK)

    @property
    def bands(self) -> int:
        return -(-self.n // BAND)


def _weights(plan: Plan):
    """Parameters' shapes: packed codes, and a byte for each group."""
    rows = (plan.experts, plan.blocks, plan.n)
    return T.Tensor((*rows, 16), "int32"), T.Tensor((*rows, 4), "uint8")


@T.macro
def _ring(plan):
    # Tokens first: their copies are swizzled, which asks for an alignment of 1,024 bytes.
    tokens = T.alloc_shared((plan.stages * plan.parts * TILE * 128,), "uint8")
    codes = T.alloc_shared((plan.stages * BAND * 64,), "uint8")
    scales = T.alloc_shared((plan.stages * BAND * 4,), "uint8")
    items = T.alloc_shared((2, 4), "int32")
    return Ring(
        tokens, codes, scales, items, T.alloc_barrier([LOADERS] * plan.stages),
        T.alloc_barrier([WORKERS] * plan.stages), T.alloc_barrier([1, 1]),
        T.alloc_barrier([WORKERS + LOADERS - 1] * 2),
    )  # fmt: skip


@T.macro
def _take_items(plan, ring, words, scales, tiles, queue, num_blocks):
    """Take items from the queue, tell them to everybody, and load their weights."""
    tile_expert, tile_start, offsets, tile = tiles
    expert, item = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
    start, count, parts = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    turn, stage = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
    phase, asked = T.alloc_var("int32", init=1), T.alloc_var("int32")
    asked = T.call_extern("int32", "mdi::ask", T.address_of(queue[0]))
    while expert >= 0:
        item = T.call_extern("int32", "mdi::told", asked)
        expert = -1
        start = 0
        count = 0
        if item < tile_expert.shape[0] * plan.bands:
            expert = tile_expert[item // plan.bands]
        if expert >= 0:
            # An expert's tiles are made equally high, in whole groups of eight tokens.
            count = offsets[expert + 1] - offsets[expert]
            parts = (count + tile - 1) // tile
            count = (count + 8 * parts - 1) // (8 * parts) * 8
            start = (
                offsets[expert] + (tile_start[item // plan.bands] - offsets[expert]) // tile * count
            )
            count = T.min(count, offsets[expert + 1] - start)
        T.mbarrier_wait_parity(ring.heard[turn % 2], (turn // 2 + 1) % 2)
        if T.shuffle_elect(32):
            T.call_extern(
                "handle", "mdi::tell", T.address_of(ring.items[turn % 2, 0]),
                T.if_then_else(expert < 0, -1, item % plan.bands), start, count, expert,
                ring.told[turn % 2],
            )  # fmt: skip
        turn = turn + 1
        if expert >= 0:
            asked = T.call_extern("int32", "mdi::ask", T.address_of(queue[0]))
            T.call_extern(
                "handle", f"mdi::load_weights<{plan.stages}, {plan.blocks}>",
                T.address_of(ring.ready[0]), T.address_of(ring.free[0]),
                T.address_of(ring.codes[0]), T.address_of(ring.scales[0]),
                T.address_of(words[0, 0, 0, 0]), T.address_of(scales[0, 0, 0, 0]), expert, plan.n,
                item % plan.bands * BAND, T.min(plan.n - item % plan.bands * BAND, BAND), stage,
                phase,
            )  # fmt: skip
    T.call_extern("handle", "mdi::leave", T.address_of(queue[0]), num_blocks)


@T.macro
def _load_tokens(plan, ring, x, element, element_bytes):
    rows, k = x.shape
    T.call_extern(
        "handle", f"mdi::load_tokens<{plan.stages}, {TILE}, {plan.parts}, {plan.blocks}>",
        T.create_tma_descriptor(
            element, 2, x.data, k, rows, element_bytes, element_bytes * k, 128 // element_bytes,
            BOX, 1, 1, NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_128_BYTES, FILL_WITH_ZEROS,
        ),
        T.address_of(ring.ready[0]), T.address_of(ring.free[0]), T.address_of(ring.told[0]),
        T.address_of(ring.heard[0]), T.address_of(ring.items[0, 0]),
        T.address_of(ring.tokens[0]),
    )  # fmt: skip


def _work(plan, ring, multiplier, sizes, out, *more):
    """Return the call that multiplies items until there are none."""
    made = f"mdi::{multiplier}<{plan.stages}, {TILE}, {plan.blocks}>"
    return T.call_extern(
        "handle", f"mdi::work<{made}, {', '.join(map(str, sizes))}>",
        T.address_of(ring.told[0]), T.address_of(ring.heard[0]), T.address_of(ring.items[0, 0]),
        T.address_of(ring.ready[0]), T.address_of(ring.free[0]), T.address_of(ring.codes[0]),
        T.address_of(ring.scales[0]), T.address_of(ring.tokens[0]), T.address_of(out[0, 0]),
        plan.n, *more,
    )  # fmt: skip


@by_hand("bounds", "barriers")
def expert_program(n, k, experts):
    """out [rows, n] = x [rows, k] times the tile's expert's weight [n, k]^T, exactly decoded."""
    rows, tiles = T.dynamic("rows"), T.dynamic("tiles")
    plan = Plan(experts, n, k, STAGES, 2)
    codes_shape, scales_shape = _weights(plan)

    @T.prim_func
    def expert_gemm(
        x: T.Tensor((rows, k), "bfloat16"),
        words: codes_shape,
        scales: scales_shape,
        tile_expert: T.Tensor((tiles,), "int32"),
        tile_start: T.Tensor((tiles,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
        queue: T.Tensor((2,), "int32"),
        out: T.Tensor((rows, n), "bfloat16"),
        tile: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=(WORKERS // 4 + 1) * WARPGROUP):
            T.import_source(EXPERT_SOURCE + "}  // namespace mdi\n")
            ring = _ring(plan)
            warp = T.get_thread_binding() // 32
            if warp < WORKERS:
                T.set_max_nreg(112, 1)
                _work(plan, ring, "ExactMultiplier", SIZES, out)
            else:
                T.set_max_nreg(24, 0)
                if warp == WORKERS:
                    given = (tile_expert, tile_start, offsets, tile)
                    _take_items(plan, ring, words, scales, given, queue, blocks)
                if warp == WORKERS + 1:
                    _load_tokens(plan, ring, x, BFLOAT16, 2)

    return expert_gemm


@by_hand("bounds", "barriers")
def folded_program(n, k, experts):
    """The same of folded operands: x E4M3 with one scale a row, and a scale for each weight row."""
    rows, tiles = T.dynamic("rows"), T.dynamic("tiles")
    plan = Plan(experts, n, k, FOLDED_STAGES, 1)
    codes_shape, lifts_shape = _weights(plan)

    @T.prim_func
    def folded_gemm(
        x: T.Tensor((rows, k), "uint8"),
        token_scales: T.Tensor((rows,), "uint8"),
        words: codes_shape,
        lifts: lifts_shape,
        row_scales: T.Tensor((experts, n), "uint8"),
        tile_expert: T.Tensor((tiles,), "int32"),
        tile_start: T.Tensor((tiles,), "int32"),
        offsets: T.Tensor((experts + 1,), "int32"),
        queue: T.Tensor((2,), "int32"),
        out: T.Tensor((rows, n), "bfloat16"),
        tile: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=(WORKERS // 4 + 1) * WARPGROUP):
            T.import_source(EXPERT_SOURCE + FOLDED_SOURCE + "}  // namespace mdi\n")
            ring = _ring(plan)
            warp = T.get_thread_binding() // 32
            if warp < WORKERS:
                T.set_max_nreg(112, 1)
                _work(plan, ring, "FoldedMultiplier", FOLDED_SIZES, out,
                      T.address_of(row_scales[0, 0]), T.address_of(token_scales[0]))  # fmt: skip
            else:
                T.set_max_nreg(24, 0)
                if warp == WORKERS:
                    given = (tile_expert, tile_start, offsets, tile)
                    _take_items(plan, ring, words, lifts, given, queue, blocks)
                if warp == WORKERS + 1:
                    _load_tokens(plan, ring, x, UINT8, 1)

    return folded_gemm


def tile_rows(num_rows: int, num_experts: int) -> int:
    return TILE if has_known_registers() else portable_tile_rows(num_rows, num_experts)


def _launch(
    program: Any, inputs: tuple[Tensor, ...], n: int, groups: RowGroups, tile: int
) -> Tensor:
    (rows, k), device = inputs[0].shape, inputs[0].device
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    if rows:
        items = groups.tile_expert.shape[0] * -(-n // BAND)
        run = compiled(program, n, k, groups.offsets.shape[0] - 1)
        blocks = min(multiprocessors(device), items)
        given = (groups.tile_expert, groups.tile_start, groups.offsets, groups.queue)
        run(*inputs, *given, out, tile, blocks)
    return out


def expert_gemm(x: Tensor, weights: QuantisedWeight, groups: RowGroups, tile: int) -> Tensor:
    if not has_known_registers():
        return portable_expert_gemm(x, weights, groups, tile)
    scales = weights.scales.view(torch.uint8)
    inputs = (x.contiguous(), weights.codes, scales)
    return _launch(expert_program, inputs, weights.out_width, groups, tile)


def folded_gemm(x: Quantised, weights: FoldedWeight, groups: RowGroups, tile: int) -> Tensor:
    inputs = (
        x.codes.view(torch.uint8), x.scales.view(torch.uint8).flatten(), weights.codes,
        weights.lifts, weights.scales.view(torch.uint8),
    )  # fmt: skip
    return _launch(folded_program, inputs, weights.out_width, groups, tile)


SAMPLES = tuple(
    Sample(program, sizes, ("sm_90a",))
    for program in (expert_program, folded_program)
    for sizes in ((4608, 5120, 384), (5120, 2304, 384), (128, 64, 16))
)
