"""Runs a kernel's generated CUDA source on the CPU, for machines without a GPU.

TileLang lowers a kernel for sm_90a as always; g++ compiles that source behind `emulator.h`, which
has fibers for threads. Arithmetic is IEEE's without contraction, so what a kernel rounds by itself
is exact here too; exponentials and logarithms are the C library's, not the GPU's. Tensor cores,
asynchronous copies and inline PTX are not emulated: a kernel that uses them does not compile.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tilelang
from tilelang import tvm  # also puts TileLang's own tvm on the import path
from torch import Tensor
from tvm import tirx

HEADER = Path(__file__).with_name("emulator.h")
# As on a GPU, integers wrap and memory has no types; no multiply-add is fused unless written so.
# Fibers jump between stacks, which a fortified longjmp takes for an error.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off",
         "-U_FORTIFY_SOURCE")  # fmt: skip
KERNEL = re.compile(r"__launch_bounds__\((\d+), \d+\) (\w+)\((.*?)\) \{")
SHARED = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")


def what_is_missing() -> str | None:
    """Return why nothing can be emulated here, or None."""
    missing = [tool for tool in ("g++", "nvcc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} on PATH"
    has_headers = (cuda_include() / "cuda_fp8.h").is_file()
    return None if has_headers else "needs the CUDA headers beside nvcc"


@cache
def cuda_include() -> Path:
    """Return nvcc's own folder of headers; its place on PATH may be a link or a script."""
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", "-"]
    plan = subprocess.run(command, input="", capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", plan.stderr, re.MULTILINE)
    assert top is not None, f"nvcc does not say where it lives:\n{plan.stderr}"
    return Path(top[1].strip()) / "include"


def lowered(program: Any) -> str:
    """Return the program's CUDA source for sm_90a; nvcc, the slow part, is not called."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        artifact = tilelang.lower(program, target=target, enable_device_compile=False)
    return str(artifact.kernel_source)


def valued(extent: Any, sizes: dict[Any, int]) -> int:
    """Return an extent's value, given those of dynamic sizes."""
    found = tirx.stmt_functor.substitute(extent, sizes)
    return int(tvm.arith.Analyzer().simplify(found))


def grid_of(program: Any, sizes: dict[Any, int]) -> tuple[int, int]:
    """Return a launch's numbers of blocks along x and y; sizes: values of dynamic sizes."""
    extents = {"blockIdx.x": 1, "blockIdx.y": 1}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and node.thread_binding is not None:
            tag = node.thread_binding.thread_tag
            if tag in extents:
                extents[tag] = valued(node.extent, sizes)

    tirx.stmt_functor.post_order_visit(program.body, visit)
    return extents["blockIdx.x"], extents["blockIdx.y"]


def bound(buffers: list[Any], tensors: tuple[Any, ...]) -> dict[Any, int]:
    """Check arguments against a program's parameters as a launch does; return its dynamic sizes.

    A number's parameter is a variable, not a buffer.
    """
    sizes: dict[Any, int] = {}
    for buffer, tensor in zip(buffers, tensors, strict=True):
        if isinstance(buffer, tirx.Var):
            sizes[buffer] = tensor
            continue
        what = f"{buffer.name} {buffer.shape} {buffer.dtype}: {tensor.shape} {tensor.dtype}"
        assert tensor.is_contiguous(), what
        assert str(tensor.dtype) == f"torch.{buffer.dtype}", what
        assert len(tensor.shape) == len(buffer.shape), what
        for size, wanted in zip(tensor.shape, buffer.shape, strict=True):
            is_dynamic = isinstance(wanted, tirx.Var)
            assert size == (sizes.setdefault(wanted, size) if is_dynamic
                            else valued(wanted, sizes)), what  # fmt: skip
    return sizes


class Emulator:
    """Compiled emulations in a folder; `compiled` stands in for `kernels.jit.compiled`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.include = folder, cuda_include()
        self.launchers: dict[Any, Callable[..., None]] = {}
        shutil.copy(HEADER, folder)
        # Precompiled, since the CUDA headers are most of the work of each kernel.
        self._compile("-x", "c++-header", HEADER.name, "-o", f"{HEADER.name}.gch")

    def compiled(self, builder: Callable[..., Any], *args: Any) -> Callable[..., None]:
        """Return a function of CPU tensors that does what the GPU's `compiled` would."""
        key = (builder, args)
        if key not in self.launchers:
            self.launchers[key] = self._launcher(builder(*args), f"kernel{len(self.launchers)}")
        return self.launchers[key]

    def _compile(self, *args: str) -> None:
        command = ["g++", *FLAGS, f"-I{self.include}", *args]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def _launcher(self, program: Any, stem: str) -> Callable[..., None]:
        source = lowered(program)
        kernel = KERNEL.search(source)
        assert kernel is not None, source
        threads, name, parameters = int(kernel[1]), kernel[2], kernel[3].split(", ")
        names = [re.split(r"[ *]", parameter)[-1] for parameter in parameters]
        source = re.sub(r"^#include.*$", "", source, flags=re.MULTILINE)
        source = SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(emulation::shared);", source)
        source = (
            f'#include "{HEADER.name}"\n{source}\n'
            f'extern "C" bool launch(uint grid_x, uint grid_y, {kernel[3]}) {{\n'
            f"  return emulation::run_grid(grid_x, grid_y, {threads},\n"
            f"                             [=] {{ {name}({', '.join(names)}); }});\n}}\n"
        )
        (self.folder / f"{stem}.cpp").write_text(source, encoding="utf-8")
        self._compile("-shared", f"{stem}.cpp", "-o", f"{stem}.so")
        run = ctypes.CDLL(str(self.folder / f"{stem}.so")).launch
        run.restype = ctypes.c_bool
        buffers = [program.buffer_map.get(p, p) for p in program.params]

        def launch(*tensors: Any) -> None:
            sizes = bound(buffers, tensors)
            values: dict[str, Any] = {variable.name: n for variable, n in sizes.items()}
            for buffer, tensor in zip(buffers, tensors, strict=True):
                if isinstance(tensor, Tensor):
                    values[buffer.name] = ctypes.c_void_p(tensor.data_ptr())
            # Names that C++ knows already (cos) carry a number in the source.
            arguments = [values[n if n in values else re.sub(r"_\d+$", "", n)] for n in names]
            assert run(*grid_of(program, sizes), *arguments), f"threads of {name} are in deadlock"

        return launch
