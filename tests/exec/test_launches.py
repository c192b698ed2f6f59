"""How many kernels a decode step launches, counted without a GPU.

With few rows a layer's time is that of its launches. The model is walked on the meta device: every
call of a kernel counts, and every operation of torch that fills a new tensor.
"""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from mdi_exec.engine.kernels_ahead import Reach, reachable_kernels
from mdi_exec.model.cache import CacheLayout
from mdi_exec.model.transformer import Layer
from mdi_exec.numerics import Numerics
from mdi_exec.weights.presets import layer_kinds
from mdi_exec.weights.source import random_config

pytest.importorskip("tilelang")

LAYOUT = CacheLayout(config=random_config("small"), numerics=Numerics.QUANTISED)
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
MOST = {"window": 26, "reuse r2": 25, "reuse r1": 25, "index r1": 36, "re-index r1": 36}


class Launches(TorchDispatchMode):
    """Counts torch's operations while it is entered; `count` is added to by kernels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        aliases = [argument.alias_info for argument in func._schema.arguments]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        is_converted = name == "to" and out is not args[0]
        self.count += is_converted or not (is_view or name in ALLOCATES)
        return out


@pytest.fixture
def launched(monkeypatch):
    """Launches by kind of layer, of decode steps of one row."""
    from mdi_exec.ops.kernels import jit

    kinds, found, original = layer_kinds(LAYOUT.config), {}, Layer.__call__

    def counted(layer, *args):
        with Launches() as launches:
            monkeypatch.setattr(jit, "_skip", lambda *_: setattr(
                launches, "count", launches.count + 1))  # fmt: skip
            out = original(layer, *args)
        kind = kinds[layer.plan.index].removesuffix("+engram")
        found[kind] = min(launches.count, found.get(kind, launches.count))  # once, more is made
        return out

    monkeypatch.setattr(Layer, "__call__", counted)
    reachable_kernels(Reach(LAYOUT, 1, 1, 16_384, 1e9), "sm_90a")
    return found


def test_a_layer_launches_few_kernels(launched):
    assert set(MOST) <= set(launched) | {"index r1", "re-index r1", "window"}
    for kind, most in MOST.items():
        assert launched.get(kind, 0) <= most, kind
