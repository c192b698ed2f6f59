"""Options of the engine: what a user may set beside the scheduler's own options.

Read next: `mdi_shared/config.py` (the scheduler's options), `engine.py`.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch

from mdi_exec.model.batch import BLOCK_TOKENS
from mdi_exec.model.cache import CacheLayout
from mdi_exec.model.config import ModelConfig
from mdi_exec.numerics import Numerics
from mdi_exec.ranks.exchange import require_kind
from mdi_shared.config import MOST_BLOCKS, SchedulerConfig
from mdi_shared.errors import ConfigError, is_number
from mdi_shared.placement import Placement, new_placement, placement_name
from mdi_shared.policies import NO_POLICY, Policy, new_policy, policy_name

GB = 1e9
DEFAULT_MAX_MODEL_LEN = 4_096
DEFAULT_KV_CACHE_GB = 1.0
DEFAULT_EXPANDED_WEIGHTS_GB = 1.0  # on a CPU, where only reference ops run
DEFAULT_COPIES_GB = 16.0  # on a GPU: what all dense weights of the released model take, and more
MOST_TIMEOUT_S = 1_000_000
LOADING = (
    "device", "numerics", "revision", "weight_cache_memory_gb", "expanded_weights_memory_gb",
    "data_parallel_size", "expert_parallel_size", "exchange", "group_port", "group_timeout_s",
    "group_start_timeout_s",
)  # fmt: skip
"""Options that a loaded model keeps; all others belong to the engine that serves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Where and how the model runs.

    `device` is a torch device name. `numerics` is "quantised" (the released rounding),
    "folded" (experts as FP8) or "float32".
    KV blocks come from `kv_cache_memory_gb`, or from what `gpu_memory_utilization` of the device's
    memory leaves beside the weights; without either, 1 GB. `weight_cache_memory_gb` refuses to
    load a model whose weights take more. `expanded_weights_memory_gb` is spent on unpacked copies
    of quantised weights, which make products faster and change no result: on a GPU bfloat16 ones of
    dense weights (16 GB unless given), on a CPU float32 ones of any (1 GB). `replay_keep_tokens`
    > 0 turns bounded replay of the consumer layers on. `use_cuda_graphs` runs decode steps and
    short prefill steps as captured graphs; it changes no result, and nothing on a CPU or with
    float32 numerics. `compile_ahead` compiles, side by side and before the model is loaded, the
    kernels that these options can reach and the cache does not have; else each is compiled when
    first needed. `seed` makes the seeds of requests that bring none. `cost_model` names the
    calibrated step-time model (JSON) that chunk_policy = 'cost_target' asks. `policy` decides who
    is next, who may take memory and who gives way: a specification such as "srpt:sigma=0.5"
    (docs/policies.md), or a `Policy` of your own.

    `data_parallel_size` ranks serve requests side by side, each with its own cache, and share the
    routed experts; `expert_parallel_size` is the same number in this version. They are processes
    that the LLM starts, unless torchrun has. `exchange` is how rows reach other ranks' experts:
    "all_gather" or "all_to_all". `placement` says which rank serves a request: a specification
    such as "jsq" (docs/policies.md), or a `Placement` of your own; one that watches the ranks needs
    ranks that the LLM starts. `group_port` is where they meet (0: any free one), for which they
    have `group_start_timeout_s` seconds; a rank that is not heard of for `group_timeout_s` seconds
    ends the group.
    """

    device: str = "cpu"
    numerics: str = "quantised"
    kv_cache_memory_gb: float | None = None
    gpu_memory_utilization: float | None = None
    weight_cache_memory_gb: float | None = None
    expanded_weights_memory_gb: float | None = None
    replay_keep_tokens: int = 0
    use_cuda_graphs: bool = True
    compile_ahead: bool = True
    revision: str | None = None
    seed: int = 0
    record: str | None = None
    cost_model: str | None = None
    policy: str | Policy = NO_POLICY
    data_parallel_size: int = 1
    expert_parallel_size: int | None = None
    exchange: str = "all_gather"
    placement: str | Placement = "round_robin"
    group_port: int = 0
    group_timeout_s: float = 600.0
    group_start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.record, os.PathLike):
            object.__setattr__(self, "record", os.fspath(self.record))
        _check_types(self)
        _check_device_name(self.device)
        names = [n.value for n in Numerics]
        if self.numerics not in names:
            raise ConfigError("numerics", self.numerics, f"must be one of {', '.join(names)}")
        for name in ("kv_cache_memory_gb", "weight_cache_memory_gb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be above 0 GB")
        expanded = self.expanded_weights_memory_gb
        if expanded is not None and not expanded >= 0:
            raise ConfigError("expanded_weights_memory_gb", expanded, "must be at least 0 GB")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization", share, "must be above 0 and at most 1")
        if share is not None and self.kv_cache_memory_gb is not None:
            raise ConfigError("gpu_memory_utilization", share,
                              "contradicts kv_cache_memory_gb; give one of them")  # fmt: skip
        if share is not None and self.device == "cpu":
            raise ConfigError("gpu_memory_utilization", share,
                              "needs a GPU; on a CPU give kv_cache_memory_gb")  # fmt: skip
        if self.replay_keep_tokens < 0:
            raise ConfigError("replay_keep_tokens", self.replay_keep_tokens, "must be at least 0")
        new_policy(self.policy)
        self._check_group()

    def _check_group(self) -> None:
        if self.data_parallel_size < 1:
            raise ConfigError("data_parallel_size", self.data_parallel_size, "must be at least 1")
        require_kind(self.exchange)
        new_placement(self.placement)
        if not 0 <= self.group_port < 1 << 16:
            raise ConfigError("group_port", self.group_port, "must be from 0 to 65535")
        for name in ("group_timeout_s", "group_start_timeout_s"):
            if not 0 < getattr(self, name) <= MOST_TIMEOUT_S:
                raise ConfigError(name, getattr(self, name),
                                  f"must be above 0 and at most {MOST_TIMEOUT_S:,} s")  # fmt: skip

    def require_group(self, size: int) -> None:
        """Raise `ConfigError` unless these options fit a group of `size` ranks."""
        if self.data_parallel_size not in (1, size):
            raise ConfigError("data_parallel_size", self.data_parallel_size,
                              f"torchrun has started {size} ranks")  # fmt: skip
        if self.expert_parallel_size not in (None, size):
            raise ConfigError("expert_parallel_size", self.expert_parallel_size,
                              f"must equal the number of ranks, data_parallel_size = {size}, in "
                              "this version")  # fmt: skip

    def require_seen_ranks(self, size: int) -> None:
        """Raise `ConfigError` for a placement that `size` ranks under torchrun cannot have.

        They place alike without a word; what they hold when a request comes they do not know.
        """
        if size > 1 and new_placement(self.placement).watches:
            name = placement_name(self.placement)
            raise ConfigError("placement", name, "watches the ranks, which only an LLM that starts "
                              "them can, not under torchrun")  # fmt: skip

    def described(self) -> dict[str, Any]:
        """Return the options as plain data; a policy or placement of the caller's is its name."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        named = {"policy": policy_name(self.policy), "placement": placement_name(self.placement)}
        return {**own, **named}

    def keep_loading(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return `options` with those of loading as they are here.

        Raises `ConfigError` for one that `options` would change.
        """
        kept = {name: getattr(self, name) for name in LOADING}
        for name, value in kept.items():
            given = options.get(name, value)
            is_kind = type(given) is type(value) or (is_number(given) and is_number(value))
            if not is_kind or given != value:
                raise ConfigError(name, options[name], f"the model was loaded with {value!r}, and "
                                  "another value needs another LLM")  # fmt: skip
        return {**options, **kept}

    @property
    def uses_kernels(self) -> bool:
        """Whether weights are for kernels: the released rounding, on a GPU."""
        return self.device != "cpu" and self.numerics != Numerics.FLOAT32.value

    @property
    def expanded_weights_bytes(self) -> float:
        """Bytes for unpacked copies of quantised weights."""
        if self.expanded_weights_memory_gb is not None:
            return self.expanded_weights_memory_gb * GB
        if self.uses_kernels:
            return DEFAULT_COPIES_GB * GB
        return DEFAULT_EXPANDED_WEIGHTS_GB * GB if self.device == "cpu" else 0.0

    def require_weights_fit(self, weight_bytes: int) -> None:
        """Raise `ConfigError` for weights larger than `weight_cache_memory_gb`."""
        limit = self.weight_cache_memory_gb
        if limit is not None and weight_bytes > limit * GB:
            raise ConfigError("weight_cache_memory_gb", limit,
                              f"the model's weights take {weight_bytes / GB:.3f} GB")  # fmt: skip

    def kv_bytes(self, workspace: int) -> float:
        """Return the bytes for the cache.

        A share of GPU memory counts what is free once the weights are in; a step's `workspace`
        bytes stay free then.
        """
        if self.gpu_memory_utilization is None:
            given = self.kv_cache_memory_gb
            return (given if given is not None else DEFAULT_KV_CACHE_GB) * GB
        free, total = torch.cuda.mem_get_info(self.device)
        return free - (1.0 - self.gpu_memory_utilization) * total - workspace


_KINDS: dict[type, tuple[tuple[type, ...], str]] = {  # of a field: what it takes, in words
    bool: ((bool,), "true or false"), int: ((int,), "an integer"),
    float: ((int, float), "a number"), str: ((str,), "a text"),
}  # fmt: skip


def _check_types(options: EngineOptions) -> None:
    """A size in GB or a share is a number, a count an integer, and neither is a bool."""
    for name, declared in get_type_hints(EngineOptions).items():
        value, kinds = getattr(options, name), get_args(declared) or (declared,)
        is_object = any(isinstance(value, kind) for kind in (Policy, Placement) if kind in kinds)
        if is_object or (value is None and NoneType in kinds):
            continue
        allowed, words = _KINDS[kinds[0]]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ConfigError(name, value, f"must be {words}")


def _check_device_name(name: str) -> None:
    try:
        is_known = torch.device(name).type in ("cpu", "cuda")
    except RuntimeError:
        is_known = False
    if not is_known:
        raise ConfigError("device", name, "must be cpu, cuda or cuda:<index>")


def _require_device(name: str) -> None:
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError("device", name, f"torch sees {count} GPUs here")


def split_options(options: Mapping[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
    """Part keyword options into the engine's and the scheduler's.

    Raises `ConfigError` for a name neither knows, listing both sets, for a device this machine
    lacks, and for a pool sized twice.
    """
    engine_names = [f.name for f in fields(EngineOptions)]
    scheduler_names = [f.name for f in fields(SchedulerConfig)]
    for name, value in options.items():
        if name not in engine_names and name not in scheduler_names:
            known = ", ".join(sorted([*engine_names, *scheduler_names]))
            raise ConfigError(name, value, f"unknown option; known: {known}")
    engine = EngineOptions(**{n: v for n, v in options.items() if n in engine_names})
    _require_device(engine.device)
    policy = options.get("chunk_policy", "token_budget")
    if engine.cost_model is not None and policy != "cost_target":
        raise ConfigError("cost_model", engine.cost_model,
                          "is used by chunk_policy = 'cost_target' only")  # fmt: skip
    for name in ("kv_cache_memory_gb", "gpu_memory_utilization"):
        if "num_blocks" in options and getattr(engine, name) is not None:
            raise ConfigError("num_blocks", options["num_blocks"],
                              f"contradicts {name}; give one of them")  # fmt: skip
    return engine, {n: v for n, v in options.items() if n in scheduler_names}


def cache_layout(
    config: ModelConfig, options: EngineOptions, scheduler_options: Mapping[str, Any]
) -> CacheLayout:
    """Return the layout of an engine's cache: with tails for prefix reuse, with rings for drafts.

    Raises `ConfigError` for both at once: a tail has no rings of the draft layers.
    """
    names = ("enable_prefix_cache", "prefix_tails", "max_num_seqs", "num_draft_tokens")
    own = {name: scheduler_options[name] for name in names if name in scheduler_options}
    wanted = SchedulerConfig.from_mapping(own)
    if wanted.enable_prefix_cache and wanted.num_draft_tokens:
        raise ConfigError("enable_prefix_cache", True, "the executor has it without drafts only "
                          f"(num_draft_tokens = {wanted.num_draft_tokens})")  # fmt: skip
    layout = CacheLayout(
        config=config, numerics=Numerics(options.numerics), num_tails=wanted.num_tails,
        has_consumer_tails=not options.replay_keep_tokens,
    )  # fmt: skip
    return layout.with_drafts(wanted.num_draft_tokens)


def scheduler_config(
    options: Mapping[str, Any], layout: CacheLayout, kv_bytes: float, *, eos_token_id: int,
    max_positions: int,
) -> SchedulerConfig:  # fmt: skip
    """Size the block pool for `kv_bytes` of cache memory and return the scheduler's config.

    State slots and tails come out of the same memory. Raises `ConfigError` when it cannot hold one
    sequence of `max_model_len`, when `max_model_len` exceeds the model's positions, or for what
    only the simulator has: context parallelism, other block sizes.
    """
    wanted = {"max_model_len": min(DEFAULT_MAX_MODEL_LEN, max_positions),
              "eos_token_id": eos_token_id, **options}  # fmt: skip
    probe = SchedulerConfig.from_mapping({"num_blocks": MOST_BLOCKS, **wanted})
    for name, only in (("block_size", BLOCK_TOKENS), ("context_parallel_size", 1)):
        if getattr(probe, name) != only:
            raise ConfigError(name, getattr(probe, name), f"the executor has {only} only")
    if probe.max_model_len > max_positions:
        raise ConfigError("max_model_len", probe.max_model_len,
                          f"the model has {max_positions} positions")  # fmt: skip
    if "num_blocks" not in wanted:
        slots = layout.bytes_per_slot * probe.num_slots
        slots += layout.bytes_per_tail * layout.num_tails
        blocks = int((kv_bytes - slots) // layout.bytes_per_block)
        least = slots + _fewest_blocks(probe) * layout.bytes_per_block
        most = slots + MOST_BLOCKS * layout.bytes_per_block
        if not least <= kv_bytes <= most:
            raise ConfigError("kv_cache_memory_gb", kv_bytes / GB,
                              f"must be from {math.ceil(least / GB * 1e4) / 1e4:.4f}, for one "
                              f"request of max_model_len = {probe.max_model_len} and the state of "
                              f"max_num_seqs = {probe.max_num_seqs} ({slots / GB:.4f}), to "
                              f"{most / GB:.0f}")  # fmt: skip
        wanted["num_blocks"] = blocks
    config = SchedulerConfig.from_mapping(wanted)
    config.require_pool_fits()
    return config


def _fewest_blocks(config: SchedulerConfig) -> int:
    """Return the smallest pool that `SchedulerConfig.require_pool_fits` lets pass."""
    tokens = config.runtime_max_model_len
    blocks = -(-tokens * 10 // (8 * config.block_size))
    return max(blocks, 2)
