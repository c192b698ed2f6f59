"""What a trace tells scheduling policies of its requests, both worlds alike.

A run under a policy keeps the predictions it was given, so that a replay decides alike.
"""

import numpy as np
import pyarrow as pa

from mdi_shared.policies import NO_POLICY, Policy
from mdi_shared.request import NO_HINTS, Hints
from mdi_traces.columns import ints, numbers, valid_rows
from mdi_traces.requests import RequestTrace, put_column


def with_predictions(trace: RequestTrace, policy: str | Policy) -> RequestTrace:
    """Return the trace with `output_len`, an oracle, where `predicted_len` is null.

    Without a policy, as it is: nobody asks.
    """
    table = trace.table
    if policy == NO_POLICY:
        return trace
    known = valid_rows(table["predicted_len"])
    predicted = np.where(known, ints(table["predicted_len"]), ints(table["output_len"]))
    filled = put_column(table, "predicted_len", numbers(predicted, pa.int32()))
    return RequestTrace(filled, trace.metadata)


def trace_hints(trace: RequestTrace) -> list[Hints]:
    """Return the hints of each request; a session is a program."""
    names = ("predicted_len", "client", "deadline_ns", "priority", "session_id")
    table = trace.table
    if all(table[name].null_count == len(table) for name in names):
        return [NO_HINTS] * len(table)
    columns = (table[name].to_pylist() for name in names)
    return [
        Hints(predicted_len=predicted, client=client, deadline_ns=due, priority=priority or 0,
              program=session)
        for predicted, client, due, priority, session in zip(*columns, strict=True)
    ]  # fmt: skip
