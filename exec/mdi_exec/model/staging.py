"""Host arrays to the device in one asynchronous copy.

A step's inputs are many small arrays. Copied one by one, and from ordinary memory, each of them
would make the host wait for the device. Here they are packed into one pinned buffer, copied once,
and handed out as views of the copy. On a CPU the same packing runs without pinning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

ALIGNMENT = 16  # bytes: kernels load vectors
NUM_BUFFERS = 4  # more than the steps in flight, so that waiting for a buffer never happens
LEAST_BYTES = 1 << 16

_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


class _Place(NamedTuple):
    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where arrays stand in one buffer; equal names, types and shapes give an equal packing."""

    places: tuple[_Place, ...]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> "Packing":
        """Lay out arrays of int64, int32, float64 and bool, one behind the other."""
        places, offset = [], 0
        for name, array in arrays.items():
            dtype = _TORCH_DTYPES[array.dtype]
            places.append(_Place(name, offset, dtype, array.shape, array.nbytes))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), offset)

    def fill(self, buffer: Tensor, arrays: Mapping[str, Array]) -> None:
        """Write the arrays into a uint8 host buffer of at least `num_bytes`."""
        out = buffer.numpy()
        for place in self.places:
            values = np.ascontiguousarray(arrays[place.name]).reshape(-1).view(np.uint8)
            out[place.offset : place.offset + place.num_bytes] = values

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return each array as a view of a uint8 buffer, on whatever device that lies."""
        return {
            place.name: buffer[place.offset : place.offset + place.num_bytes]
            .view(place.dtype)
            .view(place.shape)
            for place in self.places
        }


class Staging:
    """Copies host arrays to `device`; owns the pinned buffers, which it uses in turn.

    Not thread-safe. A buffer is written again only after the copy that read it has run.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Return the arrays as device tensors, by name; the host does not wait for the copy."""
        packing = Packing.of(arrays)
        on_device = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self.device)
        self.copy_into(on_device, packing, arrays)
        return packing.views(on_device)

    def copy_into(self, on_device: Tensor, packing: Packing, arrays: Mapping[str, Array]) -> None:
        """Pack arrays and copy them to the front of `on_device`, uint8 of at least their size."""
        if self.device.type == "cpu":
            packing.fill(on_device, arrays)
            return
        at, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        copied = self._copied[at]
        if copied is not None:
            copied.synchronize()
        buffer = self._buffers[at]
        if buffer is None or buffer.numel() < packing.num_bytes:
            size = max(LEAST_BYTES, 1 << (packing.num_bytes - 1).bit_length())
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._buffers[at] = buffer
        packing.fill(buffer, arrays)
        used = slice(0, packing.num_bytes)
        on_device[used].copy_(buffer[used], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._copied[at] = copied
