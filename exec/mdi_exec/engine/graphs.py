"""Decode steps as CUDA graphs: recorded once per batch size, then replayed with one call each.

A decode step launches thousands of small kernels, which takes the host longer than the device. A
graph is launched as a whole. It has fixed shapes and addresses: a batch is padded with placeholder
rows to the next size there is a graph for, its inputs are copied to the graph's own buffer, and
whatever depends on context lengths is sized for `max_model_len`. Prefill steps are not captured.

Model and sampling are two graphs, so that an event can stand between them and that a step which
wants filters or alternatives samples without one. All graphs share one memory pool: they run one
after the other on one stream. Read next: `step_program.py`, `runner.py`.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mdi_exec.engine.step_inputs import DecodeShape, StepInputs
from mdi_exec.engine.step_program import Forwarded, Results, StepProgram
from mdi_exec.model.batch import BLOCK_TOKENS
from mdi_exec.model.staging import Packing, Staging
from mdi_exec.ops.sampler import SamplingNeeds
from mdi_shared.cost.step_cost import graph_sizes

T = TypeVar("T")

# Any temperature, no filters, no alternatives. A greedy row is the same with noise about.
CAPTURED_NEEDS = SamplingNeeds(has_filters=False, has_noise=True, num_top=0)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One captured size: where its inputs go and where its results appear."""

    packing: Packing
    inputs: Tensor
    tensors: dict[str, Tensor]
    forward: "torch.cuda.CUDAGraph"
    forwarded: Forwarded
    sampling: "torch.cuda.CUDAGraph"
    results: Results


class DecodeGraphs:
    """Graphs of `program`'s decode steps, captured when first needed or by `warm_up`.

    Capturing waits for the device. The program must be capturable: `Transformer.is_capturable`.
    """

    def __init__(self, program: StepProgram, *, max_num_seqs: int, max_model_len: int) -> None:
        self.program = program
        self.sizes = graph_sizes(max_num_seqs)
        self.max_model_len = max_model_len
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool: Any = None  # the memory pool's handle, once there is one

    def shape(self, num_rows: int) -> DecodeShape | None:
        """Return the shape a step of so many decode rows is padded to; None if it is too large."""
        at = bisect_left(self.sizes, num_rows)
        if at == len(self.sizes):
            return None
        return DecodeShape(self.sizes[at], -(-self.max_model_len // BLOCK_TOKENS))

    def warm_up(self) -> None:
        """Capture every size; the largest first, whose memory the others then use again."""
        for size in reversed(self.sizes):
            self._graph(size)

    def free(self) -> None:
        """Give up all graphs and their memory; the device must be done with them."""
        self._graphs.clear()
        self._pool = None

    def forward(self, inputs: StepInputs, staging: Staging) -> Forwarded:
        """Copy a padded step's inputs and replay its model graph; results stand in fixed memory."""
        graph = self._graph(inputs.graph_size)
        staging.copy_into(graph.inputs, graph.packing, inputs.arrays)
        graph.forward.replay()
        return graph.forwarded

    def sample(self, inputs: StepInputs) -> Results:
        """Sample what `forward` left: with the graph if that does all the step needs."""
        graph, needs = self._graph(inputs.graph_size), inputs.needs
        if needs.has_filters or needs.num_top:
            return self.program.sample(graph.forwarded, graph.tensors, needs)
        graph.sampling.replay()
        return graph.results

    def _graph(self, size: int) -> DecodeGraph:
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    @torch.inference_mode()
    def _capture(self, size: int) -> DecodeGraph:
        """Run placeholder rows once, so that everything is compiled and loaded; then record them.

        The run writes to the reserved block and slot, and to the last tokens, which are put back:
        a step in flight may have left them for the next one.
        """
        program, shape = self.program, self.shape(size)
        assert shape is not None, f"{size} is not one of the sizes {self.sizes}"
        inputs = shape.placeholders()
        packing = Packing.of(inputs.arrays)
        device = program.model.device
        buffer = torch.empty(packing.num_bytes, dtype=torch.uint8, device=device)
        Staging(device).copy_into(buffer, packing, inputs.arrays)
        tensors = packing.views(buffer)

        def forward() -> Forwarded:
            return program.forward(inputs.host, tensors, max_k=self.max_model_len)

        kept = program.last_tokens.clone()
        program.sample(forward(), tensors, CAPTURED_NEEDS)
        model_graph, forwarded = _record(forward, self._pool)
        self._pool = model_graph.pool()
        sampling_graph, results = _record(
            lambda: program.sample(forwarded, tensors, CAPTURED_NEEDS), self._pool
        )
        program.last_tokens.copy_(kept)
        return DecodeGraph(
            packing, buffer, tensors, model_graph, forwarded, sampling_graph, results
        )


def _record(work: Callable[[], T], pool: Any) -> tuple["torch.cuda.CUDAGraph", T]:  # noqa: ANN401
    """Capture the work launched by a call, and return what it returned; nothing runs."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may talk to the device meanwhile; only this one's calls are recorded.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = work()
    return graph, out
