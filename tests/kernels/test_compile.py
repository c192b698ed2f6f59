"""Every kernel compiles for every architecture it is meant for; no GPU is needed for that."""

import pkgutil
from importlib import import_module

import pytest
import tilelang

import mdi_exec.ops.kernels
from mdi_exec.ops.kernels.jit import ARCHITECTURES, Sample, target_of

FAMILIES = [
    module.name
    for module in pkgutil.iter_modules(mdi_exec.ops.kernels.__path__)
    if module.name != "jit"
]


def samples():
    for family in FAMILIES:
        for sample in import_module(f"mdi_exec.ops.kernels.{family}").SAMPLES:
            sizes = ",".join(map(str, sample.args))
            yield pytest.param(sample, id=f"{family}.{sample.builder.__name__}({sizes})")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sample", list(samples()))
def test_kernel_compiles(sample: Sample, architecture):
    kernel = tilelang.compile(sample.builder(*sample.args), target=target_of(architecture))
    assert "__global__" in kernel.get_kernel_source()
