"""One step's rows as tensors: a ragged batch of prompt chunks and decode rows.

Built from plain ints, it knows positions and memory locations but nothing of layers. Row numbers
derived from it per layer kind live in `model/step_context.py`. Shapes depend on the numbers of
rows and sequences alone, so decode steps of one size can share a CUDA graph (`graphs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mdi_exec.model.staging import Array, Staging

BLOCK_TOKENS = 128  # tokens of context a KV block covers

Ints = npt.NDArray[np.int64]


class BatchItem(NamedTuple):
    """One sequence's rows: `q` new tokens that end at context length `k`.

    `num_logits` counts the trailing rows whose logits are wanted: 1 for a prompt's last chunk, 0
    for an earlier one, q for decode rows. `prompt_len` is the full prompt (what bounded replay
    counts from); 0 means k. `given_len` is the prompt as the request came, without the outputs that
    a sequence computed again counts as prompt; 0 means at least a window.
    """

    q: int
    k: int
    slot: int
    block_table: Sequence[int]
    num_logits: int
    prompt_len: int = 0
    given_len: int = 0


class BatchColumns(NamedTuple):
    """The fields of `BatchItem`, each for all sequences of a batch."""

    qs: Sequence[int]
    ks: Sequence[int]
    slots: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    num_logits: Sequence[int]
    prompt_lens: Sequence[int]
    given_lens: Sequence[int]

    @classmethod
    def of(cls, items: Sequence[BatchItem]) -> "BatchColumns":
        assert items, "a batch needs at least one sequence"
        return cls(*zip(*items, strict=True))

    def padded(self, items: Sequence[BatchItem]) -> "BatchColumns":
        """Return the columns with further items at their ends."""
        if not items:
            return self
        columns: Any = zip(self, BatchColumns.of(items), strict=True)
        return BatchColumns(*([*column, *more] for column, more in columns))


@dataclass(frozen=True, eq=False, slots=True)
class HostBatch:
    """A batch on the host: what `Batch` holds, as numpy arrays under the same names.

    Arrays named `cut.*` are those of the smaller batch behind bounded replay's cut, and `cut.rows`
    the numbers of its rows here; they are there when `is_cut`. `max_k` is the longest context.
    """

    arrays: dict[str, Array]
    max_k: int
    is_cut: bool

    @classmethod
    def lay_out(
        cls,
        seqs: BatchColumns,
        token_ids: Sequence[int] | Array,
        *,
        replay_keep_tokens: int = 0,
        table_width: int = 0,
    ) -> "HostBatch":
        """Lay out `seqs`, whose new tokens stand in `token_ids` one sequence after another.

        Block tables are cut to what k needs and are at least `table_width` wide.
        `replay_keep_tokens` as in `Batch.build`.
        """
        q, k, slots, logits, prompt = (
            np.array(column, dtype=np.int64)
            for column in (seqs.qs, seqs.ks, seqs.slots, seqs.num_logits, seqs.prompt_lens)
        )
        prompt = np.where(prompt == 0, k, prompt)
        assert ((q >= 1) & (q <= k)).all(), f"each sequence needs 1 <= q <= k, got {seqs}"
        assert (logits <= q).all(), f"num_logits beyond the sequence's rows: {seqs}"
        assert len(token_ids) == q.sum(), f"{len(token_ids)} token ids for {q.sum()} rows"
        num_blocks = (-(-k // BLOCK_TOKENS)).tolist()
        tables = np.zeros((len(k), max(table_width, *num_blocks)), dtype=np.int32)
        for row, (table, count) in enumerate(zip(seqs.block_tables, num_blocks, strict=True)):
            assert len(table) >= count, f"block table too short: {len(table)} for k = {k[row]}"
            tables[row, :count] = table[:count]
        keep_from = np.maximum(prompt - replay_keep_tokens, 0) if replay_keep_tokens else 0 * prompt
        arrays: dict[str, Array] = {
            "block_tables": tables, "slots": slots,
            "given_len": np.array(seqs.given_lens, dtype=np.int64),
            "token_ids": np.asarray(token_ids, dtype=np.int32),
            **_row_arrays(k - q, k, logits, np.zeros_like(k)),
        }  # fmt: skip
        is_cut = bool(keep_from.any())
        if is_cut:
            cut = _cut_arrays(k - q, k, logits, keep_from)
            arrays |= {f"cut.{name}": values for name, values in cut.items()}
        return cls(arrays, int(k.max()), is_cut)


def _row_arrays(starts: Ints, k: Ints, logits: Ints, window_from: Ints) -> dict[str, Array]:
    q = k - starts
    cu_q = np.concatenate(([0], np.cumsum(q)))
    seq = np.repeat(np.arange(len(q)), q)
    positions = np.arange(cu_q[-1]) - cu_q[seq] + starts[seq]
    wanted = positions >= (k - logits)[seq]
    return {"positions": positions, "seq_of_row": seq, "starts": starts, "cu_q": cu_q, "k_len": k,
            "logit_rows": np.flatnonzero(wanted), "window_from": window_from}  # fmt: skip


def _cut_arrays(starts: Ints, k: Ints, logits: Ints, keep_from: Ints) -> dict[str, Array]:
    """Keep the rows from `keep_from` on; a sequence with no row left stays, with q = 0."""
    cut_starts = np.minimum(np.maximum(starts, keep_from), k)
    q, kept_q = k - starts, k - cut_starts
    first = np.cumsum(q) - q
    shift = first + cut_starts - starts - (np.cumsum(kept_q) - kept_q)
    rows = np.arange(kept_q.sum()) + np.repeat(shift, kept_q)
    arrays = _row_arrays(cut_starts, k, np.minimum(logits, kept_q), keep_from)
    return {**arrays, "rows": rows}


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """T rows of n sequences, in sequence order. Index tensors are int64 unless noted.

    token_ids int32 [T], positions [T], seq_of_row [T], starts [n] (first new position), cu_q [n+1]
    (first row), k_len [n], block_tables int32 [n, max_blocks] padded with block 0, slots [n],
    given_len [n] (see `BatchItem`), logit_rows [m], window_from [n] (first position a window may
    see), is_image bool [T] or None. `one_per_seq`: every sequence has exactly one row.
    `max_k` bounds the contexts, tokens: the longest one, or for a captured graph the longest there
    may be. `cut` holds the tensors of the batch behind bounded replay's cut, None without one.
    """

    token_ids: Tensor
    positions: Tensor
    seq_of_row: Tensor
    starts: Tensor
    cu_q: Tensor
    k_len: Tensor
    block_tables: Tensor
    slots: Tensor
    given_len: Tensor
    logit_rows: Tensor
    window_from: Tensor
    max_k: int
    one_per_seq: bool = False
    is_image: Tensor | None = None
    cut: Mapping[str, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_kept(self) -> int:
        """Rows that go on behind bounded replay's cut: all of them without one."""
        return self.num_rows if self.cut is None else self.cut["rows"].shape[0]

    @property
    def num_seqs(self) -> int:
        return self.k_len.shape[0]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @classmethod
    def build(
        cls,
        items: Sequence[BatchItem],
        token_ids: Sequence[int] | Tensor,
        device: torch.device | str = "cpu",
        *,
        replay_keep_tokens: int = 0,
        is_image: Tensor | None = None,
    ) -> "Batch":
        """Lay out `items`, whose new tokens stand in `token_ids` one sequence after another.

        `replay_keep_tokens` > 0 turns bounded replay on (docs/model.md, "Two halves"): consumer
        layers compute only the last that many positions of each prompt. Asserts that items fit
        together.
        """
        ids = token_ids.cpu().numpy() if isinstance(token_ids, Tensor) else token_ids
        host = HostBatch.lay_out(BatchColumns.of(items), ids, replay_keep_tokens=replay_keep_tokens)
        return cls.place(host, Staging(device).upload(host.arrays), is_image=is_image)

    @classmethod
    def place(
        cls, host: HostBatch, tensors: Mapping[str, Tensor], *, max_k: int | None = None,
        is_image: Tensor | None = None,
    ) -> "Batch":  # fmt: skip
        """Make a batch of `host`'s arrays, which stand on a device as `tensors`.

        `max_k` replaces the longest context by a bound on later ones.
        """
        own = {name: tensors[name] for name in host.arrays if not name.startswith("cut.")}
        cut = {name[4:]: tensors[name] for name in host.arrays if name.startswith("cut.")}
        bound = host.max_k if max_k is None else max_k
        one_per_seq = len(host.arrays["positions"]) == len(host.arrays["k_len"])  # none has none
        return cls(**own, max_k=bound, one_per_seq=one_per_seq, is_image=is_image,
                   cut=cut if host.is_cut else None)  # fmt: skip

    def consumer_rows(self) -> tuple["Batch", Tensor]:
        """Cut to the rows bounded replay keeps: the smaller batch, and its rows' numbers here.

        Windows of the smaller batch do not reach behind the cut. A sequence with no row left stays
        with q = 0, and writes nothing.
        """
        assert self.cut is not None, "this batch has no cut"
        arrays: dict[str, Any] = dict(self.cut)
        rows = arrays.pop("rows")
        is_image = None if self.is_image is None else self.is_image[rows]
        cut = replace(self, token_ids=self.token_ids[rows], is_image=is_image, cut=None,
                      one_per_seq=False, **arrays)  # fmt: skip
        return cut, rows
