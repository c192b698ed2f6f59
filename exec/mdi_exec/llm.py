"""Offline generation: load a checkpoint, give prompts, get outputs.

    with LLM("path/or/hub-id", max_model_len=4096, kv_cache_memory_gb=2.0) as llm:
        outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

Read next: `options.py` (what can be set), `engine.py` (what runs).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mdi_exec.cache import CacheLayout, DeviceCache
from mdi_exec.engine import LLMEngine
from mdi_exec.memory import StepLimits, estimate_memory, require_fits_on
from mdi_exec.model.shape import shape_of
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.model_source import ModelSource, open_model
from mdi_exec.numerics import Numerics
from mdi_exec.options import DEFAULT_KV_CACHE_GB, GB, EngineOptions, scheduler_config, split_options
from mdi_exec.recording import Recording
from mdi_exec.request_state import RequestOutput
from mdi_exec.runner import ModelRunner
from mdi_exec.sampler import Sampler
from mdi_exec.sampling import SamplingParams
from mdi_shared.chunking import fallback_note, make_policy
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost import StepCost
from mdi_shared.cost_file import read_cost_file
from mdi_shared.errors import ConfigError
from mdi_shared.hardware import H200
from mdi_shared.linear_cost import LinearCost
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
        self.source = open_model(model, self.options.device, self.options.revision)
        self.config, self.tokenizer = self.source.config, self.source.tokenizer
        _check_weight_memory(self.source, self.options)
        numerics = Numerics(self.options.numerics)
        layout = CacheLayout(config=self.config, numerics=numerics)
        workspace = self._require_memory(layout, scheduler_options)
        self.model = Transformer(
            self.config,
            Weights(self.source.tensors, self.options.device, budget=self._budget()),
            token_map=self.source.token_map,
            numerics=numerics,
        )
        self.scheduler_config = self._sized(
            layout, scheduler_options, _kv_bytes(self.options, workspace)
        )
        self.engine = self._engine(layout)

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
        kv_bytes = _kv_bytes(self.options, 0) if is_sized else DEFAULT_KV_CACHE_GB * GB
        config = self._sized(layout, options, kv_bytes)
        limits = StepLimits(rows=config.token_budget, seqs=config.max_num_seqs,
                            context=config.max_model_len)  # fmt: skip
        estimate = estimate_memory(
            layout, limits, num_blocks=config.num_blocks, num_slots=config.num_slots,
            copies_limit=self.options.expanded_weights_bytes,
            for_kernels=self.options.uses_kernels,
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
        )
        cost = self._chunk_cost(shape)
        recording = None
        if self.options.record is not None:
            options = {"engine": asdict(self.options), "chunk_cost": cost.describe()}
            recording = Recording(shape, hardware=_hardware(device), options=options)
        return LLMEngine(
            Scheduler(config, make_policy(config, shape, cost)),
            runner,
            vocab_size=self.config.vocab_size,
            tokenizer=self.tokenizer,
            recording=recording,
            seed=self.options.seed,
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
        return [done[name] for name in names]

    def stream(
        self,
        prompts: Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output at every step that adds to it."""
        self._add_all(prompts, sampling_params, prompt_token_ids)
        while self.engine.has_unfinished_requests():
            yield from self.engine.step()
        self.engine.drain()
        self.save_recording()

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, rather than in the first step of each size."""
        config = self.scheduler_config
        self.engine.runner.warm_up(min(config.token_budget, config.max_model_len))

    def save_recording(self) -> None:
        """Write the run so far to the files `record` names; nothing without it."""
        if self.options.record is not None and self.engine.recording is not None:
            self.engine.recording.run(self.engine.scheduler).save(self.options.record)

    def close(self) -> None:
        """Save the recording and release the device; the object cannot be used afterwards."""
        self.save_recording()
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        each = self._params_for(len(all_ids), params)
        for ids, one in zip(all_ids, each, strict=True):
            self.engine.check_request(ids, one)
        return [self.engine.add_request(ids, one) for ids, one in zip(all_ids, each, strict=True)]

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            return [SamplingParams() for _ in range(count)]
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ConfigError("sampling_params", len(params),
                              f"there must be one for each of the {count} prompts")  # fmt: skip
        return list(params)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ConfigError("prompts", prompt, "the checkpoint has no tokenizer.json; give "
                              "token ids")  # fmt: skip
        return self.tokenizer.encode(prompt)


def _check_weight_memory(source: ModelSource, options: EngineOptions) -> None:
    limit = options.weight_cache_memory_gb
    weights = source.weight_bytes
    if limit is not None and weights > limit * GB:
        raise ConfigError("weight_cache_memory_gb", limit,
                          f"the model's weights take {weights / GB:.3f} GB")  # fmt: skip


def _kv_bytes(options: EngineOptions, workspace: int) -> float:
    """Bytes for the cache; a share of GPU memory counts what is free once the weights are in.

    A step's workspace stays free then.
    """
    if options.gpu_memory_utilization is None:
        given = options.kv_cache_memory_gb
        return (given if given is not None else DEFAULT_KV_CACHE_GB) * GB
    free, total = torch.cuda.mem_get_info(options.device)
    return free - (1.0 - options.gpu_memory_utilization) * total - workspace


def _hardware(device: str) -> str:
    if device == "cpu":
        return "cpu"
    return torch.cuda.get_device_name(device)
