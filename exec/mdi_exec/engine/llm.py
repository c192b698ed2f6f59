"""Offline generation: load a checkpoint, give prompts, get outputs.

    with LLM("path/or/hub-id", max_model_len=4096, kv_cache_memory_gb=2.0) as llm:
        outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16))

Read next: `options.py` (what can be set), `rank.py` (what is loaded), `engine.py` (what runs).
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.options import EngineOptions, split_options
from mdi_exec.engine.rank import Rank
from mdi_exec.engine.request_state import RequestOutput, Sink
from mdi_exec.engine.sampling import SamplingParams, params_for_each
from mdi_exec.engine.streams import OutputStream, Place, Turns
from mdi_exec.engine.workers import GroupEngine
from mdi_exec.model.config import ModelConfig
from mdi_exec.ranks.meeting import RankAddress
from mdi_exec.weights.source import ModelSource
from mdi_exec.weights.tokenizer import Tokenizer
from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import ConfigError
from mdi_shared.placement import Placer, new_placement
from mdi_shared.request import Request

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]


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
            engine_options.require_seen_ranks(1 if address is None else address.size)
            self._rank = Rank(model, options, address=address, on_estimate=tell)
        self._placing = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Start afresh with the engine there is now."""
        self._placer = Placer(new_placement(self.options.placement), self.engine.rank_views)
        self._num_placed = 0
        in_step = self._rank is not None and self._rank.group.size > 1
        self._turns = Turns(self.engine, in_step=in_step, on_quiet=self.save_recording)

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
        rank = self._rank

        def reopen() -> None:
            rank.reopen(options)
            self._begin()

        self._turns.alone(reopen)

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
        self, prompts: Prompts | None = None, sampling_params: Params | None = None, *,
        prompt_token_ids: Prompts | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Serve all prompts and return their final outputs, in the order of the prompts.

        A prompt is a text or token ids; give one, or a list of them. `prompt_token_ids` is another
        name for the latter. One `SamplingParams` serves all, or give one per prompt; with its `n`
        above 1 a prompt's outputs follow one another. Every prompt is answered: one that cannot be
        served has a `finish_reason` that says so. Several threads may call this at a time.
        """
        with self.stream(prompts, sampling_params, prompt_token_ids=prompt_token_ids) as outputs:
            done = [output for output in outputs if output.finished]
        done += self._outputs_elsewhere(done)
        return sorted(done, key=lambda output: (output.prompt_index, output.sample_index))

    def _outputs_elsewhere(self, own: list[RequestOutput]) -> list[RequestOutput]:
        """Tell the other ranks under torchrun this one's outputs, and return theirs."""
        if self._rank is None or self._rank.group.size == 1:
            return []
        group = self._rank.group
        others = group.gather_plain([output.to_plain() for output in own])
        return [
            RequestOutput.from_plain(plain, self.tokenizer)
            for rank, outputs in enumerate(others)
            for plain in outputs
            if rank != group.rank
        ]

    def stream(
        self, prompts: Prompts | None = None, sampling_params: Params | None = None, *,
        prompt_token_ids: Prompts | None = None,
    ) -> OutputStream:  # fmt: skip
        """Like `generate`, but give each request's output at every step that adds to it.

        Requests are checked and begin now, not with the first output. Under torchrun each rank
        gives those of its own requests.
        """
        turns = self._turns  # with its engine: another thread may reopen
        engine = cast(LLMEngine | GroupEngine, turns.engine)
        requests = self._checked(engine, prompts, sampling_params, prompt_token_ids)

        def add(sink: Sink) -> Iterator[tuple[str, Place]]:
            engine.expect_requests()
            for ids, params, place in requests:
                name = self._place(engine, ids, params, sink)
                if name is not None:
                    yield name, place

        return OutputStream(turns, add)

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, rather than in the first step of each size.

        Raises `ConfigError` while requests run.
        """
        self._turns.alone(self.engine.warm_up)

    def save_recording(self) -> None:
        """Write the run so far to the files `record` names; nothing without it.

        One run for all ranks; under torchrun all of them call this, and rank 0 writes.
        """
        self._turns.alone(self._served.save_recording)

    def close(self) -> None:
        """Save the recording and release the device; the object cannot be used afterwards.

        A turn that another thread takes is waited for; requests that still run get a last output
        with the finish reason `error`. When its group has failed, a rank saves what it has recorded
        itself, as PREFIX.rankN.
        """
        self._turns.alone(self._served.close)

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

    def _checked(
        self, engine: LLMEngine | GroupEngine, prompts: Prompts | None, params: Params | None,
        prompt_token_ids: Prompts | None,
    ) -> list[tuple[list[int], SamplingParams, Place]]:  # fmt: skip
        """Check everything first, so that a bad prompt leaves no other one half-started."""
        if (prompts is None) == (prompt_token_ids is None):
            raise ConfigError("prompts", prompts, "give either prompts or prompt_token_ids")
        all_ids = [self._encode(prompt) for prompt in _listed(prompts, prompt_token_ids)]
        each = params_for_each(params, len(all_ids))
        for ids, one in zip(all_ids, each, strict=True):
            engine.check_request(ids, one)
        return [
            (ids, one.sample(sample_index), (prompt_index, sample_index))
            for prompt_index, (ids, one) in enumerate(zip(all_ids, each, strict=True))
            for sample_index in range(one.n)
        ]

    def _place(
        self, engine: LLMEngine | GroupEngine, ids: list[int], params: SamplingParams, sink: Sink
    ) -> str | None:
        """Add a request on the rank that shall serve it; all ranks under torchrun decide alike.

        Returns its name, None when another process has it.
        """
        if engine.num_ranks == 1:
            return engine.add_request(ids, params, sink=sink)
        with self._placing:
            name, params = str(self._num_placed), engine.book.draw_seed(params)
            self._num_placed += 1
            rank = self._placer.place(Request(
                req_id=name, prompt_len=len(ids), max_tokens=params.max_tokens,
                arrived_ns=engine.now_ns() if self._rank is None else 0, hints=params.hints,
            ))  # fmt: skip
            if not engine.takes(rank):
                return None
            return engine.add_request(ids, params, name, rank=rank, sink=sink)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("prompts", prompt, "the checkpoint has no tokenizer.json; give "
                                  "token ids")  # fmt: skip
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise ConfigError("prompts", prompt, "each must be a text or a list of token ids")
        return list(prompt)


def _listed(prompts: Prompts | None, prompt_token_ids: Prompts | None) -> Sequence[Prompt]:
    """Return the prompts as a list: a text, or ids alone, are one prompt."""
    name, given = ("prompts", prompts) if prompts is not None else (
        "prompt_token_ids", prompt_token_ids)  # fmt: skip
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ConfigError(name, given, "must be a text, a list of token ids, or a list of these")
    if given and all(isinstance(part, int) for part in given):
        return [cast(Sequence[int], given)]
    return cast(Sequence[Prompt], given)
