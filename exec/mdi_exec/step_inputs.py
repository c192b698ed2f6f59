"""A step plan as host arrays: rows, memory, where tokens come from, and what is sampled.

Everything is read off the requests when the step is launched: by the time it runs they have moved
on. Read next: `step_program.py` (what the device makes of it), `runner.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mdi_exec.batch import BLOCK_TOKENS, BatchItem, HostBatch
from mdi_exec.request_state import RequestState
from mdi_exec.sampler import Draw, SamplingNeeds, SamplingRows
from mdi_exec.sampling import SamplingParams
from mdi_exec.staging import Array
from mdi_shared.plan import StepPlan

GIVEN = -1  # source of a row whose token the host knows
_PLACEHOLDER = BatchItem(1, 1, 0, (0,), 1)
_NOTHING_ASKED = SamplingParams(temperature=0.0, seq_seed=0)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on the host.

    `arrays` are what the device gets: those of `host`, `sources` int64 [T] (which of the last
    step's samples a row's token is, GIVEN = the token given), and `draw.*`, those of
    `SamplingRows` for `draws`. `requests` are asked for a token each, in order; further draws
    belong to placeholder rows, which pad a decode step to the size of a captured graph.
    """

    host: HostBatch
    arrays: dict[str, Array]
    requests: list[RequestState]
    draws: list[Draw]
    needs: SamplingNeeds
    graph_size: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.host.arrays["token_ids"])

    @property
    def num_kept_rows(self) -> int:
        """Rows behind bounded replay's cut; all of them where there is none."""
        return len(self.host.arrays["cut.rows"]) if self.host.is_cut else self.num_rows


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What every captured decode step of one size has in common: rows, and block table width."""

    size: int
    table_width: int

    def placeholders(self) -> StepInputs:
        """Return a step of placeholder rows alone."""
        host = HostBatch.lay_out(
            [_PLACEHOLDER] * self.size, [0] * self.size, table_width=self.table_width
        )
        draws = [Draw(_NOTHING_ASKED, 0, 0)] * self.size
        return _inputs(host, [GIVEN] * self.size, [], draws, self.size)


def placeholder_prompt(rows: int) -> StepInputs:
    """Return a prefill step of one made-up prompt, which lives in the reserved slot and block.

    With one row it is also what an idle rank runs in either kind of step: q = k = 1
    (engine-semantics §10).
    """
    item = BatchItem(rows, rows, 0, (0,) * -(-rows // BLOCK_TOKENS), 1)
    host = HostBatch.lay_out([item], [0] * rows)
    return _inputs(host, [GIVEN] * rows, [], [Draw(_NOTHING_ASKED, 0, 0)], 0)


def gather_inputs(
    plan: StepPlan,
    requests: Sequence[RequestState],
    sample_of: Mapping[int, int],
    *,
    replay_keep_tokens: int = 0,
    shape: DecodeShape | None = None,
) -> StepInputs:
    """Read a step off its plan and `requests`, its sequences in plan order; updates block tables.

    `sample_of` maps sequence ids to their samples of the step before, for tokens that have not
    reached the host. A decode step is padded to `shape`.
    """
    items, token_ids, sources = [], [], []
    sampled: list[RequestState] = []
    draws: list[Draw] = []
    num_sampled = len(requests) - plan.is_partial
    full_lens = plan.full_lens if plan.is_prefill else plan.ks
    columns = zip(plan.seq_ids, plan.qs, plan.ks, plan.slots, full_lens, requests, strict=True)
    for index, (seq_id, q, k, slot, full_len, request) in enumerate(columns):
        table = _updated_table(request, plan.num_blocks[index], plan.new_blocks[index])
        known = request.tokens[k - q : k]
        if len(known) < q:
            assert not plan.is_prefill, f"{request.req_id!r}: a prompt token is missing"
            sources.append(sample_of[seq_id])
            known = [0]
        else:
            sources += [GIVEN] * q
        token_ids += known
        is_sampled = index < num_sampled
        items.append(BatchItem(q, k, slot, table, int(is_sampled), full_len))
        if is_sampled:
            sampled.append(request)
            # k is also the index of the token being generated (engine-semantics §5.2).
            draws.append(Draw(request.params, k, k - request.prompt_len))
    padding = shape.size - len(items) if shape is not None else 0
    host = HostBatch.lay_out(
        items + [_PLACEHOLDER] * padding,
        token_ids + [0] * padding,
        # A decode row lies behind every cut, and its window does not reach back to one.
        replay_keep_tokens=replay_keep_tokens if plan.is_prefill else 0,
        table_width=shape.table_width if shape is not None else 0,
    )
    return _inputs(
        host, sources + [GIVEN] * padding, sampled,
        draws + [Draw(_NOTHING_ASKED, 0, 0)] * padding, shape.size if shape is not None else 0,
    )  # fmt: skip


def _updated_table(request: RequestState, num_blocks: int, new_blocks: Sequence[int]) -> list[int]:
    """Bring a request's block table up to a plan and return it (see `StepPlan`)."""
    table = request.block_table
    if new_blocks or len(table) != num_blocks:
        del table[num_blocks - len(new_blocks) :]
        table += new_blocks
    return table


def _inputs(
    host: HostBatch, sources: list[int], requests: list[RequestState], draws: list[Draw],
    graph_size: int,
) -> StepInputs:  # fmt: skip
    arrays = {
        **host.arrays,
        "sources": np.array(sources, dtype=np.int64),
        **{f"draw.{name}": column for name, column in SamplingRows.columns(draws).items()},
    }
    return StepInputs(host, arrays, requests, draws, SamplingNeeds.of(draws), graph_size)
