"""A step plan as host arrays: rows, memory, where tokens come from, and what is sampled.

Everything is read off the requests when the step is launched: by the time it runs they have moved
on. Read next: `step_program.py` (what the device makes of it), `runner.py`.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mdi_exec.engine.request_state import RequestState, ints32
from mdi_exec.engine.sampling import Draw, SamplingParams, draw_columns, sampling_needs
from mdi_exec.model.batch import BLOCK_TOKENS, BatchColumns, BatchItem, HostBatch
from mdi_exec.model.staging import Array
from mdi_exec.ops.sampler import SamplingNeeds
from mdi_shared.plan import StepPlan

GIVEN = -1  # source of a row whose token the host knows
_ALL_GIVEN = array("q", [GIVEN])
_TO_COME = ints32([0])
NOTHING_ASKED = SamplingParams(temperature=0.0, seq_seed=0)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What all steps of one captured graph have in common: rows, sequences, longest context.

    A decode step has a row per sequence. A prefill step has more rows than sequences, and at least
    one of its sequences is a placeholder, which takes the rows that are left over.
    """

    rows: int
    seqs: int
    max_k: int

    @property
    def table_width(self) -> int:
        return -(-self.max_k // BLOCK_TOKENS)

    def padding(self, rows: int, seqs: int) -> list[BatchItem]:
        """Return the placeholders that fill up a step of so many rows and sequences."""
        missing = self.seqs - seqs
        if not missing:
            assert rows == self.rows, f"{self.rows - rows} rows are left to no sequence"
            return []
        return [placeholder(self.rows - rows - missing + 1), *[placeholder(1)] * (missing - 1)]

    def placeholders(self) -> "StepInputs":
        """Return a step of placeholders alone."""
        host = HostBatch.lay_out(
            BatchColumns.of(self.padding(0, 0)), [0] * self.rows, table_width=self.table_width
        )
        draws = [Draw(NOTHING_ASKED, 0, 0)] * self.seqs
        return step_inputs(host, _ALL_GIVEN * self.rows, [], draws, self)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on the host.

    `arrays` are what the device gets: those of `host`, `sources` int64 [T] (which of the last
    step's samples a row's token is, GIVEN = the token given), and `draw.*`, those of
    `SamplingRows` for `draws`. `requests` are asked for a token each, in order; further draws
    belong to nobody: they fill a step up to the `shape` of a captured graph.
    """

    host: HostBatch
    arrays: dict[str, Array]
    requests: list[RequestState]
    draws: list[Draw]
    needs: SamplingNeeds
    shape: GraphShape | None = None

    @property
    def num_rows(self) -> int:
        return len(self.host.arrays["token_ids"])

    @property
    def num_kept_rows(self) -> int:
        """Rows behind bounded replay's cut; all of them where there is none."""
        return len(self.host.arrays["cut.rows"]) if self.host.is_cut else self.num_rows

    @property
    def requests_of_rows(self) -> list[RequestState]:
        """The request of each draw that belongs to one: several in a row where it has drafts."""
        if not self.num_drafting or not self.requests:
            return self.requests
        lengths = np.diff(self.host.arrays["cu_q"]).tolist()
        return [r for r, length in zip(self.requests, lengths, strict=True) for _ in range(length)]

    @property
    def num_drafting(self) -> int:
        """Sequences that drafts are made for, placeholders included; 0 in a step without."""
        return len(self.arrays.get("previous", ()))

    @property
    def graph_size(self) -> int:
        """Rows of the captured graph that runs the step; 0 = none does."""
        return 0 if self.shape is None else self.shape.rows


def placeholder_prompt(rows: int) -> StepInputs:
    """Return a prefill step of one made-up prompt, which lives in the reserved slot and block.

    With one row it is also what an idle rank runs in either kind of step: q = k = 1
    (docs/rules.md, R27).
    """
    host = HostBatch.lay_out(BatchColumns.of([placeholder(rows)]), [0] * rows)
    return step_inputs(host, _ALL_GIVEN * rows, [], [Draw(NOTHING_ASKED, 0, 0)], None)


def sizes_up_to(max_rows: int) -> list[int]:
    """Return numbers of rows between which no kernel differs: 2^n and 3 * 2^n, and `max_rows`."""
    doubled = [1 << bit for bit in range(max_rows.bit_length())]
    sizes = {*doubled, *(rows * 3 // 2 for rows in doubled), max_rows}
    return sorted(rows for rows in sizes if rows <= max_rows)


def placeholder(rows: int) -> BatchItem:
    """Return rows of nobody, in the reserved slot and block."""
    return BatchItem(rows, rows, 0, (0,) * -(-rows // BLOCK_TOKENS), 1)


def gather_inputs(
    plan: StepPlan,
    requests: Sequence[RequestState],
    sample_of: Mapping[int, int],
    *,
    replay_keep_tokens: int = 0,
    shape: GraphShape | None = None,
) -> StepInputs:
    """Read a step off its plan and `requests`, its sequences in plan order; updates block tables.

    `sample_of` maps sequence ids to their samples of the step before, for tokens that have not
    reached the host. The step is padded to `shape`, where every sequence has logits: those of an
    unfinished prompt are computed and left.
    """
    num_sampled = len(requests) - plan.is_partial
    sampled = list(requests[:num_sampled])
    # k is also the index of the token being generated (docs/rules.md, R29).
    qs, ks = plan.qs, plan.ks
    draws = [Draw(request.params, k, k - request.prompt_len)
             for request, k in zip(sampled, ks, strict=False)]  # fmt: skip
    token_ids, sources = _tokens(plan, requests, (qs, ks), sample_of)
    seqs = BatchColumns(
        qs, ks, plan.slots, updated_tables(plan, requests),
        [1] * num_sampled + [0 if shape is None else 1] * plan.is_partial,
        plan.full_lens,
        [request.prompt_len for request in requests],
    )  # fmt: skip
    if shape is not None:
        padding = shape.padding(len(token_ids), len(requests))
        added = shape.rows - len(token_ids)
        seqs = seqs.padded(padding)
        token_ids += _TO_COME * added
        sources += _ALL_GIVEN * added
        draws += [Draw(NOTHING_ASKED, 0, 0)] * (shape.seqs - len(draws))
    host = HostBatch.lay_out(
        seqs,
        token_ids,
        # A decode row lies behind every cut, and its window does not reach back to one: where it
        # stands beside prompts, its own cut, a window behind k at least, drops nothing either.
        replay_keep_tokens=replay_keep_tokens if plan.is_prefill else 0,
        table_width=shape.table_width if shape is not None else 0,
    )
    return step_inputs(host, sources, sampled, draws, shape)


def _tokens(
    plan: StepPlan, requests: Sequence[RequestState],
    lengths: tuple[tuple[int, ...], tuple[int, ...]], sample_of: Mapping[int, int],
) -> "tuple[array[int], array[int]]":  # fmt: skip
    """Return each row's token, and which of the last step's samples it is (GIVEN: none)."""
    token_ids, sources = ints32(), array("q")
    for seq_id, q, k, request in zip(plan.seq_ids, *lengths, requests, strict=True):
        if k <= len(request.tokens):
            token_ids += request.tokens[k - q : k]
            sources += _ALL_GIVEN * q
        else:
            assert plan.decodes, f"{request.req_id!r}: a prompt token is missing"
            token_ids += _TO_COME
            sources.append(sample_of[seq_id])
    return token_ids, sources


def updated_tables(plan: StepPlan, requests: Sequence[RequestState]) -> "list[array[int]]":
    """Bring the requests' block tables up to a plan and return them (see `StepPlan`)."""
    if plan.taken or plan.rows_each > 1:  # without drafts nobody gives a block back
        columns = zip(requests, plan.num_blocks, plan.new_blocks, strict=True)
        for request, num_blocks, new_blocks in columns:
            if new_blocks or len(request.block_table) != num_blocks:
                del request.block_table[num_blocks - len(new_blocks) :]
                request.block_table.extend(new_blocks)
    return [request.block_table for request in requests]


def step_inputs(
    host: HostBatch, sources: "array[int]", requests: list[RequestState], draws: list[Draw],
    shape: GraphShape | None,
) -> StepInputs:  # fmt: skip
    """Put a step together; parameters as the fields of `StepInputs`."""
    arrays = {
        **host.arrays,
        "sources": np.array(sources, dtype=np.int64),
        **{f"draw.{name}": column for name, column in draw_columns(draws).items()},
    }
    return StepInputs(host, arrays, requests, draws, sampling_needs(draws), shape)
