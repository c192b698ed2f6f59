"""Catches the calls of ops that a forward pass makes, to run them again one at a time.

An op is a public function of `mdi_exec.ops` with a reference, `<op>` beside `<op>_ref`, or a row
pool's gather and encode. Calls are caught where the model makes them, so their arguments are the
model's own shapes, layouts and values. Of calls that agree in all shapes the first one is kept.
"""

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mdi_exec.ops
from mdi_exec.ops.row_pool import RowPool

Function = Callable[..., Any]


@dataclass(slots=True)
class OpCall:
    """A call to make again. `count` calls of its shapes were made; `on_kernel`: not by references.

    `arguments` are by parameter name.
    """

    name: str
    function: Function
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    count: int
    on_kernel: bool

    def __call__(self) -> Any:  # noqa: ANN401 (whatever the op returns)
        return self.function(*self.args, **self.options)

    @property
    def arguments(self) -> dict[str, Any]:
        return inspect.signature(self.function).bind(*self.args, **self.options).arguments


def op_modules() -> list[ModuleType]:
    """Return the modules of ops, kernels excluded."""
    found = pkgutil.iter_modules(mdi_exec.ops.__path__)
    return [import_module(f"mdi_exec.ops.{m.name}") for m in found if not m.ispkg]


def public_ops() -> dict[str, Function]:
    """Return name -> public function of every op that has a reference."""
    return {
        name: value
        for module in op_modules()
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and f"{name}_ref" in vars(module)
    }


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of an argument: of tuples, dataclasses and pools, those inside."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, RowPool):
        yield from (value.codes, value.scales)
    else:
        for _, part in _parts(value):
            yield from tensors_in(part)


def _parts(value: object) -> list[tuple[str, object]]:
    """Return what a dataclass, or an object of the model's packages, is made of."""
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if type(value).__module__.startswith("mdi_exec"):
        return sorted(getattr(value, "__dict__", {}).items())
    return []


def bytes_of(value: object) -> int:
    """Return the bytes of all tensors in a value."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


class CallCatcher:
    """Keeps the calls made while `catching`."""

    def __init__(self) -> None:
        self.calls: dict[object, OpCall] = {}
        self._depth = 0
        self._used_kernel = False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Put a catcher around every op, wherever it was imported to."""
        with ExitStack() as stack:
            for module in op_modules():
                if "select" in vars(module):
                    stack.enter_context(
                        mock.patch.object(module, "select", self._watched(vars(module)["select"]))
                    )
            for name, function in public_ops().items():
                caught = self._caught(name, function)
                for place in [m for n, m in sys.modules.items() if n.startswith("mdi_exec")]:
                    for attribute, value in list(vars(place).items()):
                        if value is function:
                            stack.enter_context(mock.patch.object(place, attribute, caught))
            for name in ("gather", "encode"):
                method = getattr(RowPool, name)
                caught = self._caught(f"row_pool.{name}", method)
                stack.enter_context(mock.patch.object(RowPool, name, caught))
            yield

    def _watched(self, select: Function) -> Function:
        def choose(x: Tensor, *, ref: Function, **options: object) -> Function:
            chosen: Function = select(x, ref=ref, **options)
            self._used_kernel |= chosen is not ref
            return chosen

        return choose

    def _caught(self, name: str, function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: object, **options: object) -> object:
            if self._depth:
                return function(*args, **options)
            self._depth, self._used_kernel = 1, False
            try:
                return function(*args, **options)
            finally:
                self._depth = 0
                key = (name, _form(args), _form(tuple(sorted(options.items()))))
                call = self.calls.setdefault(key, OpCall(name, function, args, options, 0, False))
                call.count += 1
                call.on_kernel = self._used_kernel

        return run


def _form(value: object) -> object:
    """Return what two calls must agree in to count as the same."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(_form(part) for part in value)
    parts = tuple(_form(t) for t in tensors_in(value))
    return parts or repr(value)


@contextmanager
def references_only() -> Iterator[None]:
    """Make every op run its reference, on whatever device."""

    def choose(x: Tensor, *, ref: Function, **options: object) -> Function:
        return ref

    with ExitStack() as stack:
        for module in op_modules():
            if "select" in vars(module):
                stack.enter_context(mock.patch.object(module, "select", choose))
        yield


def numbers_in(value: object) -> Tensor | None:
    """Return an op's result as float32 numbers, codes times scales; None when it has none."""
    codes = getattr(value, "codes", None)
    if isinstance(codes, Tensor):
        if codes.dtype == torch.uint8 and value.scales.dtype == torch.uint8:  # type: ignore[attr-defined]
            return codes.to(torch.float32).flatten()
        from mdi_exec.ops.quantise import dequantise

        return dequantise(value).flatten()  # type: ignore[arg-type]
    found = [t.to(torch.float32).flatten() for t in tensors_in(value)]
    return torch.cat(found) if found else None
