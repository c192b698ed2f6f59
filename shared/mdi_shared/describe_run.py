"""From options to the description of a run, with whatever was left out chosen so that it can exist.

`describe_run` is what the command line and the Python interface share. Nothing is simulated here.

Read next: `run_description.py` (what comes out), `run_notes.py` (what speaks against it).
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from mdi_shared.config import MOST_BLOCKS, SchedulerConfig
from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.group import assumed_group_cost
from mdi_shared.cost.hardware import H200, Hardware, hardware_by_name, hardware_in
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.memory import DEFAULT_UTILIZATION, GB, expert_splits, room_bytes
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import V41_FLASH, ModelShape, shape_by_name, shape_from_mapping
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.cost.tails import state_bytes
from mdi_shared.errors import ConfigError, is_number, require, require_int
from mdi_shared.placement import Placement
from mdi_shared.policies import Policy
from mdi_shared.run_description import RunDescription
from mdi_shared.served import Served


class RunOptions(TypedDict, total=False):
    """What `describe_run` takes: the fields of `RunDescription`, and what they are made from.

    `cost` may be the name or file of a fitted model, `shape` a model's name, `scheduler` options
    by name, whose KV pool is then sized by memory. `hardware` is a name, a file of peak rates, or
    an object; the roofline splits experts over `ep` ranks (left out: all). None is "left out".
    """

    scheduler: SchedulerConfig | Mapping[str, Any] | None
    cost: StepCost | str | Path | None
    shape: ModelShape | str | None
    hardware: Hardware | str | None
    ep: int | None
    ranks: int | None
    policy: str | Policy | None
    placement: str | Placement | None
    seed: int | None
    draft_accept_rate: float | None
    until_s: float | None
    kv_cache_memory_gb: float | None
    gpu_memory_utilization: float | None
    served: Served | None


OPTIONS = tuple(RunOptions.__annotations__)
MEMORY_OPTIONS = ("kv_cache_memory_gb", "gpu_memory_utilization")
_AS_THEY_ARE = ("policy", "placement", "seed", "draft_accept_rate", "until_s", "served")


def describe_run(
    base: RunDescription | None = None, /, **options: Unpack[RunOptions]
) -> RunDescription:
    """Return the run that `options` (`RunOptions`) describe, or `base` with them changed.

    Left out, the shape is what the cost is for, or the released model; the cost a roofline of an
    H200; the ranks are the fewest that hold the model; the KV pool is what memory leaves, or
    `kv_cache_memory_gb`. What was chosen is in `assumed`. Raises `ConfigError` for options that
    are unknown, out of range, or contradict each other, and a model that cannot be held.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        require(name in OPTIONS, name, value, f"unknown option; known: {', '.join(OPTIONS)}")
    plain: dict[str, Any] = {name: given[name] for name in _AS_THEY_ARE if name in given}
    if base is not None:
        if not given.keys() - plain.keys():
            return replace(base, **plain)
        given = _over(base, given)
        plain = {**{name: getattr(base, name) for name in _AS_THEY_ARE}, **plain}
    return _Choices(given).describe(plain)


def _over(base: RunDescription, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` over what `base` says, less what follows from other options.

    Scheduler options by name change the base's own.
    """
    kept: dict[str, Any] = {"shape": base.shape, "ranks": base.ranks, "scheduler": base.scheduler,
                            "cost": base.cost}  # fmt: skip
    if isinstance(base.cost, RooflineCost) and given.keys() & {"shape", "ranks", "hardware", "ep"}:
        kept |= {"cost": None, "hardware": base.cost.hardware}
    changed = given.get("scheduler")
    if isinstance(changed, Mapping):
        kept["scheduler"] = {**asdict(base.scheduler), **changed}
        if given.keys() & set(MEMORY_OPTIONS) and "num_blocks" not in changed:
            del kept["scheduler"]["num_blocks"]
        given = {**given, "scheduler": kept["scheduler"]}
    return {**{name: value for name, value in kept.items() if value is not None}, **given}


class _Choices:
    """The options at hand while one choice after the other is made."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.assumed: list[str] = []
        cost = given.get("cost")
        for name in ("hardware", "ep"):
            require(cost is None or name not in given, name, given.get(name),
                    "belongs to the roofline, which a cost replaces")  # fmt: skip
        self.cost: StepCost | None = read_cost_file(cost) if isinstance(cost, str | Path) else cost
        self.shape = self._shape()
        self.hardware = self._hardware()
        # The scheduler's options, with the largest KV pool until its size is chosen.
        options = given.get("scheduler", {})
        self.config: SchedulerConfig = options if isinstance(options, SchedulerConfig) else (
            SchedulerConfig.from_mapping({"num_blocks": MOST_BLOCKS, **options}))  # fmt: skip

    def describe(self, plain: Mapping[str, Any]) -> RunDescription:
        """Choose ranks, cost and KV pool, which follow from each other in this order."""
        ranks = self.given["ranks"] if "ranks" in self.given else self._ranks()
        require_int("ranks", ranks, 1)
        cost = self._cost(ranks)
        return RunDescription(
            scheduler=replace(self.config, num_blocks=self._pool(getattr(cost, "ep", ranks))),
            cost=cost, shape=self.shape, ranks=ranks, assumed=tuple(self.assumed), **plain,
        )  # fmt: skip

    # ---- one choice each -----------------------------------------------------------------------

    def _shape(self) -> ModelShape:
        named, cost = self.given.get("shape"), self.cost
        shape = shape_by_name(named) if isinstance(named, str) else named
        if isinstance(cost, PredictedCost):
            require(shape in (None, cost.shape), "model", shape and shape.name, "step times were "
                    f"predicted for {cost.shape.name}: see mdi transfer --model")  # fmt: skip
            return cost.shape
        if shape is not None:
            return shape
        if isinstance(cost, LinearCost) and cost.fit.get("shape"):
            return shape_from_mapping(cost.fit["shape"])
        return cost.shape if isinstance(cost, RooflineCost) else V41_FLASH

    def _hardware(self) -> Hardware | None:
        """Return what the run is on; None where the cost does not say."""
        named = self.given.get("hardware", H200 if self.cost is None else None)
        if isinstance(named, str):
            return hardware_by_name(named)
        if isinstance(self.cost, LinearCost):
            return hardware_in(str(self.cost.fit.get("hardware")))
        found = named or getattr(self.cost, "hardware", None)
        return found if isinstance(found, Hardware) else None

    def _ranks(self) -> int:
        """Return the fewest ranks that hold the model and its least KV pool."""
        hardware = self.hardware
        ep = self.given.get("ep", getattr(self.cost, "ep", None))
        if hardware is None or ep is not None:
            return 1
        for ranks in expert_splits(self.shape):
            if self._blocks(hardware, ranks) >= self.config.least_blocks:
                fewest = f"{ranks} rank{'s' if ranks > 1 else ''}, the fewest"
                self.assumed.append(f"{fewest} {hardware.name} that hold {self.shape.name}")
                return ranks
        raise ConfigError("hardware", hardware.name, f"holds {self.shape.name} on no number of "
                          "ranks; give --ranks to simulate it as if it did")  # fmt: skip

    def _cost(self, ranks: int) -> StepCost:
        """Return the step times: those given, with an exchange where ranks share them."""
        cost, shape = self.cost, self.shape
        if cost is None:
            assert self.hardware is not None, "a roofline has hardware"
            ep = self.given.get("ep", ranks)
            require_int("ep", ep, 1)
            return RooflineCost(self.hardware, shape, ep=ep)
        if not isinstance(cost, LinearCost) or ranks < 2 or cost.group is not None:
            return cost
        experts = shape.n_routed_experts
        require(experts % ranks == 0, "ranks", ranks, f"must divide the {experts} routed experts "
                f"of {shape.name}, which ranks share")  # fmt: skip
        if self.hardware is None:
            return cost
        return replace(cost, group=assumed_group_cost(self.hardware, shape, ranks))

    def _pool(self, ep: int) -> int:
        """Return the KV blocks of a rank: those given, those asked for in bytes, or what fits."""
        pool_gb, share = [self.given.get(name) for name in MEMORY_OPTIONS]
        options, config = self.given.get("scheduler", {}), self.config
        if isinstance(options, Mapping) and "num_blocks" in options:
            for name in MEMORY_OPTIONS:
                require(name not in self.given, name, self.given.get(name), "contradicts "
                        f"num_blocks = {config.num_blocks}: give one of them")  # fmt: skip
            return config.num_blocks
        require(pool_gb is None or share is None, "gpu_memory_utilization", share,
                "contradicts kv_cache_memory_gb; give one of them")  # fmt: skip
        if pool_gb is not None:
            return _blocks_of(pool_gb, self.shape, config)
        if isinstance(options, SchedulerConfig) and share is None:
            return config.num_blocks
        blocks = 0 if self.hardware is None else self._blocks(self.hardware, ep)
        if blocks < config.least_blocks:  # as if it fitted: `run_notes.py` tells
            return SchedulerConfig().num_blocks
        self.assumed.append(f"{blocks:,} KV blocks a rank, as many as fit and can be used")
        return blocks

    def _blocks(self, hardware: Hardware, ep: int) -> int:
        """Return the KV blocks that fit beside weights and state, at most what seats can fill."""
        share = self.given.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
        require(is_number(share) and 0 < share <= 1, "gpu_memory_utilization", share,
                "must be above 0 and at most 1")  # fmt: skip
        config, shape, size = self.config, self.shape, self.config.block_size
        state = state_bytes(shape, config.num_slots, config.num_tails)
        room = room_bytes(hardware, shape, ep, share) - state
        useful = (config.max_num_seqs + 1) * -(-config.runtime_max_model_len // size) + 1
        return min(int(room // shape.kv_bytes_per_block(size)), useful, MOST_BLOCKS)


def _blocks_of(pool_gb: float, shape: ModelShape, config: SchedulerConfig) -> int:
    """Return how many KV blocks take `pool_gb`, 10^9 bytes."""
    require(is_number(pool_gb) and 0 < pool_gb < 1e9, "kv_cache_memory_gb", pool_gb,
            "must be a finite number above 0")  # fmt: skip
    block_bytes = shape.kv_bytes_per_block(config.block_size)
    num_blocks = int(pool_gb * GB // block_bytes)
    require(num_blocks >= 2, "kv_cache_memory_gb", pool_gb,
            f"must hold at least 2 blocks of {block_bytes:,} bytes")  # fmt: skip
    return num_blocks
