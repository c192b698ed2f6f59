"""What one step of one rank computes: rows, pairs and FLOPs, as exact integers.

Lengths are the scheduled ones. `DecodeWork` gives the same numbers for a decode batch whose
contexts grow by one per step, without visiting every sequence again. Nothing here knows a machine
or a time.

Read next: `pairs.py` and `flops.py` (the formulas), `traffic.py` (bytes), `step_cost.py` (time).
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from mdi_shared.cost.flops import coefficients
from mdi_shared.cost.pairs import candidate_pairs, consumer_start, pairs, window_pairs
from mdi_shared.cost.shape import ModelShape
from mdi_shared.plan import Batch, PromptRow, StepPlan


class StepWork(NamedTuple):
    """One step of one rank.

    Rows and lengths are tokens, per sequence summed once; pairs and `key_rows` are summed over
    the layers that compute them. `logit_rows` pass the LM head; `key_rows` are index keys made.
    `core_pairs` meet selected compressed entries, `swa_pairs` the sliding window. `flops_attn` is
    what attention computes (docs/rules.md, R31), its projections included.
    """

    is_prefill: bool
    n_seqs: int
    rows: int
    consumer_rows: int
    logit_rows: int
    sum_k: int
    max_k: int
    min_k: int
    sum_qk: int
    key_rows: int
    idx_pairs_r2: int
    idx_pairs_r1: int
    core_pairs: int
    swa_pairs: int
    flops_attn: int
    flops_total: int

    @property
    def cached_rows(self) -> int:
        """Context tokens whose compressed entries the step can reach (R32)."""
        return self.sum_k


def prefill_work(shape: ModelShape, rows: Iterable[PromptRow]) -> StepWork:
    """Return the work of a prefill or mixed step whose sequences are (q, k, full prompt length).

    The prompt length matters under bounded replay only. Who decodes is a row (1, k, k): it makes
    the pairs that it makes in a decode step. No sequences means no work.
    """
    return _sum_work(shape, rows, is_prefill=True)


def decode_work(shape: ModelShape, contexts: Iterable[int], q: int = 1) -> StepWork:
    """Return the work of a decode step: `q` rows each, ending at the given context lengths."""
    return _sum_work(shape, ((q, k, k) for k in contexts), is_prefill=False)


def step_work(shape: ModelShape, plan: StepPlan) -> StepWork:
    """Return the work of a plan; an idle rank runs the placeholder row q = k = 1 (R27)."""
    if not len(plan.batch):
        return prefill_work(shape, [(1, 1, 1)]) if plan.is_prefill else decode_work(shape, [1])
    if plan.is_prefill:
        return prefill_work(shape, plan.rows)
    if plan.rows_each == 1:
        return DecodeWork(shape, plan.batch, plan.shift).at(0)
    return decode_work(shape, plan.ks, plan.rows_each)


def add_work(a: StepWork, b: StepWork) -> StepWork:
    """Return the work of a step holding the sequences of both; kinds must agree."""
    assert a.is_prefill == b.is_prefill, "a step is either prefill or decode"
    if a.n_seqs == 0:
        return b
    if b.n_seqs == 0:
        return a
    sums = StepWork._make(x + y for x, y in zip(a, b, strict=True))
    return sums._replace(
        is_prefill=a.is_prefill, max_k=max(a.max_k, b.max_k), min_k=min(a.min_k, b.min_k)
    )


def _sum_work(shape: ModelShape, rows: Iterable[PromptRow], *, is_prefill: bool) -> StepWork:
    c, keep = coefficients(shape), shape.replay_keep_tokens if is_prefill else 0
    window, topk = shape.sliding_window, shape.index_topk
    block, num_blocks = shape.candidate_block_size, shape.candidate_topk_blocks
    n_seqs = total_q = consumers = sum_k = max_k = min_k = sum_qk = 0
    made = idx_r2 = idx_r1 = core = swa = 0
    for q, k, prompt_len in rows:
        start = k - q
        assert 0 <= start < k, f"a sequence cannot run {q} rows up to context length {k}"
        first = consumer_start(q, k, prompt_len, keep)
        valid_from = max(prompt_len - keep, 0) if keep else 0
        n_seqs += 1
        total_q += q
        consumers += k - first
        sum_k += k
        max_k, min_k = max(max_k, k), min(min_k, k) if min_k else k
        sum_qk += q * k
        # Decode charges a key per row, whether or not the row completes an entry (R31).
        made += max(k // 2 - start // 2, 1) if is_prefill else q
        idx_r2 += pairs(start, k, 2)
        idx_r1 += shape.num_index_r1_layers * pairs(first, k, 1)
        idx_r1 += shape.num_candidate_layers * candidate_pairs(first, k, block, num_blocks)
        core += shape.num_core_r2_layers * pairs(start, k, 2, topk)
        core += shape.num_core_r1_layers * pairs(first, k, 1, topk)
        swa += shape.num_producer_layers * window_pairs(start, k, window)
        swa += shape.num_consumer_layers * window_pairs(first, k, window, valid_from)
    keys = shape.num_kv_source_r2_layers * made + shape.num_kv_source_r1_layers * total_q
    idx_r2 *= shape.num_index_r2_layers
    attn, total = c.flops(total_q, consumers, keys, core + swa, idx_r2 + idx_r1)
    logits = n_seqs if is_prefill else total_q
    return StepWork(
        is_prefill, n_seqs, total_q, consumers, logits, sum_k, max_k, min_k, sum_qk,
        keys, idx_r2, idx_r1, core, swa, attn, total + c.logit_row * logits,
    )  # fmt: skip


class DecodeWork:
    """A decode batch, one row per sequence, whose contexts all grow by one per step.

    Contexts are the bases of `batch`, whose members stand by falling length, and `shift`; there is
    at least one. `at(j)` equals `decode_work(shape, [k + j for k in contexts])` and takes a time
    that does not depend on the batch, except that a sum is recounted when a context has reached
    its cap. Members are only looked at when it is called.
    """

    __slots__ = ("_batch", "_blocks", "_contexts", "_groups", "_odd", "_shift", "_sums",
                 "num_seqs", "shape", "sum_k")  # fmt: skip

    def __init__(self, shape: ModelShape, batch: Batch, shift: int) -> None:
        assert batch.members, "a decode step has at least one sequence"
        self.shape = shape
        self._batch = batch
        self._shift = shift
        self.num_seqs = len(batch.members)
        self.sum_k = batch.base_sum + shift * self.num_seqs  # of the first step
        self._contexts: list[int] = []  # until they are looked at

    def _look(self) -> None:
        """Count what sums over sequences take from their contexts, once."""
        shift, shape = self._shift, self.shape
        contexts = [shift - member[0] for member in reversed(self._batch.members)]
        assert contexts[0] >= 1, f"context length {contexts[0]} holds no query row"
        self._contexts = contexts
        self._sums = [0, *accumulate(contexts)]
        self._odd = sum([k & 1 for k in contexts])
        self._groups = _CappedGroups(contexts, 0, 2, shape.index_topk)
        block = shape.candidate_block_size
        self._blocks = _CappedGroups(contexts, block - 1, block, shape.candidate_topk_blocks)

    def at(self, j: int) -> StepWork:
        """Return the work of the step `j` >= 0 steps from now."""
        if not self._contexts:
            self._look()
        c, shape, contexts, n = coefficients(self.shape), self.shape, self._contexts, self.num_seqs
        sum_k = self.sum_k + n * j
        odd = n - self._odd if j & 1 else self._odd
        keys = (shape.num_kv_source_r2_layers + shape.num_kv_source_r1_layers) * n
        idx_r2 = shape.num_index_r2_layers * ((sum_k - odd) // 2)
        idx_r1 = shape.num_index_r1_layers * sum_k
        if shape.num_candidate_layers:
            idx_r1 += shape.num_candidate_layers * shape.candidate_block_size * self._blocks.at(j)
        core = shape.num_core_r2_layers * self._groups.at(j)
        core += shape.num_core_r1_layers * self._capped(j, shape.index_topk)
        swa = shape.num_hidden_layers * self._capped(j, shape.sliding_window)
        attn, total = c.flops(n, n, keys, core + swa, idx_r2 + idx_r1)
        return StepWork(
            False, n, n, n, n, sum_k, contexts[-1] + j, contexts[0] + j, sum_k,
            keys, idx_r2, idx_r1, core, swa, attn, total + c.logit_row * n,
        )  # fmt: skip

    def _capped(self, j: int, cap: int) -> int:
        """Sum of min(k + j, cap)."""
        below = bisect_left(self._contexts, cap - j)
        return self._sums[below] + below * j + (len(self._contexts) - below) * cap


@dataclass(slots=True)
class _CappedGroups:
    """Sum of min(floor((k + j + shift) / ratio), cap) over ascending contexts k, for any j."""

    contexts: list[int]
    shift: int
    ratio: int
    cap: int
    _below: int = -1  # contexts counted in _by_phase; none yet
    _by_phase: list[int] = field(default_factory=list)

    def at(self, j: int) -> int:
        below = bisect_left(self.contexts, self.ratio * self.cap - self.shift - j)
        if below != self._below:
            self._recount(below)
        turns, phase = divmod(j, self.ratio)
        capped = len(self.contexts) - below
        return self._by_phase[phase] + below * turns + capped * self.cap

    def _recount(self, below: int) -> None:
        """Sum over the first `below` contexts, which are under the cap, for j = 0..ratio - 1."""
        members = self.contexts[:below]
        assert self.ratio <= 256, "places are counted as bytes"
        places = bytes([(k + self.shift) % self.ratio for k in members])
        counts = [places.count(place) for place in range(self.ratio)]
        total = (sum(members) + self.shift * below - sum(places)) // self.ratio
        # One more token completes a group for those at the last place of theirs.
        self._by_phase = list(accumulate(counts[:0:-1], initial=total))
        self._below = below
