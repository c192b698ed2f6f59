"""The gathering warpgroup of sparse attention: it fills one key block while the other is read.

Eight threads share a line (a key), and each helps to fill four lines of a block. Window keys are
loaded and decoded block by block; entries, which are many and scattered, are loaded a block ahead.
Read next: `attention_source.py` (decoding).
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from mdi_exec.ops.kernels.attention_block import KEY_BLOCK, KEY_SHIFT, LOADERS

LINES = KEY_BLOCK // 16  # lines of a key block that a gathering thread helps to fill
WINDOW_STEP = 128  # values of a line that its eight threads load at once
ENTRY_STEP = 256
SAMPLES = ()  # no kernel of its own


@dataclass(frozen=True, slots=True)
class Pool:
    """Packed keys (codes, scales) and, for each query, the numbers of its rows; -1 = none."""

    codes: Any
    scales: Any
    rows: Any


@T.macro
def gather(t, tx, shape, window, entries, shared, barriers):
    """Fill key blocks in turn: first the query's window, then its entries."""
    entry_steps = -(-shape.width // ENTRY_STEP)
    found = T.alloc_local((LINES,), "int32")
    is_there = T.alloc_local((LINES,), "int32")
    is_next = T.alloc_local((LINES,), "int32")
    raw = T.alloc_local((LINES * entry_steps * 16,), "uint8")
    factor = T.alloc_local((LINES * entry_steps * 2,), "uint8")
    worker, line = (tx - LOADERS) % 8, (tx - LOADERS) // 8
    # A line's next entry is under way while the other lines are decoded.
    _find_rows(entries.rows, t, 0, shape.top_k, line, found)
    for i in T.unroll(LINES):
        _fetch_entry(entries, found, i, worker, shape.width, raw, factor)
        is_next[i] = T.if_then_else(found[i] >= 0, 1, 0)
    for pair in T.serial(shape.window_pairs):
        for b in T.unroll(2):
            _find_rows(window.rows, t, pair * 2 + b, shape.window_width, line, found)
            T.barrier_wait(barriers.free[b], (pair + 1) % 2)
            if b == 0:
                _gather_window(window, found, worker, line, shape, shared.left_0, shared.right_0)
            else:
                _gather_window(window, found, worker, line, shape, shared.left_1, shared.right_1)
            for i in T.unroll(LINES):
                is_there[i] = T.if_then_else(found[i] >= 0, 1, 0)
            _publish(is_there, shared.is_valid, b, worker, line, barriers.ready)
    _find_rows(entries.rows, t, 1, shape.top_k, line, found)
    for pair in T.serial(shape.entry_pairs):
        for b in T.unroll(2):
            for i in T.unroll(LINES):
                is_there[i] = is_next[i]
                is_next[i] = T.if_then_else(found[i] >= 0, 1, 0)
            T.barrier_wait(barriers.free[b], (shape.window_pairs + pair + 1) % 2)
            for i in T.unroll(LINES):
                if b == 0:
                    _decode_entry(
                        raw, factor, i, worker, line, shape, shared.left_0, shared.right_0
                    )
                else:
                    _decode_entry(
                        raw, factor, i, worker, line, shape, shared.left_1, shared.right_1
                    )
                _fetch_entry(entries, found, i, worker, shape.width, raw, factor)
            _find_rows(entries.rows, t, pair * 2 + b + 2, shape.top_k, line, found)
            _publish(is_there, shared.is_valid, b, worker, line, barriers.ready)


@T.macro
def _find_rows(row_numbers, t, block, limit, line, found):
    """Load the pool rows of this thread's four lines in a key block; -1 = none."""
    for i in T.unroll(LINES):
        found[i] = -1
        if block * KEY_BLOCK + line + i * 16 < limit:
            found[i] = row_numbers[t, block * KEY_BLOCK + line + i * 16]


@T.macro
def _publish(is_there, is_valid, b, worker, line, ready):
    """Tell which lines hold a key, and hand the key block over."""
    if worker == 0:
        for i in T.unroll(LINES):
            is_valid[b, line + i * 16] = is_there[i]
    T.fence_proxy_async()
    T.barrier_arrive(ready[b])


@T.macro
def _gather_window(window, found, worker, line, shape, left, right):
    """Decode a block of window rows; the scale of a missing row is zero."""
    steps = -(-shape.width // WINDOW_STEP)
    raw = T.alloc_local((steps * 16,), "uint8")
    factor = T.alloc_local((steps,), "uint8")
    keys = T.alloc_local((16,), "bfloat16")
    for i in T.unroll(LINES):
        for step in T.unroll(steps):
            at = step * WINDOW_STEP + worker * 16
            if at < shape.width:
                for v in T.vectorized(16):
                    raw[step * 16 + v] = window.codes[T.max(found[i], 0), at + v]
                factor[step] = T.if_then_else(
                    found[i] >= 0, window.scales[T.max(found[i], 0), at // 32], T.cast(0, "uint8")
                )
        for step in T.unroll(steps):
            if step * WINDOW_STEP + worker * 16 < shape.width:
                T.call_extern(
                    "handle", f"mdi::window_keys<{KEY_SHIFT}>", T.address_of(raw[step * 16]),
                    T.address_of(factor[step]), T.address_of(keys[0]),
                )  # fmt: skip
                _store(keys, 2, line + i * 16, step * WINDOW_STEP + worker * 16, shape.half,
                       left, right)  # fmt: skip


@T.macro
def _fetch_entry(entries, found, i, worker, width, raw, factor):
    """Start loading one line's entry; the scale of a missing one is zero."""
    steps = -(-width // ENTRY_STEP)
    for step in T.unroll(steps):
        at = step * ENTRY_STEP + worker * 32
        if at < width:
            for v in T.vectorized(16):
                raw[(i * steps + step) * 16 + v] = entries.codes[T.max(found[i], 0), at // 2 + v]
            for v in T.vectorized(2):
                factor[(i * steps + step) * 2 + v] = T.if_then_else(
                    found[i] >= 0, entries.scales[T.max(found[i], 0), at // 16 + v],
                    T.cast(0, "uint8"),
                )  # fmt: skip


@T.macro
def _decode_entry(raw, factor, i, worker, line, shape, left, right):
    steps = -(-shape.width // ENTRY_STEP)
    keys = T.alloc_local((32,), "bfloat16")
    for step in T.unroll(steps):
        if step * ENTRY_STEP + worker * 32 < shape.width:
            T.call_extern(
                "handle", f"mdi::entry_keys<{KEY_SHIFT}>",
                T.address_of(raw[(i * steps + step) * 16]),
                T.address_of(factor[(i * steps + step) * 2]), T.address_of(keys[0]),
            )  # fmt: skip
            _store(keys, 4, line + i * 16, step * ENTRY_STEP + worker * 32, shape.half,
                   left, right)  # fmt: skip


@T.macro
def _store(keys, count, line, column, half, left, right):
    """Put `count` chunks of decoded keys into a key block's line, from `column` on."""
    for part in T.unroll(count):
        if column + part * 8 < half:
            for v in T.vectorized(8):
                left[line, column + part * 8 + v] = keys[part * 8 + v]
        else:
            for v in T.vectorized(8):
                right[line, column + part * 8 - half + v] = keys[part * 8 + v]
