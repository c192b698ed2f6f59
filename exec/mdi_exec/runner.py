"""Runs step plans on the device: plan in, tokens out, one step after another.

A runner builds each step's batch, runs model and sampler, and hands back a future to wait on. The
sampled tokens stay on the device too: a decode row whose input token is still in flight takes it
from the step before (remap, engine-semantics §4.2), so that the next step can be launched before
this one's tokens have reached the host.

It decides nothing. Read next: `engine.py` (the driver), `model/transformer.py`, `sampler.py`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdi_exec.batch import Batch, BatchItem
from mdi_exec.cache import DeviceCache
from mdi_exec.errors import NumericsError
from mdi_exec.model.transformer import Transformer
from mdi_exec.request_state import Logprobs, RequestState
from mdi_exec.sampler import Draw, Sampled, Sampler, SamplingRows
from mdi_shared.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step sampled, on the host: a row per sequence that yields a token, in plan order.

    `start_ns` and `end_ns` bound the device's work on the clock of `time.monotonic_ns`.
    """

    token_ids: list[int]
    logprobs: list[Logprobs]
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _StepInputs:
    """A step as host integers. `remap` pairs a row of this step with a sample of the last one."""

    items: list[BatchItem] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    remap: list[tuple[int, int]] = field(default_factory=list)
    sampled: list[RequestState] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


class ModelRunner:
    """Owns the model and its cache; steps run in the order they are launched.

    On a CPU a single worker thread stands for the device, so that planning really overlaps it.
    `on_logits`, for tests and tools, is called in that thread with the step's sampled requests
    and their float32 logits [m, vocab_size].
    """

    def __init__(
        self,
        model: Transformer,
        cache: DeviceCache,
        sampler: Sampler,
        *,
        replay_keep_tokens: int = 0,
        on_logits: Callable[[Sequence[RequestState], Tensor], None] | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.replay_keep_tokens = replay_keep_tokens
        self.on_logits = on_logits
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._sampled: Tensor | None = None  # tokens the newest finished step drew, on the device
        self._row_of: dict[int, int] = {}  # sequence id -> its row among them

    def close(self) -> None:
        """Finish what is launched and let the worker go."""
        self._device.shutdown(wait=True)

    def launch(
        self, plan: StepPlan, requests: Sequence[RequestState]
    ) -> "tuple[Future[StepTokens], int]":
        """Start a step and return at once; `requests` are its sequences, in plan order.

        Returns what the step will have sampled, and the monotonic time it was handed over. The
        future raises `NumericsError` when a request's logits are not finite.
        """
        inputs = self._gather(plan, requests)
        handed_ns = time.monotonic_ns()
        return self._device.submit(self._run, inputs), handed_ns

    def _gather(self, plan: StepPlan, requests: Sequence[RequestState]) -> _StepInputs:
        """Read everything off the requests now: by the time the step runs they have moved on."""
        inputs, row_of = _StepInputs(), {}
        for index, (item, request) in enumerate(zip(plan.items, requests, strict=True)):
            table = request.block_table
            del table[item.num_blocks - len(item.new_blocks) :]
            table += item.new_blocks
            known = request.tokens[item.k - item.q : item.k]
            if len(known) < item.q:
                assert not plan.is_prefill, f"{request.req_id!r}: a prompt token is missing"
                inputs.remap.append((len(inputs.token_ids), self._row_of[item.seq_id]))
                known = [0]
            inputs.token_ids += known
            full_len = plan.full_lens[index] if plan.is_prefill else item.k
            inputs.items.append(
                BatchItem(
                    item.q, item.k, item.slot, tuple(table), int(item.is_last_chunk), full_len
                )
            )
            if item.is_last_chunk:
                row_of[item.seq_id] = len(inputs.sampled)
                inputs.sampled.append(request)
                # k is also the index of the token being generated (§5.2).
                inputs.draws.append(Draw(request.params, item.k, item.k - request.prompt_len))
        self._row_of = row_of
        return inputs

    @torch.inference_mode()
    def _run(self, inputs: _StepInputs) -> StepTokens:
        start_ns = time.monotonic_ns()
        if not inputs.items:
            return StepTokens([], [], start_ns, start_ns)
        device = self.model.device
        ids = torch.tensor(inputs.token_ids, dtype=torch.int32, device=device)
        if inputs.remap:
            assert self._sampled is not None, "a token is in flight but no step has run"
            rows, sources = torch.tensor(inputs.remap, device=device).T
            ids[rows] = self._sampled[sources].to(torch.int32)
        batch = Batch.build(inputs.items, ids, device, replay_keep_tokens=self.replay_keep_tokens)
        logits = self.model.forward(batch, self.cache)
        if self.on_logits is not None:
            self.on_logits(inputs.sampled, logits)
        drawn = self.sampler(logits, SamplingRows.of(inputs.draws, device))
        self._sampled = drawn.token_ids
        self._check_finite(logits, inputs, batch)
        return StepTokens(
            drawn.token_ids.tolist(), _logprobs(drawn, inputs.draws), start_ns, time.monotonic_ns()
        )

    def _check_finite(self, logits: Tensor, inputs: _StepInputs, batch: Batch) -> None:
        """Raise for the first request whose logits hold NaN or infinity, with the part at fault."""
        broken = ~torch.isfinite(logits).all(dim=1)
        if not bool(broken.any()):
            return
        row = int(broken.nonzero()[0, 0])
        part = self.model.first_broken_part(batch, self.cache)
        raise NumericsError(inputs.sampled[row].req_id, part)


def _logprobs(drawn: Sampled, draws: Sequence[Draw]) -> list[Logprobs]:
    """Per row: the drawn token's log-probability and those of as many alternatives as it wants."""
    chosen = zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True)
    if not drawn.top_ids.shape[1]:
        return [{token: logprob} for token, logprob in chosen]
    tops = zip(drawn.top_ids.tolist(), drawn.top_logprobs.tolist(), strict=True)
    out = []
    for draw, (token, logprob), (ids, values) in zip(draws, chosen, tops, strict=True):
        wanted = draw.params.top_logprobs
        out.append({**dict(zip(ids[:wanted], values[:wanted], strict=True)), token: logprob})
    return out
