"""Offline generation: load a checkpoint, give prompts, get outputs.

    with LLM("path/or/hub-id", max_model_len=4096, kv_cache_memory_gb=2.0) as llm:
        outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

Read next: `options.py` (what can be set), `engine.py` (what runs).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mdi_exec.cache import CacheLayout, DeviceCache
from mdi_exec.engine import LLMEngine
from mdi_exec.exchange import ExpertExchange, ExpertShard, make_exchange
from mdi_exec.memory import StepLimits, estimate_memory, require_fits_on
from mdi_exec.model.shape import shape_of
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.model_source import open_model
from mdi_exec.numerics import Numerics
from mdi_exec.options import DEFAULT_KV_CACHE_GB, GB, scheduler_config, split_options
from mdi_exec.parallel import RankAddress, RankGroup, join_group, own_device, require_even_experts
from mdi_exec.recording import Recording, hardware_name
from mdi_exec.request_state import RequestOutput
from mdi_exec.runner import ModelRunner
from mdi_exec.sampler import Sampler
from mdi_exec.sampling import SamplingParams, params_for_each
from mdi_exec.workers import GroupEngine
from mdi_shared.chunking import fallback_note, make_policy
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost import StepCost
from mdi_shared.cost_file import read_cost_file
from mdi_shared.errors import ConfigError
from mdi_shared.hardware import H200
from mdi_shared.linear_cost import LinearCost
from mdi_shared.placement import placement_by_name
from mdi_shared.predicted_cost import PredictedCost
from mdi_shared.roofline import RooflineCost
from mdi_shared.scheduler import Scheduler
from mdi_shared.shape import ModelShape

Prompt = str | Sequence[int]


class LLM:
    """A loaded model and its engine.

    `model` is a checkpoint directory, a hub id, or "random:<preset>" for weights made up on the
    device (`model_source.py`). Keyword options are those of `EngineOptions` and
    `SchedulerConfig`; an unknown one raises `ConfigError` listing them all. Raises
    `CheckpointError` when the checkpoint is not what its config says. `notes` are lines that the
    user should see, such as why another chunk policy runs than the one asked for.
    """

    def __init__(self, model: str | Path, **options: object) -> None:
        self.options, scheduler_options = split_options(options)
        path = self.options.cost_model  # read first: a bad file is no reason to load weights
        self._cost_model = None if path is None else read_cost_file(path)
        self.notes: tuple[str, ...] = ()
        self.group = RankGroup()
        self._placement = placement_by_name(self.options.placement)
        self._num_placed = 0
        self._is_closed = False
        address = RankAddress.from_environment()
        if address is None and self.options.data_parallel_size > 1:
            self._start_ranks(model, options)
            return
        self.options.require_group(1 if address is None else address.size)
        if address is not None:
            self.group = join_group(address, self.options.group_timeout_s)
        with self.group.ends_with():
            self._load(model, scheduler_options)

    def _start_ranks(self, model: str | Path, options: dict[str, Any]) -> None:
        """Be the front of a group whose ranks are child processes; no model is loaded here."""
        size = self.options.data_parallel_size
        self.options.require_group(size)
        self.source = open_model(model, "cpu", self.options.revision)
        self.config, self.tokenizer = self.source.config, self.source.tokenizer
        require_even_experts(self.config, size)
        self.engine: LLMEngine | GroupEngine = GroupEngine(
            model, options, size=size, port=self.options.group_port, seed=self.options.seed,
            vocab_size=self.config.vocab_size, tokenizer=self.tokenizer,
        )  # fmt: skip
        self.scheduler_config = self.engine.scheduler_config

    def _load(self, model: str | Path, scheduler_options: dict[str, Any]) -> None:
        """Load the model and make the engine of this process."""
        self.options = replace(self.options, device=own_device(self.options.device, self.group))
        self.source = open_model(model, self.options.device, self.options.revision)
        self.config, self.tokenizer = self.source.config, self.source.tokenizer
        require_even_experts(self.config, self.group.size)
        self.options.require_weights_fit(self.source.weight_bytes)
        numerics = Numerics(self.options.numerics)
        layout = CacheLayout(config=self.config, numerics=numerics)
        self.shard = ExpertShard(self.group.rank, self.group.size)
        workspace = self._require_memory(layout, scheduler_options)
        self.model = Transformer(
            self.config,
            Weights(self.source.tensors, self.options.device, budget=self._budget(),
                    shard=self.shard),
            token_map=self.source.token_map,
            numerics=numerics,
            exchange=self._exchange(),
        )  # fmt: skip
        self.scheduler_config = self._agreed(
            self._sized(layout, scheduler_options, self.options.kv_bytes(workspace))
        )
        self.engine = self._engine(layout)

    def _agreed(self, config: SchedulerConfig) -> SchedulerConfig:
        """Make sure that all ranks have the same model and options; a pool sized by the GPU's free
        memory becomes the smallest one's.
        """
        if self.options.gpu_memory_utilization is not None:
            smallest = min(blocks for (blocks,) in self.group.gather((config.num_blocks,)))
            config = replace(config, num_blocks=smallest)
        own = {"device", "record", "group_port", "group_timeout_s"}
        engine = {n: v for n, v in asdict(self.options).items() if n not in own}
        self.group.require_equal(
            {"checkpoint": self.source.fingerprint, **engine, **asdict(config)}
        )
        return config

    @property
    def rank_engine(self) -> LLMEngine:
        """This process's own engine; the front of a group that has started its ranks has none."""
        assert isinstance(self.engine, LLMEngine), "this process has no rank"
        return self.engine

    def _exchange(self) -> ExpertExchange:
        tensors = self.group.tensor_group(torch.device(self.options.device))
        rows_group = self.group.rows_group() if self.options.device != "cpu" else None
        return make_exchange(self.options.exchange, tensors, rows_group=rows_group)

    def _budget(self) -> ExpansionBudget:
        return ExpansionBudget(self.options.expanded_weights_bytes, self.options.uses_kernels)

    def _sized(
        self, layout: CacheLayout, options: dict[str, Any], kv_bytes: float
    ) -> SchedulerConfig:
        return scheduler_config(
            options, layout, kv_bytes, eos_token_id=self.config.eos_token_id,
            max_positions=self.config.max_position_embeddings,
        )  # fmt: skip

    def _require_memory(self, layout: CacheLayout, options: dict[str, Any]) -> int:
        """Refuse, before anything is loaded, a model that will not fit on its GPU.

        Returns the bytes a step may need beside weights and cache (0 on a CPU).
        """
        if self.options.device == "cpu":
            return 0
        # A cache sized by what is left fits by itself: here it counts as a small one.
        is_sized = self.options.gpu_memory_utilization is None
        kv_bytes = self.options.kv_bytes(0) if is_sized else DEFAULT_KV_CACHE_GB * GB
        config = self._sized(layout, options, kv_bytes)
        limits = StepLimits(rows=config.token_budget, seqs=config.max_num_seqs,
                            context=config.max_model_len)  # fmt: skip
        estimate = estimate_memory(
            layout, limits, num_blocks=config.num_blocks, num_slots=config.num_slots,
            copies_limit=self.options.expanded_weights_bytes,
            for_kernels=self.options.uses_kernels, shard=self.shard,
        )  # fmt: skip
        require_fits_on(estimate, self.options.device)
        return estimate.workspace

    def _engine(self, layout: CacheLayout) -> LLMEngine:
        config, device = self.scheduler_config, self.options.device
        shape = shape_of(
            self.config,
            self.source.name,
            replay_keep_tokens=self.options.replay_keep_tokens,
        )
        cache = DeviceCache(
            layout, num_blocks=config.num_blocks, num_slots=config.num_slots, device=device
        )
        sampler = Sampler(
            self.config.vocab_size, eos_token_id=self.config.eos_token_id, device=device
        )
        runner = ModelRunner(
            self.model,
            cache,
            sampler,
            replay_keep_tokens=self.options.replay_keep_tokens,
            graph_limits=(
                (config.max_num_seqs, config.max_model_len)
                if self.options.use_cuda_graphs
                else None
            ),
            measures_experts=self.options.record is not None,
            group=self.group,
        )
        cost = self._chunk_cost(shape)
        recording = None
        if self.options.record is not None:
            recording = Recording(
                shape,
                hardware=hardware_name(device),
                options={"engine": asdict(self.options), "chunk_cost": cost.describe()},
                rank=self.group.rank,
            )
        return LLMEngine(
            Scheduler(config, make_policy(config, shape, cost)),
            runner,
            vocab_size=self.config.vocab_size,
            tokenizer=self.tokenizer,
            recording=recording,
            seed=self.options.seed,
            group=self.group,
        )

    def _chunk_cost(self, shape: ModelShape) -> StepCost:
        """Return the step times that the chunk policy asks, and note what speaks against them."""
        model = self._cost_model
        cost: StepCost = RooflineCost(H200, shape) if model is None else model
        notes = [fallback_note(self.scheduler_config, cost)]
        made_for = model.fit.get("model") if isinstance(model, LinearCost) else None
        if isinstance(model, PredictedCost):
            made_for = model.shape.name
        if made_for not in (None, shape.name):
            path = self.options.cost_model
            notes.append(f"{path} was made for {made_for}, but {shape.name} runs")
        self.notes = tuple(note for note in notes if note is not None)
        return cost

    def generate(
        self,
        prompts: Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Serve all prompts and return their final outputs, in the order of the prompts.

        Prompts are texts or token ids; `prompt_token_ids` is another name for the latter. One
        `SamplingParams` serves all, or give one per prompt. Every prompt is answered: one that
        cannot be served has a `finish_reason` that says so.
        """
        names = self._add_all(prompts, sampling_params, prompt_token_ids)
        done: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished_requests():
            done.update((out.req_id, out) for out in self.engine.step() if out.finished)
        self.engine.drain()
        self.save_recording()
        done.update(self._outputs_elsewhere(done))
        return [done[name] for name in names]

    def _outputs_elsewhere(self, own: dict[str, RequestOutput]) -> dict[str, RequestOutput]:
        """Tell the other ranks under torchrun this one's outputs, and return theirs."""
        if self.group.size == 1:
            return {}
        others = self.group.gather_objects([output.state for output in own.values()])
        return {
            state.req_id: RequestOutput(state, (), self.tokenizer)
            for rank, states in enumerate(others)
            for state in states
            if rank != self.group.rank
        }

    def stream(
        self,
        prompts: Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output at every step that adds to it.

        Under torchrun each rank yields those of its own requests.
        """
        self._add_all(prompts, sampling_params, prompt_token_ids)
        while self.engine.has_unfinished_requests():
            yield from self.engine.step()
        self.engine.drain()
        self.save_recording()

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, rather than in the first step of each size."""
        if isinstance(self.engine, GroupEngine):
            self.engine.warm_up()
            return
        config = self.scheduler_config
        self.engine.runner.warm_up(min(config.token_budget, config.max_model_len))

    def save_recording(self) -> None:
        """Write the run so far to the files `record` names; nothing without it.

        One run for all ranks; under torchrun all of them call this, and rank 0 writes.
        """
        if self.options.record is not None:
            run = self.engine.recorded_run()
            if run is not None:
                run.save(self.options.record)

    def close(self) -> None:
        """Save the recording and release the device; the object cannot be used afterwards.

        When its group has failed, a rank saves what it has recorded itself, as PREFIX.rankN.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self.group.is_open:
                self._save_own_part()
            elif not self.engine.is_stopped or self.engine.num_ranks == 1:
                self.save_recording()
        finally:
            self.engine.close()

    def close_rank(self) -> None:
        """Close a rank whose recording somebody else saves, unless the group has failed."""
        if not self.group.is_open:
            self._save_own_part()
        self._is_closed = True
        self.engine.close()

    def _save_own_part(self) -> None:
        recording = self.rank_engine.recording
        if self.options.record is not None and recording is not None:
            run = recording.run(self.rank_engine.scheduler)
            run.save(f"{self.options.record}.rank{self.group.rank}")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.group.fail(error)  # the other ranks wait for no more turns of this one
        self.close()

    def _add_all(
        self,
        prompts: Sequence[Prompt] | None,
        params: SamplingParams | Sequence[SamplingParams] | None,
        prompt_token_ids: Sequence[Sequence[int]] | None,
    ) -> list[str]:
        """Check everything first, so that a bad prompt leaves no other one half-started."""
        if (prompts is None) == (prompt_token_ids is None):
            raise ConfigError("prompts", prompts, "give either prompts or prompt_token_ids")
        given = prompts if prompts is not None else prompt_token_ids
        assert given is not None, "one of the two is given"
        if isinstance(given, str):
            raise ConfigError("prompts", given, "must be a list of prompts, not a single text")
        all_ids = [self._encode(prompt) for prompt in given]
        each = params_for_each(params, len(all_ids))
        for ids, one in zip(all_ids, each, strict=True):
            self.engine.check_request(ids, one)
        self.engine.expect_requests()
        return [self._place(ids, one) for ids, one in zip(all_ids, each, strict=True)]

    def _place(self, ids: list[int], params: SamplingParams) -> str:
        """Add a request on the rank that shall serve it; all ranks under torchrun decide alike."""
        if self.engine.num_ranks == 1:
            return self.engine.add_request(ids, params)
        name, params = str(self._num_placed), self.engine.draw_seed(params)
        self._num_placed += 1
        rank = self._placement.place(len(ids), params.max_tokens, self.engine.num_ranks)
        if self.engine.takes(rank):
            self.engine.add_request(ids, params, name, rank=rank)
        return name

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ConfigError("prompts", prompt, "the checkpoint has no tokenizer.json; give "
                              "token ids")  # fmt: skip
        return self.tokenizer.encode(prompt)
