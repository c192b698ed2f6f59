"""A decode step with drafts as host arrays; the counterpart of `step_inputs.gather_inputs`.

Lengths are upper bounds while a step is in flight: as if all its drafts will have been accepted.
`drafting.py` moves the rows back on the device.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from mdi_exec.engine.request_state import RequestState, ints32
from mdi_exec.engine.sampling import Draw
from mdi_exec.engine.step_inputs import (
    GIVEN,
    NOTHING_ASKED,
    StepInputs,
    placeholder,
    step_inputs,
    updated_tables,
)
from mdi_exec.model.batch import BatchColumns, HostBatch
from mdi_exec.model.staging import Array
from mdi_shared.plan import StepPlan

DRAFTED = -2  # source of a row whose token is a draft, which the device keeps


def drafted_inputs(
    plan: StepPlan, requests: Sequence[RequestState], sample_of: Mapping[int, int]
) -> StepInputs:
    """Read a decode step whose sequences have drafts off its plan; updates block tables.

    Parameters as in `gather_inputs`. Arrays beside those of other steps: `previous` int64 [n],
    which sequence of the last step each is (GIVEN: none, its length is exact); and, where a request
    has golden tokens, `golden` int64 [T, drafts + 1]: a row's, by how many drafts of the last step
    are accepted. Every row is asked for a token.
    """
    token_ids, sources, previous = ints32(), array("q"), array("q")
    draws: list[Draw] = []
    for seq_id, q, k, request in zip(plan.seq_ids, plan.qs, plan.ks, requests, strict=True):
        first = k - q
        is_known = first < len(request.tokens)
        assert not is_known or first == len(request.tokens) - 1, f"{request.req_id!r} at {first}"
        token_ids.append(request.tokens[first] if is_known else 0)
        token_ids.extend([0] * (q - 1))
        previous.append(GIVEN if is_known else sample_of[seq_id])
        sources.append(previous[-1])
        sources.extend([DRAFTED] * (q - 1))
        draws += [Draw(request.params, index, index - request.prompt_len)
                  for index in range(first + 1, k + 1)]  # fmt: skip
    seqs = BatchColumns(
        plan.qs, plan.ks, plan.slots, updated_tables(plan, requests), plan.qs, plan.ks,
        [request.prompt_len for request in requests],
    )  # fmt: skip
    made = step_inputs(HostBatch.lay_out(seqs, token_ids), sources, list(requests), draws, None)
    made.arrays["previous"] = np.array(previous, dtype=np.int64)
    if any(draw.params.golden_token_ids for draw in draws):
        made.arrays["golden"] = _golden(draws, plan.rows_each - 1)
    return made


def drafted_placeholder() -> StepInputs:
    """Return what an idle rank runs in a decode step: a row, and a block of drafts behind it."""
    host = HostBatch.lay_out(BatchColumns.of([placeholder(1)]), [0])
    made = step_inputs(host, array("q", [GIVEN]), [], [Draw(NOTHING_ASKED, 0, 0)], None)
    made.arrays["previous"] = np.array([GIVEN], dtype=np.int64)
    return made


def _golden(draws: Sequence[Draw], most: int) -> Array:
    """Return the golden token of each draw, for each number of drafts that may not be rejected."""
    rows = [
        [draw.params.golden_token(max(draw.output_index - most + held, 0))
         for held in range(most + 1)]
        for draw in draws
    ]  # fmt: skip
    return np.array(rows, dtype=np.int64)
