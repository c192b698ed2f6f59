"""A profiler's events become kernels with the layer and part that launched them."""

import pytest

from mdi_exec.engine.device_timing import Ceilings
from mdi_exec.engine.profiling import REST, StepProfile, attributed, trace_events
from mdi_exec.model.floors import STREAMS, StepShape, Work, layer_parts, layer_work
from mdi_exec.model.ranges import in_range, watching
from mdi_exec.weights.source import random_config


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


# On the host two layers, launching; on the device the same kernels, later.
EVENTS = [
    event("user_annotation", "layer 0", 10, 40),
    event("user_annotation", "queries", 12, 20),
    event("user_annotation", "index", 15, 5),
    event("user_annotation", "layer 1", 50, 10),
    event("gpu_user_annotation", "layer 0", 100, 50, tid=7),
    event("cpu_op", "aten::mm", 13, 1),
    event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
    event("cuda_driver", "cuLaunchKernelEx", 13, 1, correlation=2),
    event("cuda_runtime", "cudaLaunchKernel", 16, 1, correlation=3),
    event("cuda_runtime", "cudaMemsetAsync", 40, 1, correlation=4),
    event("cuda_driver", "cuLaunchKernel", 50, 1, correlation=5),
    event("kernel", "write", 160, 9, tid=7, correlation=5, stream=7),
    event("kernel", "index_rows", 100, 10, tid=7, correlation=1, stream=7),
    event("kernel", "gemm", 110, 20, tid=7, correlation=2, stream=7),
    event("kernel", "scores", 131, 9, tid=7, correlation=3, stream=7),
    event("gpu_memset", "Memset", 141, 2, tid=7, correlation=4, stream=7),
]


def test_a_kernel_belongs_to_the_ranges_its_launch_was_in():
    found = [(kernel.name, kernel.layer, kernel.part) for kernel in attributed(EVENTS)]
    assert found == [
        ("index_rows", None, REST), ("gemm", "layer 0", "queries"), ("scores", "layer 0", "index"),
        ("Memset", "layer 0", STREAMS), ("write", "layer 1", STREAMS),
    ]  # fmt: skip


def test_without_a_gpu_outermost_operators_stand_for_kernels():
    events = [
        event("user_annotation", "head", 0, 30),
        event("cpu_op", "aten::matmul", 1, 10),
        event("cpu_op", "aten::mm", 2, 8),
        event("cpu_op", "aten::add", 11, 3),
        event("cpu_op", "aten::add", 2, 3, tid=2),
    ]
    found = [(kernel.name, kernel.us, kernel.part) for kernel in attributed(events)]
    assert found == [("aten::matmul", 10, "head"), ("aten::add", 3, REST), ("aten::add", 3, "head")]


def test_parts_add_up_and_know_their_floors():
    profile = StepProfile(StepShape(1, 4, 64), 0.2, attributed(EVENTS), {"queries": Work(2e9, 1.0)})
    rows = profile.rows(Ceilings(1e14, 1e12))
    assert [row.part for row in rows] == ["queries", STREAMS, REST, "index"]
    assert sum(row.ms for row in rows) == pytest.approx(profile.busy_ms) == pytest.approx(0.05)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.floor_ms for row in rows] == [pytest.approx(0.02), None, None, None]
    assert sum(row.launches for row in rows) == len(profile.kernels)


def test_slices_of_a_trace_lie_within_one_another():
    profile = StepProfile(StepShape(1, 4, 64), 0.2, attributed(EVENTS), {})
    slices = [e for e in trace_events([profile]) if e["ph"] == "X"]
    open_ends = []
    for each in slices:  # in the order of a depth-first walk
        while open_ends and open_ends[-1] <= each["ts"]:
            open_ends.pop()
        end = each["ts"] + each["dur"]
        assert all(end <= outer for outer in open_ends)
        open_ends.append(end)
    names = [each["name"] for each in slices]
    assert names[0] == "prefill of 4 tokens at context 64"
    assert names[1:3] == [REST, "index_rows"]
    assert names[3:6] == ["layer 0", "queries", "gemm"]


def test_the_parts_of_a_layer_add_up_to_it():
    config, step = random_config("tiny"), StepShape(2, 3, 50)
    for layer in range(config.num_hidden_layers):
        plan = config.layer_plan(layer)
        parts = layer_parts(config, plan, step).values()
        whole = layer_work(config, plan, step)
        assert whole.flops == pytest.approx(sum(part.flops for part in parts))
        assert whole.num_bytes == pytest.approx(sum(part.num_bytes for part in parts))


def test_nobody_looks_unless_asked():
    opened = []

    class Layer:
        number = 3

        @in_range(lambda layer: f"layer {layer.number}")
        def __call__(self, value):
            return value + 1

    layer = Layer()
    assert layer(1) == 2
    from contextlib import contextmanager

    @contextmanager
    def note(name):
        opened.append(name)
        yield

    with watching(note):
        assert layer(2) == 3
    assert layer(3) == 4
    assert opened == ["layer 3"]
