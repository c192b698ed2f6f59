"""Runs step plans on the device: plan in, tokens out, one step after another.

A runner lays out each step's inputs, starts copy, model and sampler, and hands back something to
wait on. The sampled tokens stay on the device too: a decode row whose input token is still in
flight takes it from the step before (remap: docs/rules.md, R25), so that the next step can be
launched before this one's tokens have reached the host.

On a GPU the engine's thread launches: kernels run later by themselves, and between a step's launch
and the wait for its tokens the host does not wait for the device. It decides nothing. Read next:
`engine.py` (the driver), `step_inputs.py`, `step_program.py`, `graphs.py`, `device_clock.py`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mdi_exec.engine.device_clock import DeviceClock, Mark, clock_of
from mdi_exec.engine.draft_inputs import drafted_inputs, drafted_placeholder
from mdi_exec.engine.drafting import Drafting
from mdi_exec.engine.graphs import StepGraphs
from mdi_exec.engine.request_state import RequestState
from mdi_exec.engine.step_inputs import StepInputs, gather_inputs, placeholder_prompt, sizes_up_to
from mdi_exec.engine.step_program import RESULT_COLUMNS, Forwarded, Results, StepProgram
from mdi_exec.engine.step_tokens import (
    Pending,
    StepTokens,
    floats_of,
    logprobs_of,
    only_accepted,
)
from mdi_exec.errors import EngineStoppedError, NumericsError
from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.staging import Staging
from mdi_exec.model.tails import Tails
from mdi_exec.model.transformer import Transformer
from mdi_exec.ops.sampler import Sampler
from mdi_exec.ranks.parallel import RankGroup
from mdi_shared.plan import StepPlan, TailCopy


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose work is with the device. `tops` are alternatives, on the host when it is done.

    Marks stand before the model, behind it, and behind the copy of the results. `batch` is None
    behind a graph, whose memory belongs to the next step by now.
    """

    inputs: StepInputs
    batch: Batch | None
    packed: Tensor
    tops: tuple[Tensor, Tensor]
    marks: tuple[Mark, Mark, Mark]
    handed_ns: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`Pending` of a step on a GPU: its results are read when asked for."""

    collect: Callable[[], StepTokens]

    def result(self) -> StepTokens:
        return self.collect()


class ModelRunner:
    """Owns the model and its cache; steps run in the order they are launched.

    On a CPU a single worker thread stands for the device, so that planning really overlaps it.
    `graph_limits`, (most sequences, longest context), turns CUDA graphs on, where
    the model can be captured. `on_logits`, for tests and tools, is called with a step's sampled
    requests and their float32 logits [m, vocab_size], which the next step may overwrite: on a GPU
    when the step is launched, before the device has computed them.

    `drafting` has decode steps verify drafts and make new ones.

    In a `group` of several ranks a step without requests runs a placeholder row, because the other
    ranks meet this one in every layer; the model's exchange is told each step's rows of all ranks.
    """

    def __init__(
        self,
        model: Transformer,
        cache: DeviceCache,
        sampler: Sampler,
        *,
        replay_keep_tokens: int = 0,
        graph_limits: tuple[int, int] | None = None,
        measures_experts: bool = False,
        on_logits: Callable[[Sequence[RequestState], Tensor], None] | None = None,
        group: RankGroup | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.model = model
        self.cache_layout = cache.layout
        self._tails = Tails(cache)
        self.replay_keep_tokens = replay_keep_tokens
        self.on_logits = on_logits
        self._group = group if group is not None else RankGroup()
        self._program = StepProgram(model, cache, sampler, max_rows=cache.num_slots,
                                    measures_experts=measures_experts,
                                    drafting=drafting)  # fmt: skip
        self.graphs: StepGraphs | None = None
        if graph_limits is not None and model.is_capturable:
            self.graphs = StepGraphs(self._program, max_num_seqs=graph_limits[0],
                                       max_model_len=graph_limits[1])  # fmt: skip
        self._staging = Staging(model.device)
        self._is_cuda = model.device.type == "cuda"
        self._worker = None if self._is_cuda else ThreadPoolExecutor(1, "device")
        with self._on_device():
            self._clock: DeviceClock = clock_of(model.device)
        self._row_of: dict[int, int] = {}  # sequence id -> its row among the newest samples
        self._last_end_ns = 0
        self._has_failed = False

    def warm_up(self, max_rows: int) -> None:
        """Do now what the first steps of each size would do: compile kernels, capture graphs.

        Kernels come in variants by number of rows: prompts of many sizes up to `max_rows` meet them
        all. Everything runs on placeholders, before any request; waits for it.
        """
        with self._on_device():
            for rows in sizes_up_to(max_rows):
                inputs = placeholder_prompt(rows)
                tensors = self._staging.upload(inputs.arrays)
                self._program.sample(self._program.forward(inputs.host, tensors), tensors,
                                     inputs.needs)  # fmt: skip
            if self.graphs is not None:
                self.graphs.warm_up()

    def close(self) -> None:
        """Finish what is launched, let the worker go, free cache and graphs; harmless twice."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        else:
            torch.cuda.synchronize(self.model.device)
        if self.graphs is not None:
            self.graphs.free()
        self._program.cache.free()
        self._tails.free()

    def launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> "tuple[Pending, int]":
        """Start a step and return at once; `requests` are its sequences, in plan order.

        Returns what the step will have sampled, and the monotonic time it was handed over.
        """
        if not plan.seq_ids and self._group.size == 1:
            return self._nothing(plan.copies)
        inputs = self._inputs(plan, requests)
        sampled = [s for i, s in enumerate(plan.seq_ids) if not (
            plan.is_partial and i == len(plan.seq_ids) - 1)]  # fmt: skip
        self._row_of = {seq_id: row for row, seq_id in enumerate(sampled)}
        self._announce(inputs)
        handed_ns = time.monotonic_ns()
        if self._worker is not None:
            return self._worker.submit(self._run, inputs, handed_ns, plan.copies), handed_ns
        with self._on_device():
            flight = self._start(inputs, handed_ns, plan.copies)
        return _Waiting(lambda: self._collect(flight)), handed_ns

    def _announce(self, inputs: StepInputs) -> None:
        """Tell the exchange every rank's rows; on the host, so that no device is waited for."""
        gathered = self._group.gather((inputs.num_rows, inputs.num_kept_rows, inputs.num_drafting))
        if self._group.size == 1:
            return
        self.model.exchange.begin_step([(rows, kept) for rows, kept, _ in gathered])
        if self._program.drafting is not None and inputs.num_drafting:
            each = self._program.drafting.size
            self.model.exchange.begin_step([(each * seqs, each * seqs) for *_, seqs in gathered])

    def _inputs(self, plan: StepPlan, requests: Sequence[RequestState]) -> StepInputs:
        # Behind bounded replay's cut a step has fewer rows, and how many hangs on its prompts.
        can_replay = self.graphs is not None and not (plan.is_prefill and self.replay_keep_tokens)
        shape = self.graphs.shape_of(plan) if self.graphs is not None and can_replay else None
        if self._program.drafting is not None and not plan.is_prefill:
            is_idle = not plan.seq_ids
            return (
                drafted_placeholder() if is_idle else drafted_inputs(plan, requests, self._row_of)
            )
        if not plan.seq_ids:
            return placeholder_prompt(1) if shape is None else shape.placeholders()
        return gather_inputs(plan, requests, self._row_of, shape=shape,
                             replay_keep_tokens=self.replay_keep_tokens)  # fmt: skip

    def _nothing(self, copies: tuple[TailCopy, ...]) -> "tuple[Pending, int]":
        """A step without rows: it is over at once, but not before its predecessors."""
        self._row_of = {}
        now_ns = time.monotonic_ns()

        def collect() -> StepTokens:
            if self._worker is not None:
                self._tails.copy(copies)
            at_ns = max(now_ns, self._last_end_ns)
            return StepTokens([], [], at_ns, at_ns)

        if self._worker is None:
            with self._on_device():
                self._tails.copy(copies)
        return (_Waiting(collect) if self._worker is None else self._worker.submit(collect)), now_ns

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.model.device) if self._is_cuda else nullcontext()

    def _run(self, inputs: StepInputs, handed_ns: int, copies: tuple[TailCopy, ...]) -> StepTokens:
        """Run a step on the worker; behind one that failed none runs any more.

        In a group it would meet the other ranks in the middle of the failed step.
        """
        if self._has_failed:
            raise EngineStoppedError("a step before this one has failed")
        try:
            return self._collect(self._start(inputs, handed_ns, copies))
        except BaseException:
            self._has_failed = True
            raise

    @torch.inference_mode()
    def _start(self, inputs: StepInputs, handed_ns: int, copies: tuple[TailCopy, ...]) -> _Flight:
        """Hand a step's work to the device, behind what is to be copied before it."""
        begin = self._clock.mark()
        self._tails.copy(copies)
        if inputs.graph_size:
            assert self.graphs is not None, "a padded step is for a graph"
            forwarded = self.graphs.forward(inputs, self._staging)
            middle = self._clock.mark()
            self._show_logits(inputs, forwarded)
            results = self.graphs.sample(inputs)
        else:
            tensors = self._staging.upload(inputs.arrays)
            forwarded = self._program.forward(inputs.host, tensors)
            middle = self._clock.mark()
            self._show_logits(inputs, forwarded)
            results = self._program.sample(forwarded, tensors, inputs.needs)
        packed, tops = self._to_host(results)
        marks = (begin, middle, self._clock.mark())
        batch = None if inputs.graph_size else forwarded.batch
        return _Flight(inputs, batch, packed, tops, marks, handed_ns)

    def _show_logits(self, inputs: StepInputs, forwarded: Forwarded) -> None:
        if self.on_logits is not None and inputs.requests:
            asked = inputs.requests_of_rows
            self.on_logits(asked, forwarded.logits[: len(asked)])

    def _to_host(self, results: Results) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Start copies of the results into pinned memory of their own."""
        drawn = results.sampled

        def copy(tensor: Tensor) -> Tensor:
            if not self._is_cuda:
                return tensor
            out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return out.copy_(tensor, non_blocking=True)

        if not drawn.top_ids.shape[1]:
            nothing = torch.empty(0)
            return copy(results.packed), (nothing, nothing)
        return copy(results.packed), (copy(drawn.top_ids), copy(drawn.top_logprobs))

    @torch.inference_mode()
    def _collect(self, flight: _Flight) -> StepTokens:
        """Wait for a step and read its results."""
        clock, inputs = self._clock, flight.inputs
        count = len(inputs.requests_of_rows)
        clock.wait(flight.marks[-1])
        now_ns = time.monotonic_ns()
        begin_ns, middle_ns, end_ns = (clock.nanoseconds(mark) for mark in flight.marks)
        # Device times are placed on the host's clock with an error: keep what must be in order.
        start_ns = min(max(begin_ns, flight.handed_ns, self._last_end_ns), now_ns)
        end_ns = min(max(end_ns, start_ns), now_ns)
        self._last_end_ns = end_ns
        rows = len(inputs.draws)
        values = flight.packed[: RESULT_COLUMNS * rows].view(RESULT_COLUMNS, rows)[:, :count]
        finite = values[2].tolist()
        if not all(finite):
            self._fail(flight, finite.index(0))
        rest = flight.packed[RESULT_COLUMNS * rows :]
        *logprobs, imbalance = floats_of(torch.cat((values[1], rest[:1]))).tolist()
        tokens = values[0].tolist()
        found = StepTokens(
            tokens, logprobs_of(tokens, logprobs, flight.tops, inputs.draws), start_ns, end_ns,
            min(max(end_ns - middle_ns, 0), end_ns - start_ns), inputs.graph_size, imbalance,
        )  # fmt: skip
        return found if len(rest) == 1 else only_accepted(found, inputs, rest[1:])

    def _fail(self, flight: _Flight, row: int) -> None:
        """Raise for a request whose logits hold NaN or infinity, with the part at fault."""
        with self._on_device():
            batch = flight.batch or self._batch_again(flight.inputs)
            part = self.model.first_broken_part(batch, self._program.cache)
        raise NumericsError(flight.inputs.requests_of_rows[row].req_id, part)

    def _batch_again(self, inputs: StepInputs) -> Batch:
        """Lay a graph's decode step out anew, with the tokens that have arrived since."""
        ids = inputs.host.arrays["token_ids"].copy()
        for row, (request, draw) in enumerate(zip(inputs.requests, inputs.draws, strict=False)):
            if draw.position <= len(request.tokens):
                ids[row] = request.tokens[draw.position - 1]
        arrays = {**inputs.host.arrays, "token_ids": ids}
        return Batch.place(inputs.host, self._staging.upload(arrays))
