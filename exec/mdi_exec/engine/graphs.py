"""Decode steps and short prefill steps as CUDA graphs: recorded once a shape, then replayed.

A step launches thousands of small kernels, which takes the host longer than the device unless the
step has many rows. A graph is launched as a whole. It has fixed shapes and addresses: a batch is
padded with placeholders to the next shape there is a graph for, its inputs are copied to the
graph's own buffer, and whatever depends on context lengths is sized for the shape's longest one.

Model and sampling are two graphs, so that an event can stand between them and that a step which
wants filters or alternatives samples without one. All graphs share one memory pool: they run one
after the other on one stream. Read next: `step_program.py`, `runner.py`.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from mdi_exec.engine.step_inputs import GraphShape, StepInputs
from mdi_exec.engine.step_program import Forwarded, Results, StepProgram
from mdi_exec.model.staging import Packing, Staging
from mdi_exec.ops.sampler import SamplingNeeds
from mdi_shared.cost.graph_sizes import (
    PREFILL_CONTEXTS,
    PREFILL_ROWS,
    PREFILL_SEQS,
    graph_sizes,
    prefill_shape,
)
from mdi_shared.plan import StepPlan

T = TypeVar("T")

# Any temperature, no filters, no alternatives. A greedy row is the same with noise about.
CAPTURED_NEEDS = SamplingNeeds(has_filters=False, has_noise=True, num_top=0)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One captured shape: where its inputs go and where its results appear."""

    packing: Packing
    inputs: Tensor
    tensors: dict[str, Tensor]
    forward: "torch.cuda.CUDAGraph"
    forwarded: Forwarded
    sampling: "torch.cuda.CUDAGraph"
    results: Results


class StepGraphs:
    """Graphs of `program`'s steps, captured by `warm_up`, or when a step first needs one.

    A prefill shape is captured when it is needed for the second time: capturing takes longer than
    the step. It waits for the device. The program must be capturable: `Transformer.is_capturable`.
    """

    def __init__(self, program: StepProgram, *, max_num_seqs: int, max_model_len: int) -> None:
        self.program = program
        self.sizes = graph_sizes(max_num_seqs)
        self.max_model_len = max_model_len
        self._graphs: dict[GraphShape, StepGraph] = {}
        self._met: set[GraphShape] = set()
        self._pool: Any = None  # the memory pool's handle, once there is one

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        """Return the shape that a step is padded to; None if it runs without a graph."""
        if not plan.is_prefill:
            is_plain = max(plan.qs, default=1) == 1  # no row but the newest of each sequence
            return self._decode_shape(max(len(plan.seq_ids), 1)) if is_plain else None
        if not plan.seq_ids or plan.decodes:
            return None  # a mixed step has rows of every kind
        sizes = prefill_shape(sum(plan.qs), len(plan.seq_ids), max(plan.ks))
        shape = None if sizes is None else self._prefill_shape(*sizes)
        if shape is None or shape in self._graphs or shape in self._met:
            return shape
        self._met.add(shape)
        return None

    def _decode_shape(self, num_rows: int) -> GraphShape | None:
        at = bisect_left(self.sizes, num_rows)
        if at == len(self.sizes):
            return None
        return GraphShape(self.sizes[at], self.sizes[at], self.max_model_len)

    def _prefill_shape(self, rows: int, seqs: int, max_k: int) -> GraphShape | None:
        """Return None where the engine never has as many sequences: samples have no room."""
        if seqs > self.program.last_tokens.shape[0]:
            return None
        return GraphShape(rows, seqs, min(max_k, max(self.max_model_len, rows)))

    def shapes(self) -> list[GraphShape]:
        """Return all shapes there are graphs for, the largest of each kind first."""
        sizes = product(PREFILL_ROWS, PREFILL_SEQS, PREFILL_CONTEXTS)
        prefill = (self._prefill_shape(*each) for each in sizes if each[0] >= each[1])
        decode = map(self._decode_shape, self.sizes)
        of_both = [{shape for shape in kind if shape is not None} for kind in (prefill, decode)]
        return [shape for kind in of_both for shape in sorted(kind, key=_extent, reverse=True)]

    def warm_up(self) -> None:
        """Capture every shape; the largest first, whose memory the others then use again."""
        for shape in self.shapes():
            self._graph(shape)

    def free(self) -> None:
        """Give up all graphs and their memory; the device must be done with them."""
        self._graphs.clear()
        self._pool = None

    def forward(self, inputs: StepInputs, staging: Staging) -> Forwarded:
        """Copy a padded step's inputs and replay its model graph; results stand in fixed memory."""
        graph = self._graph_of(inputs)
        staging.copy_into(graph.inputs, graph.packing, inputs.arrays)
        graph.forward.replay()
        return graph.forwarded

    def sample(self, inputs: StepInputs) -> Results:
        """Sample what `forward` left: with the graph if that does all the step needs."""
        graph, needs = self._graph_of(inputs), inputs.needs
        if needs.has_filters or needs.num_top:
            return self.program.sample(graph.forwarded, graph.tensors, needs)
        graph.sampling.replay()
        return graph.results

    def _graph_of(self, inputs: StepInputs) -> StepGraph:
        assert inputs.shape is not None, "the step is padded to no graph"
        return self._graph(inputs.shape)

    def _graph(self, shape: GraphShape) -> StepGraph:
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape)
        return self._graphs[shape]

    @torch.inference_mode()
    def _capture(self, shape: GraphShape) -> StepGraph:
        """Run placeholder rows once, so that everything is compiled and loaded; then record them.

        The run writes to the reserved block and slot, and to the last tokens, which are put back:
        a step in flight may have left them for the next one.
        """
        program = self.program
        inputs = shape.placeholders()
        packing = Packing.of(inputs.arrays)
        device = program.model.device
        buffer = torch.empty(packing.num_bytes, dtype=torch.uint8, device=device)
        Staging(device).copy_into(buffer, packing, inputs.arrays)
        tensors = packing.views(buffer)

        def forward() -> Forwarded:
            return program.forward(inputs.host, tensors, max_k=shape.max_k)

        kept = program.last_tokens.clone()
        program.sample(forward(), tensors, CAPTURED_NEEDS)
        model_graph, forwarded = _record(forward, self._pool)
        self._pool = model_graph.pool()
        sampling_graph, results = _record(
            lambda: program.sample(forwarded, tensors, CAPTURED_NEEDS), self._pool
        )
        program.last_tokens.copy_(kept)
        return StepGraph(packing, buffer, tensors, model_graph, forwarded, sampling_graph, results)


def _extent(shape: GraphShape) -> tuple[int, int, int]:
    return shape.max_k, shape.rows, shape.seqs


def _record(work: Callable[[], T], pool: Any) -> tuple["torch.cuda.CUDAGraph", T]:  # noqa: ANN401
    """Capture the work launched by a call, and return what it returned; nothing runs."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may talk to the device meanwhile; only this one's calls are recorded.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = work()
    return graph, out
