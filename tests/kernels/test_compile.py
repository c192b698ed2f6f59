"""Every kernel compiles for every architecture it is meant for; no GPU is needed for that."""

import pkgutil
from importlib import import_module

import pytest

import mdi_exec.ops.kernels
from mdi_exec.ops.kernels.jit import Sample, compile_for

FAMILIES = [
    module.name
    for module in pkgutil.iter_modules(mdi_exec.ops.kernels.__path__)
    if module.name != "jit" and not module.name.endswith("_source")
]


# Tiles of tensor cores are laid out anew for every size and architecture.
TENSOR_CORES = ("expert_gemm", "gemm", "index_scores", "sparse_attention", "staged_attention",
                "weight_gemm")  # fmt: skip


def samples():
    """All for the first architecture; for others, plain kernels in one size only."""
    seen = set()
    for family in FAMILIES:
        for sample in import_module(f"mdi_exec.ops.kernels.{family}").SAMPLES:
            sizes = ",".join(map(str, sample.args))
            name = f"{family}.{sample.builder.__name__}({sizes})"
            first, *others = sample.architectures
            yield pytest.param(sample, first, id=f"{name}-{first}")
            if sample.builder in seen and family not in TENSOR_CORES:
                continue
            seen.add(sample.builder)
            for other in others:
                yield pytest.param(sample, other, id=f"{name}-{other}")


@pytest.mark.parametrize(("sample", "architecture"), list(samples()))
def test_kernel_compiles(sample: Sample, architecture):
    source = compile_for(architecture, sample).get_kernel_source()
    assert source.count("cudaGridDependencySynchronize()") == source.count("cudaTrigger") >= 1
