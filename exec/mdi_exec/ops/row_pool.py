"""Cached vectors as rows of codes and scales: encode, write, gather, decode.

`store_rows` is encode and write in one pass, `RowPool.gather` gather and decode.

A pool does not know whose row is whose; `cache.py` lays rows out in blocks and slots, and
`step_context.py` computes row numbers. Row -1 means "none": it gathers as zeros and stores nothing.
Row 0 belongs to a reserved block or slot, whose contents nobody reads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdi_exec.numerics import Numerics
from mdi_exec.ops.backend import select
from mdi_exec.ops.quantise import (
    ENTRY_GROUP,
    GROUP,
    Quantised,
    dequantise,
    quantise_fp4,
    quantise_fp4_e4m3,
    quantise_fp8,
)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a vector of `width` values is stored; `quantise` is None for plain float32."""

    width: int
    code_bytes: int
    scale_bytes: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype
    quantise: Callable[[Tensor], Quantised] | None

    @property
    def bytes_per_row(self) -> int:
        return self.code_bytes + self.scale_bytes


def _float32(width: int) -> RowFormat:
    return RowFormat(width, 4 * width, 0, torch.float32, torch.float32, None)


def window_format(width: int, numerics: Numerics) -> RowFormat:
    """Window KV: E4M3 with E8M0 scales (528 bytes at width 512)."""
    if numerics is Numerics.FLOAT32:
        return _float32(width)
    return RowFormat(width, width, width // GROUP, torch.float8_e4m3fn, torch.float8_e8m0fnu,
                     quantise_fp8)  # fmt: skip


def entry_format(width: int, numerics: Numerics) -> RowFormat:
    """Compressed KV entries: packed E2M1 with E4M3 scales (288 bytes at width 512)."""
    if numerics is Numerics.FLOAT32:
        return _float32(width)
    return RowFormat(width, width // 2, width // ENTRY_GROUP, torch.uint8, torch.float8_e4m3fn,
                     quantise_fp4_e4m3)  # fmt: skip


def key_format(width: int, numerics: Numerics) -> RowFormat:
    """Index keys: packed E2M1 with E8M0 scales (68 bytes at width 128)."""
    if numerics is Numerics.FLOAT32:
        return _float32(width)
    return RowFormat(width, width // 2, width // GROUP, torch.uint8, torch.float8_e8m0fnu,
                     quantise_fp4)  # fmt: skip


class RowPool:
    """`num_rows` stored vectors: two byte tensors, one row each per vector."""

    def __init__(self, row_format: RowFormat, num_rows: int, device: torch.device) -> None:
        self.format = row_format
        self.codes = torch.zeros(num_rows, row_format.code_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(
            num_rows, row_format.scale_bytes, dtype=torch.uint8, device=device
        )

    @classmethod
    def of(cls, rows: Quantised, row_format: RowFormat) -> "RowPool":
        """Return a pool that *is* the given encoded rows [N, ...], of any byte-wide dtypes."""
        pool = cls.__new__(cls)
        pool.format = row_format
        pool.codes = rows.codes.view(torch.uint8)
        pool.scales = rows.scales.view(torch.uint8)
        return pool

    def part(self, rows: slice) -> "RowPool":
        """Return the pool that *is* some of the rows, on end."""
        return RowPool.of(Quantised(self.codes[rows], self.scales[rows]), self.format)

    def encode(self, values: Tensor) -> Quantised:
        """Round values [N, width] to storage: byte tensors [N, code bytes] and [N, scale bytes]."""
        if self.format.quantise is None:
            no_scales = values.new_empty((*values.shape[:-1], 0), dtype=torch.uint8)
            return Quantised(values.contiguous().view(torch.uint8), no_scales)
        rows = self.format.quantise(values)
        return Quantised(rows.codes.view(torch.uint8), rows.scales.view(torch.uint8))

    def decode(self, rows: Quantised) -> Tensor:
        """Invert `encode` up to its rounding: [..., width], bfloat16 (float32 when unrounded)."""
        if self.format.quantise is None:
            return rows.codes.view(torch.float32)
        typed = Quantised(
            rows.codes.view(self.format.code_dtype), rows.scales.view(self.format.scale_dtype)
        )
        return dequantise(typed, torch.bfloat16)

    def write(self, index: Tensor, rows: Quantised) -> None:
        """Store encoded rows at row numbers `index` [N]; where two agree, either may win."""
        self.codes[index] = rows.codes
        self.scales[index] = rows.scales

    def gather(self, index: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the values of rows `index` [...]: [..., width]; zeros where the index is -1.

        They are written to `out`, contiguous and of that shape, when it is given.
        """
        if self.format.quantise is None:
            return gather_rows_ref(self, index, out)
        run = select(self.codes, ref=gather_rows_ref, kernel="row_pool.gather_rows",
                     dtypes=(torch.uint8,))  # fmt: skip
        return run(self, index, out)


def gather_rows_ref(pool: RowPool, index: Tensor, out: Tensor | None = None) -> Tensor:
    safe = index.clamp(min=0)
    values = pool.decode(Quantised(pool.codes[safe], pool.scales[safe]))
    values = values.masked_fill((index < 0).unsqueeze(-1), 0.0)
    return values if out is None else out.copy_(values)


def store_rows_ref(pool: RowPool, index: Tensor, values: Tensor) -> None:
    # Dropping rows would need their number on the host: they overwrite the reserved row 0 instead.
    pool.write(index.clamp(min=0), pool.encode(values))


def store_rows(pool: RowPool, index: Tensor, values: Tensor) -> None:
    """Round values [N, width] to the pool's format and store them at row numbers `index` [N].

    Rows numbered -1 are not stored (the reference leaves them in the reserved row 0); where two
    numbers agree, either row may win.
    """
    select(values, ref=store_rows_ref, kernel="row_pool.store_rows")(pool, index, values)
