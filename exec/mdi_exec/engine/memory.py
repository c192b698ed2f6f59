"""How much device memory a model will take, from its config alone, before anything is loaded.

Weights and cache are exact. Workspace, what a step holds beside them, is an upper bound: the
residual streams, plus the largest of the phases that follow one another (attention, selection,
experts, Engram, head). Read next: `cache.py` (what a block holds), `weights/names.py`.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mdi_exec.engine.options import GB
from mdi_exec.model.batch import BLOCK_TOKENS
from mdi_exec.model.cache import CacheLayout
from mdi_exec.model.config import ModelConfig
from mdi_exec.model.indexer import MAX_GATHERED_VALUES as INDEXER_GATHERS
from mdi_exec.model.indexer import MAX_SCORES
from mdi_exec.model.staged_keys import MAX_ENTRIES
from mdi_exec.numerics import Numerics
from mdi_exec.ops.hyper_connections import term_rows
from mdi_exec.ops.sampler import ROWS_AT_ONCE
from mdi_exec.ops.sparse_attention import MAX_GATHERED_VALUES as ATTENTION_GATHERS
from mdi_exec.ranks.exchange import WHOLE, ExpertShard
from mdi_exec.weights.names import TensorSpec, expected_tensors
from mdi_shared.errors import ConfigError

ROUTED_EXPERT = re.compile(r"\.ffn\.experts\.(\d+)\.")
ENGRAM_TABLE = ".engram.embed."
DRAFT_HEAD = "mtp."  # loaded where there are drafts
DRAFT_KEYS = re.compile(r"mtp\.\d+\.attn\.wkv\.")
NEVER_LOADED = ("vision.", "aligner.", "image_")  # but in the checkpoint
MARGIN = 1.1  # allocator rounding and small tensors
SAMPLER_ARRAYS = 8  # of float64 and int64, of as many rows as the sampler takes at once


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device. `copies` are unpacked copies of weights, `workspace` a step's peak."""

    weights: int
    copies: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.copies + self.cache + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: `rows` new tokens, `seqs` rows of logits, contexts of `context` tokens."""

    rows: int
    seqs: int
    context: int


def estimate_memory(
    layout: CacheLayout,
    limits: StepLimits,
    *,
    num_blocks: int,
    num_slots: int,
    copies_limit: float = 0.0,
    for_kernels: bool = False,
    engram_elsewhere: bool = False,
    shard: ExpertShard = WHOLE,
) -> MemoryEstimate:
    """Return what a model and its cache will take, on one rank of a group when `shard` says so.

    `copies_limit` bounds the bytes of unpacked weight copies (`ExpansionBudget`), `for_kernels`
    says that kernels run rather than references, `engram_elsewhere` that Engram's tables lie on
    another device. In a group every rank may have the largest step, all for one rank's experts.
    """
    config = layout.config
    specs = loaded_tensors(config, shard, with_draft=layout.with_draft)
    tables = sum(spec.nbytes for name, spec in specs.items() if ENGRAM_TABLE in name)
    weights = sum(spec.nbytes for spec in specs.values()) - tables * engram_elsewhere
    copies = min(int(copies_limit), _copied_bytes(specs, for_kernels=for_kernels))
    if for_kernels:
        copies += config.num_hidden_layers * _projection_terms_bytes(config)
    return MemoryEstimate(
        weights, copies, cache_bytes(layout, num_blocks, num_slots),
        workspace_bytes(config, layout.numerics, limits, for_kernels=for_kernels,
                        num_ranks=shard.size, ring=layout.window_rows),
    )  # fmt: skip


def loaded_tensors(
    config: ModelConfig, shard: ExpertShard = WHOLE, *, with_draft: bool = False
) -> dict[str, TensorSpec]:
    """Return the tensors that the text model loads: of a shard, its experts and table rows.

    Raises `ConfigError` when the group's size does not divide the routed experts.
    """
    own = [shard.experts(config.n_routed_experts)]
    if with_draft:
        own.append(shard.experts(config.dspark_n_routed_experts))
    left_out = NEVER_LOADED if with_draft else (DRAFT_HEAD, *NEVER_LOADED)
    found: dict[str, TensorSpec] = {}
    for name, spec in expected_tensors(config).items():
        expert, layers = ROUTED_EXPERT.search(name), name.startswith(DRAFT_HEAD)
        if name.startswith(left_out) or (expert and int(expert[1]) not in own[layers]):
            continue
        if ENGRAM_TABLE in name:
            spec = TensorSpec(spec.dtype, (len(shard.rows(spec.shape[0])), *spec.shape[1:]))
        found[name] = spec
        if DRAFT_KEYS.match(name):
            found[f"main rows: {name}"] = spec  # kept twice: `DraftHead.main_wkv`
    return found


def memory_line(estimate: MemoryEstimate, config: ModelConfig, shard: ExpertShard = WHOLE) -> str:
    """Say in one line what a rank will hold, before it loads."""
    own = shard.experts(config.n_routed_experts)
    parts = f"experts {own.start} to {own.stop - 1} of {config.n_routed_experts}"
    if config.engram_layer_ids:
        rows = sum(len(shard.rows(count)) for count in config.engram_num_embeddings)
        parts += f", {rows:,} of {sum(config.engram_num_embeddings):,} Engram rows"
    total = f"rank {shard.rank} of {shard.size}: {estimate.total / GB:.2f} GB"
    return f"{total} ({_split(estimate)}); {parts}"


def cache_bytes(layout: CacheLayout, num_blocks: int, num_slots: int) -> int:
    """Return the bytes of a cache with its tails; block, slot and tail 0 count."""
    per_pool = ((num_blocks, layout.bytes_per_block), (num_slots, layout.bytes_per_slot),
                (layout.num_tails, layout.bytes_per_tail))  # fmt: skip
    return sum(count * size for count, size in per_pool)


def _copied_bytes(specs: dict[str, TensorSpec], *, for_kernels: bool) -> int:
    """Bytes of copies of all weights that get one: bfloat16 of dense ones, or float32 of all."""
    total = 0
    for name, spec in specs.items():
        if f"{name.removesuffix('.weight')}.scale" not in specs or ENGRAM_TABLE in name:
            continue
        if spec.dtype == "F8_E4M3":
            total += spec.num_elements * (2 if for_kernels else 4)
        elif spec.dtype == "I8" and not for_kernels:
            total += 2 * spec.num_elements * 4
    return total


def _projection_terms_bytes(c: ModelConfig) -> int:
    """Bytes of a layer's two hyper-connection projections split into bfloat16 terms."""
    return 2 * term_rows(c.hc_width) * c.hc_mult * c.hidden_size * 2


def workspace_bytes(
    config: ModelConfig, numerics: Numerics, limits: StepLimits, *, for_kernels: bool,
    num_ranks: int = 1, ring: int | None = None,
) -> int:  # fmt: skip
    """Return an upper bound of what a step holds beside weights and cache, on each of the ranks.

    `ring` are positions of a window ring, left out: the window.
    """
    kept = config.sliding_window if ring is None else ring
    # A reference holds a float32 copy of its input and its output beside both.
    element = numerics.dtype.itemsize + (0 if for_kernels else 8)
    # Streams before and after a sublayer, and what attention read from them, twice.
    streams = 2 * limits.rows * (config.hc_mult + 1) * config.hidden_size * element
    phases = (
        _attention(config, limits, element, kept, for_kernels=for_kernels),
        _selection(config, limits, element, for_kernels=for_kernels),
        _experts(config, limits, element, for_kernels=for_kernels, num_ranks=num_ranks),
        _engram(config, limits, element, for_kernels=for_kernels, num_ranks=num_ranks),
        _head(config, limits, for_kernels=for_kernels),
    )
    staged = _staged(config, limits, kept) if for_kernels else 0
    return int(MARGIN * (streams + _row_numbers(config, limits) + staged + max(phases)))


def _row_numbers(c: ModelConfig, limits: StepLimits) -> int:
    """Index tensors that live all step long: windows, selection, candidates; int64 with masks."""
    each = 5 * c.sliding_window + 5 * c.index_topk + c.candidate_topk_blocks
    kept = 2 * limits.seqs * c.sliding_window
    return 8 * (limits.rows * each + kept)


def _staged(c: ModelConfig, limits: StepLimits, ring: int) -> int:
    """Decoded keys: the entries of a step's sequences, up to a limit, and one layer's window."""
    ratios = [r for r in c.compress_ratios[: c.num_hidden_layers] if r]
    blocks = limits.seqs * -(-limits.context // BLOCK_TOKENS)
    entries = blocks * (BLOCK_TOKENS // min(ratios)) if ratios else 0
    window = limits.rows + limits.seqs * ring
    return 2 * c.head_dim * (min(entries, MAX_ENTRIES) + window)


def _attention(
    c: ModelConfig, limits: StepLimits, element: int, ring: int, *, for_kernels: bool
) -> int:
    rows, wide = limits.rows, c.num_attention_heads * c.head_dim
    narrow = 3 * c.hidden_size + 3 * c.q_lora_rank + c.o_groups * c.o_lora_rank
    window = 2 * (rows + limits.seqs * ring) * c.head_dim
    held = (rows * (3 * wide + narrow) + window) * element
    if for_kernels:
        return held
    keys = rows * (c.sliding_window + c.index_topk) * c.head_dim
    gathered = max(min(keys, ATTENTION_GATHERS), (c.sliding_window + c.index_topk) * c.head_dim)
    largest = wide * max(c.q_lora_rank, c.o_lora_rank)
    return held + 24 * gathered + 12 * largest


def _selection(c: ModelConfig, limits: StepLimits, element: int, *, for_kernels: bool) -> int:
    ratios = [r for r in c.compress_ratios[: c.num_hidden_layers] if r]
    if not ratios:
        return 0
    columns = max(64, limits.context // min(ratios))
    queries = 3 * limits.rows * (c.index_n_heads * c.index_head_dim + c.hidden_size) * element
    if for_kernels:
        scores = min(limits.rows * columns, max(MAX_SCORES, columns))
        return queries + 4 * scores
    per_column = c.index_head_dim + c.index_n_heads
    scored = min(limits.rows * columns, max(INDEXER_GATHERS // per_column, columns))
    return queries + scored * (24 * per_column + 48)


def _experts(
    c: ModelConfig, limits: StepLimits, element: int, *, for_kernels: bool, num_ranks: int
) -> int:
    routed = num_ranks * limits.rows * c.num_experts_per_tok
    inner, hidden = c.moe_intermediate_size, c.hidden_size
    held = (routed + limits.rows) * (2 * hidden + 3 * inner) * element
    held += limits.rows * (2 * hidden * element + 8 * c.n_routed_experts)
    if num_ranks > 1:  # rows on the way there, packed and unpacked, and results on the way back
        held += 2 * (num_ranks * limits.rows + routed) * hidden * element
    return held if for_kernels else held + 2 * 12 * 2 * inner * hidden


def _engram(
    c: ModelConfig, limits: StepLimits, element: int, *, for_kernels: bool, num_ranks: int
) -> int:
    if not c.engram_layer_ids:
        return 0
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    out = (c.hc_mult + 1) * c.hidden_size
    looked_up = limits.rows * (columns * (16 + 2 * element) + out * element)
    if num_ranks > 1:  # codes, scales and row numbers of everybody, asked and answered
        looked_up += 4 * num_ranks * limits.rows * columns * 2
    if for_kernels:
        return looked_up
    return looked_up + 12 * columns * out + 20 * limits.rows * c.hc_mult * c.hidden_size


def _head(c: ModelConfig, limits: StepLimits, *, for_kernels: bool) -> int:
    logits = 2 * 4 * limits.seqs * c.vocab_size
    sampler = 8 * SAMPLER_ARRAYS * min(limits.seqs, ROWS_AT_ONCE) * c.vocab_size
    weight = 0 if for_kernels else 4 * c.vocab_size * c.hidden_size
    return logits + sampler + weight


def require_fits(estimate: MemoryEstimate, free: int, total: int, where: str) -> None:
    """Raise `ConfigError` unless the estimate fits in `free` bytes of the `total` on `where`.

    The message says what is needed, what is there, and which option to lower.
    """
    if estimate.total <= free:
        return
    without_cache = estimate.total - estimate.cache
    advice = "lower kv_cache_memory_gb, max_num_seqs or num_blocks"
    if without_cache > free:
        advice = "lower max_num_batched_tokens, or take a model of fewer layers or experts"
    there = f"{free / GB:.1f} of {total / GB:.1f} GB are free on {where}"
    raise ConfigError("device memory", f"{estimate.total / GB:.1f} GB",
                      f"needed ({_split(estimate)}), but {there}; {advice}")  # fmt: skip


def _split(estimate: MemoryEstimate) -> str:
    parts = {
        "weights": estimate.weights, "their copies": estimate.copies, "cache": estimate.cache,
        "a step's workspace": estimate.workspace,
    }  # fmt: skip
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())


def require_fits_on(estimate: MemoryEstimate, device: torch.device | str) -> None:
    """Do `require_fits` for a device; a CPU's workspace, too rough a bound there, is left out."""
    on = torch.device(device)
    if on.type == "cuda":
        free, total = torch.cuda.mem_get_info(on)
        require_fits(estimate, free, total, str(device))
    else:
        require_fits(replace(estimate, workspace=0), *host_memory(), "this machine")


def host_memory() -> tuple[int, int]:
    """Return the bytes of main memory that can be had, and all of it; a container's limit counts.

    Where the system does not say (it is no Linux), all of it can be had.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = dict(re.findall(r"(\w+):\s+(\d+) kB", _read(Path("/proc/meminfo"))))
    free = 1024 * int(said["MemAvailable"]) if "MemAvailable" in said else total
    group = Path("/sys/fs/cgroup")
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cached = dict(re.findall(r"(\w+) (\d+)", _read(group / "memory.stat")))
        kept = int(used) - int(cached.get("inactive_file", 0))
        free, total = min(free, int(limit) - kept), min(total, int(limit))
    return free, total


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
