"""Offline generation: load a checkpoint, give prompts, get outputs.

    with LLM("path/or/hub-id", max_model_len=4096, kv_cache_memory_gb=2.0) as llm:
        outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

Read next: `options.py` (what can be set), `rank.py` (what is loaded), `engine.py` (what runs).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.options import EngineOptions, split_options
from mdi_exec.engine.rank import Rank
from mdi_exec.engine.request_state import RequestOutput
from mdi_exec.engine.sampling import SamplingParams, params_for_each
from mdi_exec.engine.workers import GroupEngine
from mdi_exec.model.config import ModelConfig
from mdi_exec.ranks.parallel import RankAddress
from mdi_exec.weights.source import ModelSource
from mdi_exec.weights.tokenizer import Tokenizer
from mdi_shared.config import SchedulerConfig
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

    It is the front of one rank, here (`rank.py`), or of a group of child processes (`workers.py`).
    """

    def __init__(
        self, model: str | Path, *, on_estimate: Callable[[str], None] | None = None,
        **options: object,
    ) -> None:  # fmt: skip
        engine_options, _ = split_options(options)
        tell = on_estimate if on_estimate is not None else logging.getLogger(__name__).info
        address = RankAddress.from_environment()
        self._rank: Rank | None = None
        if address is None and engine_options.data_parallel_size > 1:
            self._front = GroupEngine(model, options, engine_options, on_estimate=tell)
        else:
            self._rank = Rank(model, options, address=address, on_estimate=tell)
        self._start_placing()

    def _start_placing(self) -> None:
        self._placement, self._num_placed = placement_by_name(self.options.placement), 0

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
        if self._rank is None:
            size = self.options.data_parallel_size
            raise ConfigError("data_parallel_size", size, "ranks that the LLM has started cannot "
                              "be reopened; make another LLM")  # fmt: skip
        self._rank.reopen(options)
        self._start_placing()

    @property
    def _served(self) -> Rank | GroupEngine:
        return self._rank if self._rank is not None else self._front

    @property
    def rank(self) -> Rank:
        """This process's own rank; the front of a group that has started its ranks has none."""
        assert self._rank is not None, "this process has no rank"
        return self._rank

    @property
    def engine(self) -> LLMEngine | GroupEngine:
        """What serves: this process's engine, or the front of those in its ranks."""
        return self._rank.engine if self._rank is not None else self._front

    @property
    def options(self) -> EngineOptions:
        return self._served.options

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.engine.scheduler_config

    @property
    def source(self) -> ModelSource:
        """The model's config, tokenizer and tensors."""
        return self._rank.loaded.source if self._rank is not None else self._front.source

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.source.tokenizer

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self._rank is None else self._rank.notes

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
        if self._rank is None or self._rank.group.size == 1:
            return {}
        group = self._rank.group
        others = group.gather_objects([output.state for output in own.values()])
        return {
            state.req_id: RequestOutput(state, (), self.tokenizer)
            for rank, states in enumerate(others)
            for state in states
            if rank != group.rank
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
        self.engine.warm_up()

    def save_recording(self) -> None:
        """Write the run so far to the files `record` names; nothing without it.

        One run for all ranks; under torchrun all of them call this, and rank 0 writes.
        """
        self._served.save_recording()

    def close(self) -> None:
        """Save the recording and release the device; the object cannot be used afterwards.

        When its group has failed, a rank saves what it has recorded itself, as PREFIX.rankN.
        """
        self._served.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._rank is not None:
            self._rank.group.fail(error)  # the other ranks wait for no more turns of this one
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
