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


def samples():
    for family in FAMILIES:
        for sample in import_module(f"mdi_exec.ops.kernels.{family}").SAMPLES:
            sizes = ",".join(map(str, sample.args))
            name = f"{family}.{sample.builder.__name__}({sizes})"
            for architecture in sample.architectures:
                yield pytest.param(sample, architecture, id=f"{name}-{architecture}")


@pytest.mark.parametrize(("sample", "architecture"), list(samples()))
def test_kernel_compiles(sample: Sample, architecture):
    source = compile_for(architecture, sample).get_kernel_source()
    assert source.count("cudaGridDependencySynchronize()") == source.count("cudaTrigger") >= 1
