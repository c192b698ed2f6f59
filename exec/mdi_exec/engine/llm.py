"""Offline generation: load a checkpoint, give prompts, get outputs.

    with LLM("path/or/hub-id", max_model_len=4096, kv_cache_memory_gb=2.0) as llm:
        outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

Read next: `options.py` (what can be set), `loaded.py` (the model), `engine.py` (what runs).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.loaded import CostModel, LoadedModel
from mdi_exec.engine.options import EngineOptions, split_options
from mdi_exec.engine.request_state import RequestOutput
from mdi_exec.engine.sampling import SamplingParams, params_for_each
from mdi_exec.engine.workers import GroupEngine
from mdi_exec.errors import EngineStoppedError
from mdi_exec.ranks.parallel import (
    RankAddress,
    RankGroup,
    join_group,
    own_device,
    require_even_experts,
)
from mdi_exec.weights.source import open_model
from mdi_shared.cost.predicted import read_cost_file
from mdi_shared.errors import ConfigError
from mdi_shared.placement import placement_by_name

Prompt = str | Sequence[int]


class LLM:
    """A loaded model and its engine.

    `model` is a checkpoint directory, a hub id, or "random:<preset>" for weights made up on the
    device (`weights/source.py`). Keyword options are those of `EngineOptions` and
    `SchedulerConfig`; an unknown one raises `ConfigError` listing them all. Raises
    `CheckpointError` when the checkpoint is not what its config says. `on_estimate` is called with
    a line per rank on the memory it will take, before it loads: on a GPU, and on any device in a
    group; without it the lines are logged (INFO). `notes` are lines that the user should see, such
    as why another chunk policy runs than the one asked for.
    """

    def __init__(
        self, model: str | Path, *, on_estimate: Callable[[str], None] | None = None,
        **options: object,
    ) -> None:  # fmt: skip
        self.options, scheduler_options = split_options(options)
        # Read first: a bad file is no reason to load weights.
        cost_model = _read_cost_model(self.options)
        tell = on_estimate if on_estimate is not None else logging.getLogger(__name__).info
        self.notes: tuple[str, ...] = ()
        self.group = RankGroup()
        self.loaded: LoadedModel | None = None
        self._placement = placement_by_name(self.options.placement)
        self._num_placed = 0
        self._is_closed = False
        address = RankAddress.from_environment()
        if address is None and self.options.data_parallel_size > 1:
            self._start_ranks(model, options, tell)
            return
        self.options.require_group(1 if address is None else address.size)
        if address is not None:
            self.group = join_group(address, self.options.group_timeout_s)
        with self.group.ends_with():
            self.loaded = LoadedModel(model, self.options, scheduler_options, self.group, tell)
            self.source, self.model = self.loaded.source, self.loaded.transformer
            self.config, self.tokenizer = self.loaded.config, self.loaded.tokenizer
            self._open(self.loaded, self.loaded.options, scheduler_options, cost_model)

    def _start_ranks(
        self, model: str | Path, options: dict[str, Any], tell: Callable[[str], None]
    ) -> None:
        """Be the front of a group whose ranks are child processes; no model is loaded here."""
        size = self.options.data_parallel_size
        self.options.require_group(size)
        self.source = open_model(model, "cpu", self.options.revision)
        self.config, self.tokenizer = self.source.config, self.source.tokenizer
        require_even_experts(self.config.n_routed_experts, size)
        self.engine: LLMEngine | GroupEngine = GroupEngine(
            model, options, size=size, port=self.options.group_port, seed=self.options.seed,
            vocab_size=self.config.vocab_size, tokenizer=self.tokenizer, on_estimate=tell,
        )  # fmt: skip
        self.scheduler_config = self.engine.scheduler_config

    def _open(
        self, loaded: LoadedModel, options: EngineOptions, scheduler_options: dict[str, Any],
        cost_model: CostModel | None,
    ) -> None:  # fmt: skip
        """Serve with a fresh engine from now on."""
        self.engine, self.notes = loaded.engine(options, scheduler_options, cost_model)
        self.options, self.scheduler_config = options, self.engine.scheduler.config

    def reopen(self, **options: object) -> None:
        """Serve on with other options: a fresh engine and cache on the weights that are loaded.

        Options are those of `LLM`. One that is not given has its default again, but those of
        loading (`options.LOADING`) stay what they are. The recording so far is saved, requests
        that still run are dropped, the old cache and graphs are freed. Under torchrun all ranks
        call this together, between two `generate`s.

        Raises `ConfigError`, before anything is closed, for an option of loading that would
        change, for whatever `LLM` refuses, and for a group whose ranks this LLM has started; and,
        once the old engine is closed, for a cache that will not fit. Raises `EngineStoppedError`
        after `close`.
        """
        loaded = self.loaded
        if loaded is None:
            size = self.options.data_parallel_size
            raise ConfigError("data_parallel_size", size, "ranks that the LLM has started cannot "
                              "be reopened; make another LLM")  # fmt: skip
        if self._is_closed:
            raise EngineStoppedError("it was closed")
        if "device" in options:  # a rank that was given "cuda" has one of the GPUs
            options["device"] = own_device(str(options["device"]), self.group)
        engine_options, scheduler_options = split_options(loaded.options.keep_loading(options))
        loaded.planned_config(engine_options, scheduler_options)
        cost_model = _read_cost_model(engine_options)
        with self.group.ends_with():
            self._save_last()
            self.rank_engine.close(leaves_group=False)
            loaded.require_room(engine_options, scheduler_options)
            self._open(loaded, engine_options, scheduler_options, cost_model)
        self._placement, self._num_placed = placement_by_name(self.options.placement), 0

    @property
    def rank_engine(self) -> LLMEngine:
        """This process's own engine; the front of a group that has started its ranks has none."""
        assert isinstance(self.engine, LLMEngine), "this process has no rank"
        return self.engine

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
            self._save_last()
        finally:
            self.engine.close()

    def _save_last(self) -> None:
        """Save the recording of an engine that will be closed."""
        if not self.group.is_open:
            self._save_own_part()
        elif not self.engine.is_stopped or self.engine.num_ranks == 1:
            self.save_recording()

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


def _read_cost_model(options: EngineOptions) -> CostModel | None:
    return None if options.cost_model is None else read_cost_file(options.cost_model)
