"""A model in this process: its weights with their memory checked, and engines that serve it.

Loading takes minutes, an engine with its cache and graphs moments. So the two are apart: one
loaded model can be served by one engine after the other, with other options. In a group this is
one rank's part of the model.

Read next: `memory.py` (what is checked), `engine.py`, `runner.py`; `rank.py` holds it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mdi_exec.engine.draft_options import require_drafts
from mdi_exec.engine.drafting import Drafting
from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.kernels_ahead import Reach, compile_ahead, told_in_lines
from mdi_exec.engine.memory import (
    MemoryEstimate,
    StepLimits,
    estimate_memory,
    memory_line,
    require_fits_on,
)
from mdi_exec.engine.options import (
    DEFAULT_KV_CACHE_GB,
    GB,
    EngineOptions,
    cache_layout,
    scheduler_config,
)
from mdi_exec.engine.recording import Recording, hardware_name
from mdi_exec.engine.runner import ModelRunner
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.config import shape_of
from mdi_exec.model.dspark import DraftHead
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.sampler import Sampler
from mdi_exec.ranks.exchange import ExpertExchange, ExpertShard, make_exchange
from mdi_exec.ranks.parallel import RankGroup, own_device, require_even_experts
from mdi_exec.weights.source import open_model
from mdi_shared.chunking import fallback_note, make_policy
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.policies import new_policy
from mdi_shared.scheduler import Scheduler
from mdi_traces.schema import this_generator

CostModel = LinearCost | PredictedCost  # as read from a file


class LoadedModel:
    """The model, read from `source` as `options` say; the group's share of it where there is one.

    Before anything is loaded, on a GPU and in a group, `on_estimate` is called with a line on the
    memory it will take, and what will not fit on its GPU is refused. Raises `ConfigError` for
    that, `CheckpointError` when the checkpoint is not what its config says. `options` is kept with
    the device that is this rank's. The draft head comes along if the engine to be has drafts.
    """

    def __init__(
        self, model: str | Path, options: EngineOptions, scheduler_options: Mapping[str, Any],
        group: RankGroup, on_estimate: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.group = group
        self.options = replace(options, device=own_device(options.device, group))
        self.head: DraftHead | None = None
        drafts = scheduler_options.get("num_draft_tokens", 0)
        self._has_head = isinstance(drafts, int) and drafts > 0
        self.source = open_model(model, self.options.device, self.options.revision,
                                 with_draft=self._has_head)  # fmt: skip
        self.config, self.tokenizer = self.source.config, self.source.tokenizer
        require_even_experts(self.config.n_routed_experts, group.size)
        self.options.require_weights_fit(self.source.weight_bytes)
        numerics = Numerics(self.options.numerics)
        self.shard = ExpertShard(group.rank, group.size)
        estimate = self._estimate(self.options, scheduler_options)
        if group.size > 1 or self.options.device != "cpu":
            on_estimate(self._line(estimate))
        require_fits_on(estimate, self.options.device)
        if self.options.uses_kernels and self.options.compile_ahead and group.size == 1:
            self._compile_ahead(scheduler_options, on_estimate)
        budget = ExpansionBudget(
            self.options.expanded_weights_bytes, self.options.uses_kernels,
            folds_experts=numerics is Numerics.FOLDED,
        )  # fmt: skip
        weights = Weights(self.source.tensors, self.options.device, budget=budget, shard=self.shard)
        self.transformer = Transformer(
            self.config,
            weights,
            token_map=self.source.token_map,
            numerics=numerics,
            exchange=self._exchange(),
        )
        if self._has_head:
            self.head = DraftHead(self.transformer, weights.sub("mtp"))
        weights.require_finite()

    def _compile_ahead(
        self, scheduler_options: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        from mdi_exec.ops.kernels.jit import cache_folder, current_architecture

        note = cache_folder()[1]
        if note is not None:
            tell(note)
        config = self.planned_config(self.options, scheduler_options)
        reach = Reach.of(self._layout(self.options, scheduler_options), config,
                         self.options.expanded_weights_bytes)  # fmt: skip
        with torch.cuda.device(self.options.device):
            compile_ahead(reach, current_architecture(), told_in_lines(tell))

    def _exchange(self) -> ExpertExchange:
        tensors = self.group.tensor_group(torch.device(self.options.device))
        rows_group = self.group.rows_group() if self.options.device != "cpu" else None
        return make_exchange(self.options.exchange, tensors, rows_group=rows_group)

    # ---- memory --------------------------------------------------------------------------------

    def _layout(self, options: EngineOptions, scheduler_options: Mapping[str, Any]) -> CacheLayout:
        return cache_layout(self.config, options, scheduler_options)

    def _line(self, estimate: MemoryEstimate) -> str:
        line = memory_line(estimate, self.config, self.shard)
        share = self.options.gpu_memory_utilization
        return line if share is None else f"{line}; the cache grows to fill {share:.0%} of the GPU"

    def _estimate(
        self, options: EngineOptions, scheduler_options: Mapping[str, Any]
    ) -> MemoryEstimate:
        config = self.planned_config(options, scheduler_options)
        limits = StepLimits(
            rows=config.token_budget, seqs=config.max_num_seqs * (1 + config.num_draft_tokens),
            context=config.max_model_len,
        )  # fmt: skip
        return estimate_memory(
            self._layout(options, scheduler_options), limits, num_blocks=config.num_blocks,
            num_slots=config.num_slots,
            copies_limit=options.expanded_weights_bytes, for_kernels=options.uses_kernels,
            shard=self.shard,
        )  # fmt: skip

    def planned_config(
        self, options: EngineOptions, scheduler_options: Mapping[str, Any]
    ) -> SchedulerConfig:
        """Return the config of an engine with these options; raises `ConfigError` as `engine`.

        A cache sized by the memory that is left fits by itself: here it counts as a small one.
        """
        is_sized = options.gpu_memory_utilization is None
        kv_bytes = options.kv_bytes(0) if is_sized else DEFAULT_KV_CACHE_GB * GB
        return self._sized(options, scheduler_options, kv_bytes)

    def require_room(self, options: EngineOptions, scheduler_options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless another engine fits beside the weights, which are in."""
        if self.options.device != "cpu":
            torch.cuda.empty_cache()  # what an earlier engine held counts as free only then
        estimate = self._estimate(options, scheduler_options)
        require_fits_on(replace(estimate, weights=0, copies=0), options.device)

    def _sized(
        self, options: EngineOptions, scheduler_options: Mapping[str, Any], kv_bytes: float
    ) -> SchedulerConfig:
        config = scheduler_config(
            scheduler_options, self._layout(options, scheduler_options), kv_bytes,
            eos_token_id=self.config.eos_token_id,
            max_positions=self.config.max_position_embeddings,
        )  # fmt: skip
        require_drafts(config.num_draft_tokens, self.config, device=self.options.device,
                       has_head=self._has_head)  # fmt: skip
        return config

    # ---- engines -------------------------------------------------------------------------------

    def engine(
        self, options: EngineOptions, scheduler_options: Mapping[str, Any],
        cost_model: CostModel | None,
    ) -> tuple[LLMEngine, tuple[str, ...]]:  # fmt: skip
        """Make an engine with a cache of its own, and notes that the user should see.

        `cost_model` is what `options.cost_model` names. In a group all ranks call this together,
        with equal options. The caller closes the engine before another is made.
        """
        workspace = 0
        if options.gpu_memory_utilization is not None:
            workspace = self._estimate(options, scheduler_options).workspace
        sized = self._sized(options, scheduler_options, options.kv_bytes(workspace))
        config = self._agreed(options, sized)
        shape = shape_of(
            self.config, self.source.name, replay_keep_tokens=options.replay_keep_tokens
        )
        cost, notes = _chunk_cost(cost_model, config, shape, options.cost_model)
        recording = None
        if options.record is not None:
            described = options.described()
            recording = Recording(
                shape,
                hardware=hardware_name(options.device),
                options={
                    "engine": described,
                    "policy": described["policy"],
                    "placement": described["placement"],
                    "chunk_cost": cost.describe(),
                },
                rank=self.group.rank,
                drafting=config.num_draft_tokens > 0,
            )
        engine = LLMEngine(
            Scheduler(
                config,
                make_policy(config, shape, cost),
                new_policy(options.policy),
                hit_margin=options.replay_keep_tokens,
            ),
            self._runner(options, config),
            vocab_size=self.config.vocab_size,
            tokenizer=self.tokenizer,
            recording=recording,
            seed=options.seed,
            group=self.group,
        )
        return engine, notes

    def _runner(self, options: EngineOptions, config: SchedulerConfig) -> ModelRunner:
        cache = DeviceCache(
            self._layout(options, asdict(config)),
            num_blocks=config.num_blocks,
            num_slots=config.num_slots,
            device=options.device,
        )
        sampler = Sampler(
            self.config.vocab_size, eos_token_id=self.config.eos_token_id, device=options.device
        )
        drafting = None
        if config.num_draft_tokens:
            assert self.head is not None, "a model with drafts has been loaded with its head"
            drafting = Drafting(self.head, cache, sampler, config.num_draft_tokens)
        limits = (config.max_num_seqs, config.max_model_len)
        return ModelRunner(
            self.transformer,
            cache,
            sampler,
            replay_keep_tokens=options.replay_keep_tokens,
            graph_limits=limits if options.use_cuda_graphs else None,
            measures_experts=options.record is not None,
            group=self.group,
            drafting=drafting,
        )

    def _agreed(self, options: EngineOptions, config: SchedulerConfig) -> SchedulerConfig:
        """Make sure that all ranks have the same model and options; a pool sized by the GPU's free
        memory becomes the smallest one's.
        """
        if options.gpu_memory_utilization is not None:
            smallest = min(blocks for (blocks,) in self.group.gather((config.num_blocks,)))
            config = replace(config, num_blocks=smallest)
        own = {"device", "record", "group_port", "group_timeout_s", "group_start_timeout_s"}
        engine = {n: v for n, v in options.described().items() if n not in own}
        self.group.require_equal(
            {
                "checkpoint": self.source.fingerprint,
                "version": f"{this_generator()}, torch {torch.__version__}",
                **engine,
                **asdict(config),
            }
        )
        return config


def read_cost_model(options: EngineOptions) -> CostModel | None:
    """Return the step times that `cost_model` names; raises what reading the file does."""
    return None if options.cost_model is None else read_cost_file(options.cost_model)


def _chunk_cost(
    model: CostModel | None, config: SchedulerConfig, shape: ModelShape, path: str | None
) -> tuple[StepCost, tuple[str, ...]]:
    """Return the step times that the chunk policy asks, and notes on what speaks against them."""
    cost: StepCost = RooflineCost(H200, shape) if model is None else model
    notes = [fallback_note(config, cost)]
    made_for = model.fit.get("model") if isinstance(model, LinearCost) else None
    if isinstance(model, PredictedCost):
        made_for = model.shape.name
    if made_for not in (None, shape.name):
        notes.append(f"{path} was made for {made_for}, but {shape.name} runs")
    return cost, tuple(note for note in notes if note is not None)
