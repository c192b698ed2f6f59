"""Others' kernels beside ours at a prefill step's shapes, in one run: `bench_ops.py --peers`.

FlashMLA and DeepGEMM come as vLLM's wheels carry them, TileKernels as its own package; whatever
cannot be imported is left out, and torch's library stands beside the dense products always. Inputs
are random. What a peer is spared stands in its row: it makes a time comparable or it does not. No
peer promises that a row's bits are independent of its batch.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_attention import HEADS, SELECTED, WIDTH, WINDOW, random_pool, selections
from gpu_timing import Table
from torch import Tensor

from mdi_exec.engine.device_timing import Ceilings, median_ms
from mdi_exec.numerics import Numerics
from mdi_exec.ops.expert_gemm import expert_gemm, tile_rows
from mdi_exec.ops.gemm import QuantisedWeight, quantised_gemm
from mdi_exec.ops.hyper_connections import HcProjection, hc_coefficients, hc_write
from mdi_exec.ops.index_scores import PagedRows, score_entries
from mdi_exec.ops.quantise import quantise_activation, round_fp4
from mdi_exec.ops.routing import group_rows
from mdi_exec.ops.row_pool import key_format
from mdi_exec.ops.sparse_attention import attend_staged

DENSE = {
    "wq_b": (32_768, 1_280, 1), "wo_a": (1_024, 4_096, 8), "wo_b": (5_120, 8_192, 1),
    "shared w1, w3": (4_608, 5_120, 1), "shared w2": (5_120, 2_304, 1), "wq_a": (1_280, 5_120, 1),
}  # fmt: skip
EXPERTS, CHOSEN, EXPERT_SHAPE = 384, 6, (4_608, 5_120)
INDEX_HEADS, INDEX_WIDTH, ENTRIES, PAGE = 32, 128, 32_768, 64
STREAMS, HIDDEN, COEFFICIENTS = 4, 5_120, 24
FP8_SCALES = "scales by 128, not 32"
COLUMNS = {"op": -16, "shape": -22, "who": -15, "ms": 8, "TFLOP/s": 8, "GB/s": 7, "of ceiling": 10,
           "spared": -40}  # fmt: skip

Call = Callable[[], object]


class Way(NamedTuple):
    """One kernel that does the work, and what it does not do that ours does."""

    who: str
    call: Call
    spared: str = ""


class Contest(NamedTuple):
    """One op: operations and bytes at least, and the ways to do it, ours first."""

    op: str
    shape: str
    flops: float
    num_bytes: float
    ways: list[Way]


def compare(rows: int, device: torch.device, ceiling: Ceilings, repeat: int) -> Table:
    """Time all contests and print them; a peer that fails has a row that says so."""
    table = Table(f"beside peers, {rows} rows", COLUMNS)
    table.head()
    torch.manual_seed(0)
    for make in (dense_products, attention, index_scores, experts, hyper_connections):
        for contest in make(rows, device):
            _measure(contest, table, device, ceiling, repeat)
    return table


def _measure(
    contest: Contest, table: Table, device: torch.device, ceiling: Ceilings, repeat: int
) -> None:
    op, shape, flops, num_bytes, ways = contest
    floor = ceiling.floor_ms(flops, num_bytes)
    for who, call, spared in ways:
        try:
            ms = median_ms(call, device, repeat=repeat)
        except Exception as failure:
            if who == "ours":
                raise
            table.add(op, shape, who, None, None, None, None, str(failure).splitlines()[0][:60])
            continue
        table.add(op, shape, who, ms, flops / ms / 1e9 or None, num_bytes / ms / 1e6, floor / ms,
                  spared)  # fmt: skip


def _module(name: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _deep_gemm() -> Any:  # noqa: ANN401
    return _module("vllm.third_party.deep_gemm")


def _bfloat16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def _fp8_weight(n: int, k: int, device: torch.device) -> QuantisedWeight:
    codes = (torch.randn(n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.full((n // 32, k // 32), 114, dtype=torch.uint8, device=device)
    return QuantisedWeight(codes, scales.view(torch.float8_e8m0fnu)).expanded(torch.bfloat16)


def dense_products(rows: int, device: torch.device) -> Iterator[Contest]:
    """Dense projections, from bfloat16 copies of FP8 weights."""
    peer = _deep_gemm()
    for name, (n, k, groups) in DENSE.items():
        weight = _fp8_weight(groups * n, k, device)
        x, values = _bfloat16(rows, groups * k, device=device), weight.values
        assert values is not None
        packed = weight.packed() if device.type != "cpu" else weight
        ways = [Way("ours", partial(quantised_gemm, x, packed, groups))]
        if groups == 1:
            out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
            ways.append(Way("library", partial(torch.mm, x, values.t(), out=out), "batch"))
            if peer is not None and name in ("wq_b", "wo_b"):
                ways.append(Way("DeepGEMM", partial(peer.bf16_gemm_nt, x, values, out), "batch"))
                left, right = _by_128(peer, x), peer.per_block_cast_to_fp8(values, False)
                run = partial(peer.fp8_gemm_nt, left, right, out)
                ways.append(Way("DeepGEMM FP8", run, FP8_SCALES))
        else:
            parts = x.view(rows, groups, k).transpose(0, 1), values.view(groups, n, k).mT
            ways.append(Way("library", partial(torch.bmm, *parts), "batch"))
        flops = 2.0 * rows * n * k * groups
        moved = 2.0 * (x.numel() + values.numel() + rows * n * groups)
        yield Contest(name, f"{groups} x ({k:,} to {n:,})", flops, moved, ways)


def _by_128(peer: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """x as FP8 with scales by 128 inputs, laid out as the peer's kernels read them."""
    codes, scales = peer.per_token_cast_to_fp8(x, False)
    return codes, peer.get_mn_major_tma_aligned_tensor(scales)


def attention(rows: int, device: torch.device) -> Iterator[Contest]:
    """Sparse attention over staged keys: a window, and entries drawn from all."""
    q = _bfloat16(rows, HEADS, WIDTH, device=device)
    keys = _bfloat16(ENTRIES + rows + WINDOW, WIDTH, device=device)
    own = torch.arange(rows, device=device).unsqueeze(1) + torch.arange(WINDOW, device=device)
    sink = torch.randn(HEADS, device=device)
    for kind, selected in selections(rows, ENTRIES, device).items():
        listed = torch.cat(((own + ENTRIES).to(torch.int32), selected), dim=1)
        ways = [Way("ours", partial(attend_staged, q, keys, listed, sink))]
        if _module("vllm._flashmla_C") is not None:
            peer = _module("vllm.third_party.flashmla.flash_mla_interface")
            run = partial(peer.flash_mla_sparse_fwd, q, keys.unsqueeze(1), listed.unsqueeze(1),
                          WIDTH**-0.5, WIDTH, sink)  # fmt: skip
            ways.append(Way("FlashMLA", run, "the order of sums of decode steps"))
        flops = 4.0 * rows * HEADS * WIDTH * (WINDOW + SELECTED)
        moved = 2.0 * (2 * q.numel() + keys.numel())
        yield Contest("attention", f"{WINDOW + SELECTED} keys, {kind}", flops, moved, ways)


def index_scores(rows: int, device: torch.device) -> Iterator[Contest]:
    """Scores of all entries, of which every row sees all but a few."""
    pool = random_pool(key_format(INDEX_WIDTH, Numerics.QUANTISED), ENTRIES + PAGE, device)
    number = torch.arange(rows, device=device, dtype=torch.int32)
    pages = PagedRows(
        torch.arange(1, ENTRIES // PAGE + 1, device=device, dtype=torch.int32).unsqueeze(0), PAGE,
        torch.zeros_like(number), number, ENTRIES - rows + 1 + number, rows == 1,
    )  # fmt: skip
    q = round_fp4(_bfloat16(rows, INDEX_HEADS, INDEX_WIDTH, device=device))
    weights = _bfloat16(rows, INDEX_HEADS, device=device)
    ways = [Way("ours", partial(score_entries, q, weights, pool, pages, ENTRIES))]
    peer = _deep_gemm()
    if peer is not None:
        keys = torch.randn(ENTRIES, INDEX_WIDTH, device=device).to(torch.float8_e4m3fn)
        run = partial(
            peer.fp8_mqa_logits, q.to(torch.float8_e4m3fn),
            (keys, torch.ones(ENTRIES, device=device)), weights.float(),
            torch.zeros_like(number), pages.visible, clean_logits=False,
        )  # fmt: skip
        ways.append(Way("DeepGEMM FP8", run, "FP4 keys decoded, one scale each"))
    pairs = rows * (2 * ENTRIES - rows + 1) / 2
    flops = 2.0 * pairs * INDEX_HEADS * INDEX_WIDTH
    yield Contest("index scores", f"{ENTRIES:,} keys", flops, 2.0 * rows * ENTRIES, ways)


def experts(rows: int, device: torch.device) -> Iterator[Contest]:
    """The experts' first product, six experts a row drawn evenly; rates count real rows."""
    n, k = EXPERT_SHAPE
    chosen = torch.rand(rows, EXPERTS, device=device).topk(CHOSEN).indices.sort(1).values.int()
    x = quantise_activation(_bfloat16(rows * CHOSEN, k, device=device))
    tile = tile_rows(x, rows * CHOSEN, EXPERTS)
    groups = group_rows(chosen.contiguous(), EXPERTS, tile)
    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.full((EXPERTS, n, k // 32), 120, dtype=torch.uint8, device=device)
    weights = QuantisedWeight(codes.view(torch.int8), scales.view(torch.float8_e8m0fnu))
    packed = weights.packed() if device.type != "cpu" else weights
    del weights, codes
    ways = [Way("ours", partial(expert_gemm, x, packed, groups, tile))]
    peer = _deep_gemm()
    if peer is not None:
        heights = -(-groups.counts // 128) * 128
        owner = torch.arange(EXPERTS, device=device, dtype=torch.int32).repeat_interleave(heights)
        padded = _bfloat16(len(owner), k, device=device)
        out = torch.empty(len(owner), n, dtype=torch.bfloat16, device=device)
        whole = torch.empty(EXPERTS, n, k, dtype=torch.bfloat16, device=device).normal_()
        right = (whole.to(torch.float8_e4m3fn), torch.ones(EXPERTS, n // 128, k // 128,
                                                           device=device))  # fmt: skip
        run = partial(peer.m_grouped_bf16_gemm_nt_contiguous, padded, whole, out, owner)
        ways.append(Way("DeepGEMM", run, "FP4 decoded: four times the bytes"))
        left = _by_128(peer, padded)
        run = partial(peer.m_grouped_fp8_gemm_nt_contiguous, left, right, out, owner)
        ways.append(Way("DeepGEMM FP8", run, f"FP4 decoded to FP8, {FP8_SCALES}"))
    flops, moved = 2.0 * rows * CHOSEN * n * k, EXPERTS * n * k * 17 / 32
    yield Contest("experts", f"{rows * CHOSEN:,} x ({k:,} to {n:,})", flops, moved, ways)


def hyper_connections(rows: int, device: torch.device) -> Iterator[Contest]:
    """Coefficients from the streams, and the streams written with them."""
    streams = _bfloat16(rows, STREAMS, HIDDEN, device=device)
    weight = torch.randn(COEFFICIENTS, STREAMS * HIDDEN, device=device) / 100
    base, scale = torch.randn(COEFFICIENTS, device=device), torch.ones(3, device=device)
    run = partial(hc_coefficients, streams, HcProjection(weight), base, scale, norm_eps=1e-20,
                  iterations=20, eps=1e-6)  # fmt: skip
    ways, peer = [Way("ours", run)], _deep_gemm()
    if peer is not None:
        sums = torch.empty(rows, COEFFICIENTS, device=device)
        squares = torch.empty(rows, device=device)
        product = partial(peer.tf32_hc_prenorm_gemm, streams.flatten(1), weight, sums, squares)
        ways.append(Way("DeepGEMM TF32", product, "float32 weights; all behind the product"))
    flops = 2.0 * rows * weight.numel()
    yield Contest("coefficients", "20,480 to 24", flops, 2.0 * streams.numel(), ways)

    made, output = run(), _bfloat16(rows, HIDDEN, device=device)
    ways = [Way("ours", partial(hc_write, streams, output, made))]
    tiles = _module("tile_kernels.mhc") if device.type == "cuda" else None
    if tiles is not None:
        post = partial(tiles.mhc_post_fwd, output.unsqueeze(0), streams.unsqueeze(0),
                       made.write.unsqueeze(0).unsqueeze(-1), made.mix.unsqueeze(0))  # fmt: skip
        ways.append(Way("TileKernels", post, "products and sums rounded one by one"))
    moved = 2.0 * (2 * streams.numel() + output.numel())
    yield Contest("streams written", "4 x 5,120", 0.0, moved, ways)
