"""Row numbers and rotations of one step: all that follows from positions and block tables alone.

Layers read them; none depends on a layer's weights or data. A kernel makes them all at once, since
apart they are a hundred launches of a microsecond's work.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.elementwise import rounded_once
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.sparse_attention import NO_COLUMN, NONE

RATIOS = (1, 2)  # of compressed entries
PLAIN, YARN, YARN_PAIR = range(3)  # rotations of a row: its own position twice, its pair's first


class StepTables(NamedTuple):
    """A step's T rows and n sequences, as in `model.batch.Batch`, which says what they are."""

    positions: Tensor
    seq_of_row: Tensor
    starts: Tensor
    cu_q: Tensor
    k_len: Tensor
    slots: Tensor
    given_len: Tensor
    window_from: Tensor
    block_tables: Tensor


class StepShape(NamedTuple):
    """What the numbers depend on beside the rows.

    `rings`: positions that each of a slot's rings keeps, the window's first. `in_ring`: a row's
    window is read from the ring itself; else old rows stand before the step's own, n * ring of
    them. `block_tokens`: tokens of a KV block. Listed blocks are of `list_size` entries of
    `list_ratio` tokens, `most_listed` of them.
    """

    window: int
    rings: tuple[int, ...]
    in_ring: bool
    block_tokens: int
    list_size: int
    list_ratio: int
    most_listed: int


class StepRows(NamedTuple):
    """window_rows int32 [T, W]: rows of a row's window keys, -1 and -2 as in `sparse_attention`.

    targets int64 [rings, T]: where in each ring a row goes; those that will not be seen again go to
    the reserved slot 0. seq and place int32 [T], and visible int32 [2, T] for each ratio, as in
    `PagedRows`. entries int64 [2, T]: pool row of the entry that a row completes; others complete
    none, and put one into the reserved row 0. listed int32 [T]: valid columns of listed blocks.
    cos and sin float32 [3, T, r/2].
    """

    window_rows: Tensor
    targets: Tensor
    seq: Tensor
    place: Tensor
    visible: Tensor
    entries: Tensor
    listed: Tensor
    cos: Tensor
    sin: Tensor

    def rotation(self, which: int) -> Rotation:
        return Rotation(self.cos[which], self.sin[which])


def step_rows_ref(step: StepTables, shape: StepShape, frequencies: Tensor) -> StepRows:
    at, seq = step.positions, step.seq_of_row
    seen = [((at + 1) // ratio).to(torch.int32) for ratio in RATIOS]
    firsts = [at, at, (at - 1).clamp(min=0)]
    angles = torch.stack([
        first.to(torch.float32).unsqueeze(1) * frequencies[min(which, YARN)]
        for which, first in enumerate(firsts)
    ])  # fmt: skip
    return StepRows(
        _window_rows(step, shape),
        torch.stack([_target(step, ring) for ring in shape.rings]),
        seq.to(torch.int32),
        (at - step.starts[seq]).to(torch.int32),
        torch.stack(seen),
        torch.stack([_entry(step, ratio, shape.block_tokens // ratio) for ratio in RATIOS]),
        listed_columns(seen[RATIOS.index(shape.list_ratio)], shape.list_size, shape.most_listed),
        rounded_once(torch.cos, angles),
        rounded_once(torch.sin, angles),
    )


def _window_rows(step: StepTables, shape: StepShape) -> Tensor:
    at, seq, ring = step.positions, step.seq_of_row, shape.rings[0]
    first = torch.maximum(at - (shape.window - 1), step.window_from[seq]).clamp(min=0)
    column = torch.arange(shape.window, device=at.device)
    targets = first.unsqueeze(1) + column
    if shape.in_ring:
        rows = step.slots[seq].unsqueeze(1) * ring + targets % ring
    else:
        offset = targets - step.starts[seq].unsqueeze(1)
        old_rows = seq.unsqueeze(1) * ring + targets % ring
        own_rows = len(step.slots) * ring + step.cu_q[seq].unsqueeze(1) + offset
        rows = torch.where(offset >= 0, own_rows, old_rows)
    rows = rows.masked_fill(targets > at.unsqueeze(1), NONE)
    # The released model lists min(prompt, window) keys for the rows of a prompt, `window` for those
    # after it; selected entries follow, so the list decides which blocks of the softmax they fall
    # into. It counts the prompt as the request came: then a row is the same whatever chunk it is
    # in, and when a preempted sequence is computed again.
    given = step.given_len[seq]
    is_short = (at < given) & (given < shape.window)
    columns = torch.where(is_short, given, shape.window)
    return rows.masked_fill(column >= columns.unsqueeze(1), NO_COLUMN).to(torch.int32)


def _target(step: StepTables, ring: int) -> Tensor:
    seq, at = step.seq_of_row, step.positions
    stays = at >= step.k_len[seq] - ring
    return step.slots[seq] * stays * ring + at % max(ring, 1)


def _entry(step: StepTables, ratio: int, per_block: int) -> Tensor:
    at, seq = step.positions, step.seq_of_row
    entry = (at - (ratio - 1)).clamp(min=0) // ratio
    row = step.block_tables[seq, entry // per_block].to(torch.int64) * per_block + entry % per_block
    return row * (at % ratio == ratio - 1)


def listed_columns(visible: Tensor, size: int, most: int) -> Tensor:
    """Valid columns of each row's listed blocks, int32 like visible [T]; at most `most` blocks.

    They come first: a row's newest block is always listed, and only that one may be cut.
    """
    listed = ((visible + size - 1) // size).clamp(max=most)
    newest = torch.where(visible > 0, (visible - 1) % size + 1, 0)
    return ((listed - 1).clamp(min=0) * size + newest).to(torch.int32)


def step_rows(step: StepTables, shape: StepShape, frequencies: Tensor) -> StepRows:
    """Make a step's row numbers and rotations; frequencies float32 [2, r/2], plain and YaRN."""
    run = select(step.positions, ref=step_rows_ref, kernel="step_rows.step_rows",
                 dtypes=(torch.int64,))  # fmt: skip
    return run(step, shape, frequencies)
