"""The one place that chooses how an op runs: its plain-torch reference, or a kernel.

Kernels take the model's own rounding: bfloat16 activations on a GPU. References run on every device
torch runs on, in every numerics mode, which makes them a new device's first backend and the oracle
of every kernel. Read next: `kernels/jit.py`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


def select(
    x: Tensor, *, ref: F, kernel: str | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
) -> F:  # fmt: skip
    """Return what runs for `x`, the op's deciding input.

    `kernel` is "module.function" in `mdi_exec.ops.kernels`, of the same signature as `ref`; it runs
    when `runs_kernels(x, dtypes)`. Kernel modules are imported when first needed: a
    machine without a GPU never loads the kernel compiler.
    """
    return ref if kernel is None or not runs_kernels(x, dtypes) else cast(F, _load(kernel))


def runs_kernels(x: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> bool:
    """Say whether ops on `x` run on kernels, where they have one.

    They do on a GPU. On the meta device they are walked through, to see which there are.
    """
    return (x.is_cuda or x.is_meta) and x.dtype in dtypes


@cache
def _load(path: str) -> Any:  # noqa: ANN401 (whatever the kernel's module defines)
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"mdi_exec.ops.kernels.{module}"), name)
